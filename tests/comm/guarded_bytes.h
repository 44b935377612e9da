// Device memory with guard bytes around it, and poison in it until somebody writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/device.h"

namespace kvgrid {

class GuardedBytes {
public:
    static constexpr std::size_t guard_bytes = 256;
    static constexpr std::uint8_t guard = 0x5A;
    static constexpr std::uint8_t poison = 0xFF;  // NaN as fp32, fp16 and bf16

    GuardedBytes(Device& device, std::size_t bytes)
        : device_(&device),
          bytes_(bytes),
          buffer_(Buffer::onDevice(device, bytes + 2 * guard_bytes).value()) {
        const StreamView stream = device.defaultStream();
        device.fill(buffer_.data(), guard, guard_bytes, stream);
        device.fill(buffer_.data() + guard_bytes, poison, bytes, stream);
        device.fill(buffer_.data() + guard_bytes + bytes, guard, guard_bytes, stream);
        device.synchronize(stream);
    }
    GuardedBytes(Device& device, std::span<const std::byte> contents)
        : GuardedBytes(device, contents.size()) {
        upload(contents);
    }

    [[nodiscard]] std::span<std::byte> span() const {
        return {buffer_.data() + guard_bytes, bytes_};
    }
    template <typename T>
    [[nodiscard]] std::span<T> as() const {
        return {reinterpret_cast<T*>(span().data()), bytes_ / sizeof(T)};
    }

    void upload(std::span<const std::byte> contents, std::size_t offset = 0) const {
        device_->copy(span().data() + offset, contents.data(), contents.size(),
                      device_->defaultStream());
        device_->synchronize(device_->defaultStream());
    }
    [[nodiscard]] std::vector<std::byte> download() const { return read(guard_bytes, bytes_); }

    [[nodiscard]] bool guardsHold() const {
        const std::vector<std::byte> expected(guard_bytes, std::byte{guard});
        return read(0, guard_bytes) == expected &&
               read(guard_bytes + bytes_, guard_bytes) == expected;
    }

private:
    [[nodiscard]] std::vector<std::byte> read(std::size_t offset, std::size_t bytes) const {
        std::vector<std::byte> host(bytes);
        device_->copy(host.data(), buffer_.data() + offset, bytes, device_->defaultStream());
        device_->synchronize(device_->defaultStream());
        return host;
    }

    Device* device_;
    std::size_t bytes_;
    Buffer buffer_;
};

// Bytes that tell their sender, their receiver and their place apart.
inline std::vector<std::byte> pattern(std::size_t bytes, int from, int to = 0) {
    std::vector<std::byte> data(bytes);
    auto state = static_cast<std::uint64_t>(from * 1009 + to + 1) * 0x9E3779B97F4A7C15U;
    for (std::size_t i = 0; i < bytes; i += sizeof state) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        const std::uint64_t word = state ^ state >> 29;
        std::memcpy(data.data() + i, &word, std::min(sizeof word, bytes - i));
    }
    return data;
}

}  // namespace kvgrid
