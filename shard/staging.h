// Small uploads from host to device without a wait on the way: a ring of page-locked buffers, each
// guarded by an event, so that no buffer is written again before its copies ran.
#pragma once

#include <array>
#include <cstddef>

#include <kvgrid/error.h>

#include "kernels/device.h"

namespace kvgrid {

class StagingRing {
public:
    // does_not_fit: the page-locked memory.
    [[nodiscard]] static Result<StagingRing> create(Device& device, std::size_t buffer_bytes);

    // `source` may be reused when the call returns. Larger uploads are split; the host waits only
    // when the ring has gone once around.
    void upload(void* destination, const void* source, std::size_t bytes, StreamView stream);

private:
    struct Slot {
        Buffer memory;
        Event copied;
    };

    explicit StagingRing(std::array<Slot, 2> slots) : slots_(std::move(slots)) {}
    void next(StreamView stream);

    std::array<Slot, 2> slots_;
    std::size_t current_ = 0;
    std::size_t used_ = 0;
};

}  // namespace kvgrid
