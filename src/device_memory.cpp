#include <kvgrid/device_memory.h>

#include <string>
#include <utility>

#include "comm/process.h"
#include "kernels/device.h"

namespace kvgrid {

struct DeviceMemory::State {
    comm::ProcessState* ranks;
    Buffer buffer;

    [[nodiscard]] StreamView stream() const { return ranks->device->defaultStream(); }
    [[nodiscard]] Result<void> check(std::size_t bytes, std::int64_t offset) const {
        const auto most = static_cast<std::int64_t>(buffer.bytes());
        if (offset >= 0 && offset <= most && bytes <= static_cast<std::size_t>(most - offset))
            return {};
        return failure(ErrorCode::invalid_argument, std::to_string(bytes) + " bytes at " +
                                                        std::to_string(offset) +
                                                        " are not within " + std::to_string(most));
    }
};

DeviceMemory::DeviceMemory(std::unique_ptr<State> state) : state_(std::move(state)) {}
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;
DeviceMemory::~DeviceMemory() = default;

Result<DeviceMemory> DeviceMemory::create(Process& process, std::int64_t bytes) {
    if (bytes < 0) {
        return failure(ErrorCode::invalid_argument,
                       "bytes: " + std::to_string(bytes) + " is negative");
    }
    comm::ProcessState& ranks = process.state();
    auto buffer = Buffer::onDevice(*ranks.device, static_cast<std::size_t>(bytes));
    if (!buffer) return tl::unexpected<Failure>(buffer.error());
    return DeviceMemory(std::make_unique<State>(State{&ranks, std::move(*buffer)}));
}

std::byte* DeviceMemory::data() const noexcept {
    return state_->buffer.data();
}

std::int64_t DeviceMemory::bytes() const noexcept {
    return static_cast<std::int64_t>(state_->buffer.bytes());
}

Result<void> DeviceMemory::upload(std::span<const std::byte> source, std::int64_t offset) {
    if (auto checked = state_->check(source.size(), offset); !checked) return checked;
    state_->ranks->device->copy(data() + offset, source.data(), source.size(), state_->stream());
    state_->ranks->synchronize(state_->stream());
    return {};
}

Result<void> DeviceMemory::download(std::span<std::byte> destination, std::int64_t offset) const {
    if (auto checked = state_->check(destination.size(), offset); !checked) return checked;
    state_->ranks->device->copy(destination.data(), data() + offset, destination.size(),
                                state_->stream());
    state_->ranks->synchronize(state_->stream());
    return {};
}

void DeviceMemory::fill(std::uint8_t value) {
    state_->ranks->device->fill(data(), value, state_->buffer.bytes(), state_->stream());
}

}  // namespace kvgrid
