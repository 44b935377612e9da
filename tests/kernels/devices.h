// The devices over which the operation suites run. A new device joins by one traits type in
// Devices.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/device.h"
#include "kernels/ops.h"

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

struct CpuDeviceTraits {
    static constexpr const char* name = "cpu";
    static std::unique_ptr<Device> make(int threads) { return makeCpuDevice(threads); }
    // Device memory of any size, zeros; null data when the machine cannot.
    static std::unique_ptr<SparseMemory> makeSparse(Device&, std::size_t bytes) {
        return std::make_unique<SparseMemory>(bytes);
    }
};

using Devices = ::testing::Types<CpuDeviceTraits>;

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

// Equal bits, NaN included.
template <typename T>
[[nodiscard]] bool sameBits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace kvgrid::test
