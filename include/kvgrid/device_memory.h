// Memory where the cache's inputs and outputs lie: of the GPU, or of the host on the CPU device.
// For programs that do not speak CUDA themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <kvgrid/error.h>
#include <kvgrid/process.h>

namespace kvgrid {

class DeviceMemory {
public:
    // Not initialised, 256-byte aligned. The process must outlive it. does_not_fit: none left.
    [[nodiscard]] static Result<DeviceMemory> create(Process& process, std::int64_t bytes);

    DeviceMemory(DeviceMemory&&) noexcept;
    DeviceMemory& operator=(DeviceMemory&&) noexcept;
    ~DeviceMemory();

    [[nodiscard]] std::byte* data() const noexcept;
    [[nodiscard]] std::int64_t bytes() const noexcept;

    // After all work that was enqueued without a stream of the caller's own, and over when the call
    // returns. invalid_argument: beyond the end.
    [[nodiscard]] Result<void> upload(std::span<const std::byte> source, std::int64_t offset = 0);
    [[nodiscard]] Result<void> download(std::span<std::byte> destination,
                                        std::int64_t offset = 0) const;
    // Every byte. Enqueued, like the cache's own work.
    void fill(std::uint8_t value);

private:
    struct State;
    explicit DeviceMemory(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

}  // namespace kvgrid
