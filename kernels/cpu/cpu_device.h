// The CPU as a device: its memory is host memory, its streams are always idle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/device.h"

namespace kvgrid::cpu {

class CpuDevice : public Device {
public:
    // threads >= 1. The calling thread counts as one of them.
    explicit CpuDevice(int threads);
    ~CpuDevice() override;

    [[nodiscard]] DeviceKind kind() const noexcept override { return DeviceKind::cpu; }
    [[nodiscard]] std::string description() const override;
    [[nodiscard]] std::string id() const override { return {}; }
    [[nodiscard]] int threads() const noexcept override { return pool_.threads(); }
    [[nodiscard]] std::int64_t freeMemory() const override;
    [[nodiscard]] const Operations& operations() const noexcept override;

    // Large pieces are touched by all threads, so that running out shows here and no later step
    // pays for page faults.
    [[nodiscard]] void* allocate(std::size_t bytes) override;
    void deallocate(void* pointer, std::size_t bytes) noexcept override;
    [[nodiscard]] void* allocateHost(std::size_t bytes) override { return allocate(bytes); }
    void deallocateHost(void* pointer, std::size_t bytes) noexcept override {
        deallocate(pointer, bytes);
    }

    [[nodiscard]] StreamView defaultStream() noexcept override { return {*this, nullptr}; }
    [[nodiscard]] void* createStream() override { return nullptr; }
    void destroyStream(void*) noexcept override {}
    // An event is when it was recorded: all earlier work was done by then.
    [[nodiscard]] void* createEvent(bool timed) override;
    void destroyEvent(void* handle) noexcept override;
    void record(void* event, StreamView stream) override;
    void wait(StreamView, void*) override {}
    [[nodiscard]] bool finished(void*) override { return true; }
    [[nodiscard]] double secondsBetween(void* from, void* to) override;

    void beginCapture(StreamView) override;
    [[nodiscard]] void* endCapture(StreamView) override { return nullptr; }
    void launchGraph(void*, StreamView) override {}
    void destroyGraph(void*) noexcept override {}
    [[nodiscard]] bool isCapturing(StreamView) override { return false; }

    void copy(void* destination, const void* source, std::size_t bytes, StreamView stream) override;
    void fill(void* destination, std::uint8_t value, std::size_t bytes, StreamView stream) override;
    void synchronize(StreamView) override {}

    [[nodiscard]] ThreadPool& pool() noexcept { return pool_; }
    // `scratch_bytes` of memory for each thread, 64-byte aligned. Only what is used is resident.
    [[nodiscard]] std::byte* scratch(int thread) noexcept {
        return scratch_ + static_cast<std::size_t>(thread) * scratch_bytes;
    }
    static constexpr std::size_t scratch_bytes = std::size_t{8} << 20;

private:
    ThreadPool pool_;
    std::byte* scratch_;
};

// The device of a stream that an operation of this folder was given.
[[nodiscard]] inline CpuDevice& cpuDevice(StreamView stream) noexcept {
    return static_cast<CpuDevice&>(stream.device());
}

}  // namespace kvgrid::cpu
