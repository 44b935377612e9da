#include "shard/staging.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace kvgrid {

Result<StagingRing> StagingRing::create(Device& device, std::size_t buffer_bytes) {
    Result<Buffer> first = Buffer::onHost(device, buffer_bytes);
    if (!first) return tl::unexpected<Failure>(first.error());
    Result<Buffer> second = Buffer::onHost(device, buffer_bytes);
    if (!second) return tl::unexpected<Failure>(second.error());
    return StagingRing(
        {Slot{std::move(*first), Event(device)}, Slot{std::move(*second), Event(device)}});
}

void StagingRing::upload(void* destination, const void* source, std::size_t bytes,
                         StreamView stream) {
    auto* to = static_cast<std::byte*>(destination);
    const auto* from = static_cast<const std::byte*>(source);
    while (bytes > 0) {
        if (used_ == slots_[current_].memory.bytes()) next(stream);
        const std::size_t part = std::min(bytes, slots_[current_].memory.bytes() - used_);
        std::byte* staged = slots_[current_].memory.data() + used_;
        std::memcpy(staged, from, part);
        stream.device().copy(to, staged, part, stream);
        used_ += part;
        to += part;
        from += part;
        bytes -= part;
    }
}

void StagingRing::next(StreamView stream) {
    slots_[current_].copied.record(stream);
    current_ = (current_ + 1) % slots_.size();
    used_ = 0;
    while (!slots_[current_].copied.finished())
        std::this_thread::yield();
}

}  // namespace kvgrid
