// A tier of blocks on one rank: the pool in device memory, or the images of blocks in host memory.
#pragma once

#include <cstdint>

#include <kvgrid/error.h>
#include <kvgrid/types.h>

#include "kernels/device.h"
#include "kernels/ops.h"
#include "shard/pool_layout.h"

namespace kvgrid {

class Pool {
public:
    // does_not_fit: blocks x block bytes, naming the bytes. 0 blocks: an empty pool.
    [[nodiscard]] static Result<Pool> onDevice(Device& device, PoolLayout layout,
                                               const BlockShape& shape, std::int64_t blocks);
    // Blocks are whole images, in whatever layout the device pool has.
    [[nodiscard]] static Result<Pool> onHost(Device& device, const BlockShape& shape,
                                             std::int64_t blocks);

    [[nodiscard]] std::int64_t blocks() const noexcept { return view_.max_num_blocks; }
    [[nodiscard]] std::int64_t bytes() const noexcept {
        return static_cast<std::int64_t>(memory_.bytes());
    }
    [[nodiscard]] const PoolView& view() const noexcept { return view_; }
    [[nodiscard]] const BlockRuns& runs() const noexcept { return runs_; }

private:
    Pool(Buffer memory, PoolLayout layout, const BlockShape& shape, std::int64_t blocks);
    Buffer memory_;
    PoolView view_;
    BlockRuns runs_;
};

}  // namespace kvgrid
