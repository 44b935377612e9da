// The process and the memory of suites that run through the public interface on one kind of device:
// the CPU, or, in programs with KVGRID_TEST_CUDA, GPUs that the ranks may share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <kvgrid/device_memory.h>
#include <kvgrid/process.h>

#include "comm/process.h"

namespace kvgrid::test {

#ifdef KVGRID_TEST_CUDA
inline constexpr DeviceKind device_kind = DeviceKind::cuda;
// How far outputs of K and V in bf16 may be from the oracle: products have 16-bit operands.
inline constexpr double output_bound = 4e-3;
#else
inline constexpr DeviceKind device_kind = DeviceKind::cpu;
inline constexpr double output_bound = 1e-5;
#endif

// The transport is kvgrid's own choice unless KVGRID_TEST_TRANSPORT names one.
inline ProcessOptions deviceOptions() {
    ProcessOptions options;
    options.device = device_kind;
    options.share_gpu = device_kind == DeviceKind::cuda;
    if (const char* const wanted = std::getenv("KVGRID_TEST_TRANSPORT")) {
        options.transport =
            std::string_view(wanted) == "nccl" ? TransportKind::nccl : TransportKind::mpi;
    }
    return options;
}

// A suite whose tests share one process; skipped where the GPU or the transport is not here.
class OnDeviceProcess : public testing::Test {
protected:
    static void SetUpTestSuite() {
        Result<Process> started = Process::start(deviceOptions());
        if (started) {
            process = new Process(std::move(*started));
            return;
        }
        if (started.error().code != ErrorCode::unavailable) throw Error(started.error());
        missing = started.error().message;
    }
    static void TearDownTestSuite() {
        delete process;
        process = nullptr;
    }
    void SetUp() override {
        if (process == nullptr) GTEST_SKIP() << missing;
    }

    static inline Process* process = nullptr;
    static inline std::string missing;
};

// An array where the cache's inputs and outputs lie. It ends only after all work that was enqueued
// without a stream of the caller's own.
template <typename T>
class DeviceVector {
public:
    // Every bit set: NaN, until something is written.
    DeviceVector(Process& process, std::size_t count)
        : process_(&process),
          count_(count),
          memory_(DeviceMemory::create(process, static_cast<std::int64_t>(
                                                    std::max<std::size_t>(count, 1) * sizeof(T)))
                      .value()) {
        poison();
    }
    DeviceVector(Process& process, const std::vector<T>& values)
        : DeviceVector(process, values.size()) {
        upload(values);
    }
    DeviceVector(DeviceVector&& other) noexcept
        : process_(std::exchange(other.process_, nullptr)),
          count_(other.count_),
          memory_(std::move(other.memory_)) {}
    DeviceVector& operator=(DeviceVector&&) = delete;
    ~DeviceVector() {
        if (process_ != nullptr) process_->synchronize();
    }

    [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }
    [[nodiscard]] std::size_t size() const { return count_; }

    void poison() { memory_.fill(0xFF); }
    // The first values; those behind them stay.
    void upload(const std::vector<T>& values) {
        EXPECT_TRUE(memory_.upload(std::as_bytes(std::span(values))));
    }
    [[nodiscard]] std::vector<T> download() const { return download(count_); }
    [[nodiscard]] std::vector<T> download(std::size_t count) const {
        std::vector<T> values(count);
        EXPECT_TRUE(memory_.download(std::as_writable_bytes(std::span(values))));
        return values;
    }

private:
    Process* process_;
    std::size_t count_;
    DeviceMemory memory_;
};

// What lies at an address of device memory that kvgrid gave.
template <typename T>
std::vector<T> downloaded(Process& process, const void* source, std::size_t count) {
    Device& device = *process.state().device;
    std::vector<T> values(count);
    device.copy(values.data(), source, count * sizeof(T), device.defaultStream());
    device.synchronize(device.defaultStream());
    return values;
}

}  // namespace kvgrid::test
