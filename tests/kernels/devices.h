// The devices over which the operation suites run. A device is one traits type:
//   name
//   make()                 null when it is not here; missing() says why
//   makeParallel(n)        one that cuts its work for n threads (CPU) or n blocks of threads (CUDA)
//   makeSparse(device, n)  n bytes of its memory, zeros, with data(), which is null when there is
//   no
//                          room
// Test programs are made for one kind of device each: test_kernels_gpu has KVGRID_TEST_CUDA, and
// nothing of the CPU device, so that it runs on a machine that has no more than a GPU.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/ops.h"
#ifdef KVGRID_TEST_CUDA
#include "kernels/cuda/cuda_device.h"
#endif

namespace kvgrid::test {

// Memory of which only what is touched is there, for offsets beyond 32 bits.
class SparseMemory {
public:
    explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
        void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapping != MAP_FAILED) data_ = static_cast<std::byte*>(mapping);
    }
    ~SparseMemory() {
        if (data_ != nullptr) munmap(data_, bytes_);
    }
    SparseMemory(const SparseMemory&) = delete;
    SparseMemory& operator=(const SparseMemory&) = delete;

    [[nodiscard]] std::byte* data() const { return data_; }

private:
    std::byte* data_ = nullptr;
    std::size_t bytes_;
};

#ifdef KVGRID_TEST_CUDA

// Memory of the GPU; all of it is there.
class CudaMemory {
public:
    CudaMemory(Device& device, std::size_t bytes) {
        Result<Buffer> buffer = Buffer::onDevice(device, bytes);
        if (!buffer) return;
        buffer_ = std::move(*buffer);
        device.fill(buffer_.data(), 0, bytes, device.defaultStream());
    }
    [[nodiscard]] std::byte* data() const { return buffer_.data(); }

private:
    Buffer buffer_;
};

struct CudaDeviceTraits {
    static constexpr const char* name = "cuda";
    static std::unique_ptr<Device> make() { return makeParallel(0); }
    static std::unique_ptr<Device> makeParallel(int blocks) {
        try {
            return std::make_unique<cuda::CudaDevice>(0, blocks);
        } catch (const Error& error) {
            if (error.code() != ErrorCode::unavailable) throw;
            reason() = error.what();
            return nullptr;
        }
    }
    static std::string missing() { return reason(); }
    static std::unique_ptr<CudaMemory> makeSparse(Device& device, std::size_t bytes) {
        return std::make_unique<CudaMemory>(device, bytes);
    }

private:
    static std::string& reason() {
        static std::string text;
        return text;
    }
};

using Devices = ::testing::Types<CudaDeviceTraits>;

#else

struct CpuDeviceTraits {
    static constexpr const char* name = "cpu";
    static std::unique_ptr<Device> make() { return makeCpuDevice(2); }
    static std::unique_ptr<Device> makeParallel(int threads) { return makeCpuDevice(threads); }
    static std::string missing() { return {}; }
    static std::unique_ptr<SparseMemory> makeSparse(Device&, std::size_t bytes) {
        return std::make_unique<SparseMemory>(bytes);
    }
};

using Devices = ::testing::Types<CpuDeviceTraits>;

#endif

// A test on a device; skipped where the device is not here.
template <typename Traits>
class OnDevice : public ::testing::Test {
protected:
    using Make = Traits;

    void SetUp() override {
        if (device_ == nullptr) GTEST_SKIP() << Traits::missing();
    }

    std::unique_ptr<Device> device_ = Traits::make();
};

// The formats of K and V that every device stores.
inline constexpr NumberFormat kv_formats[] = {NumberFormat::bf16, NumberFormat::fp16,
                                              NumberFormat::fp8_e4m3, NumberFormat::int8};

// How far attend may be from the oracle, ||x - reference|| / ||reference||: the bounds
// for fp32 output on the CPU, and on CUDA, where products have 16-bit operands, for output in the
// format of K and V, or in fp16 where that has one byte.
[[nodiscard]] inline double errorBound(const Device& device, NumberFormat format) {
    if (device.kind() == DeviceKind::cpu) return 1e-5;
    return format == NumberFormat::bf16 ? 4e-3 : 1e-3;
}

// Where element `element` of a row lies in the pool's row of the token at `position`, written from
// the words of ops.h: on CUDA pieces of 16 bytes are permuted among 8 consecutive tokens, as far as
// an even number of pieces allows.
[[nodiscard]] inline int storedElement(const Device& device, std::int64_t position, int element,
                                       int head_dim, NumberFormat format) {
    if (device.kind() == DeviceKind::cpu) return element;
    const int in_piece = 16 / static_cast<int>(bytesPerElement(format));
    const int pieces = head_dim / in_piece;
    const int turn = static_cast<int>(position % 8) / (pieces % 8 == 0   ? 1
                                                       : pieces % 4 == 0 ? 2
                                                       : pieces % 2 == 0 ? 4
                                                                         : 8);
    return (element / in_piece ^ turn) * in_piece + element % in_piece;
}

struct DeviceNames {
    template <typename Traits>
    static std::string GetName(int) {  // NOLINT(readability-identifier-naming): GoogleTest's name
        return Traits::name;
    }
};

// An array in device memory.
template <typename T>
class DeviceArray {
public:
    DeviceArray(Device& device, std::size_t count)
        : device_(&device),
          count_(count),
          buffer_(Buffer::onDevice(device, count * sizeof(T) + guard_bytes).value()) {}

    // All bits set: NaN for every floating-point format, out of range for block ids. Behind the
    // array come guard bytes, which expectGuardIntact looks at.
    static DeviceArray poisoned(Device& device, std::size_t count) {
        DeviceArray array(device, count);
        device.fill(array.data(), 0xFF, array.buffer_.bytes(), device.defaultStream());
        return array;
    }
    void expectGuardIntact() const {
        std::vector<std::byte> guard(guard_bytes);
        device_->copy(guard.data(), data() + count_, guard_bytes, device_->defaultStream());
        device_->synchronize(device_->defaultStream());
        EXPECT_EQ(guard, std::vector<std::byte>(guard_bytes, std::byte{0xFF}));
    }
    static DeviceArray of(Device& device, const std::vector<T>& values) {
        DeviceArray array(device, values.size());
        array.upload(values);
        return array;
    }

    void upload(const std::vector<T>& values) {
        device_->copy(data(), values.data(), values.size() * sizeof(T), device_->defaultStream());
        device_->synchronize(device_->defaultStream());
    }
    [[nodiscard]] std::vector<T> download() const {
        std::vector<T> values(count_);
        device_->copy(values.data(), data(), count_ * sizeof(T), device_->defaultStream());
        device_->synchronize(device_->defaultStream());
        return values;
    }

    [[nodiscard]] T* data() const { return buffer_.template as<T>(); }
    [[nodiscard]] std::size_t size() const { return count_; }

private:
    static constexpr std::size_t guard_bytes = 4096;

    Device* device_;
    std::size_t count_;
    Buffer buffer_;
};

// Plans and attends a step of `rows` rows, with a plan of just the bytes that such a step may need.
inline void planAndAttend(Device& device, AttendParams params, std::int64_t rows) {
    const auto plan = DeviceArray<std::byte>::poisoned(
        device, device.operations().attendPlanBytes(rows, params.run_count, params.query_heads));
    params.plan = plan.data();
    params.plan_bytes = plan.size();
    device.operations().planAttend(params, device.defaultStream());
    device.operations().attend(params, device.defaultStream());
    plan.expectGuardIntact();
}

// Equal bits, NaN included.
template <typename T>
[[nodiscard]] bool sameBits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace kvgrid::test
