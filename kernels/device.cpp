#include "kernels/device.h"

#include <utility>

namespace kvgrid {

Buffer::Buffer(Device& device, std::byte* data, std::size_t bytes, bool on_host) noexcept
    : device_(&device),
      data_(data),
      bytes_(bytes),
      on_host_(on_host) {}

Result<Buffer> Buffer::onDevice(Device& device, std::size_t bytes) {
    auto* data = static_cast<std::byte*>(device.allocate(bytes));
    if (data == nullptr && bytes > 0)
        return failure(ErrorCode::does_not_fit,
                       "no " + std::to_string(bytes) + " bytes of device memory left (" +
                           std::to_string(device.freeMemory()) + " bytes are free)");
    return Buffer(device, data, bytes, false);
}

Result<Buffer> Buffer::onHost(Device& device, std::size_t bytes) {
    auto* data = static_cast<std::byte*>(device.allocateHost(bytes));
    if (data == nullptr && bytes > 0)
        return failure(ErrorCode::does_not_fit,
                       "no " + std::to_string(bytes) + " bytes of host memory left");
    return Buffer(device, data, bytes, true);
}

Buffer::Buffer(Buffer&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      on_host_(other.on_host_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(on_host_, other.on_host_);
    return *this;
}

Buffer::~Buffer() {
    if (data_ == nullptr) return;
    if (on_host_)
        device_->deallocateHost(data_, bytes_);
    else
        device_->deallocate(data_, bytes_);
}

Stream::Stream(Stream&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      handle_(other.handle_) {}

Stream& Stream::operator=(Stream&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    return *this;
}

Stream::~Stream() {
    if (device_ != nullptr) device_->destroyStream(handle_);
}

Event::Event(Event&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      handle_(other.handle_) {}

Event& Event::operator=(Event&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    return *this;
}

Event::~Event() {
    if (device_ != nullptr) device_->destroyEvent(handle_);
}

Graph::Graph(Graph&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      handle_(other.handle_) {}

Graph& Graph::operator=(Graph&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    return *this;
}

Graph::~Graph() {
    if (device_ != nullptr) device_->destroyGraph(handle_);
}

}  // namespace kvgrid
