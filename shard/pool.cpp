#include "shard/pool.h"

#include <string>
#include <utility>

namespace kvgrid {

namespace {

Result<std::size_t> poolBytes(const BlockShape& shape, std::int64_t blocks) {
    const Result<std::int64_t> block = blockBytes(shape);
    if (!block) return tl::unexpected<Failure>(block.error());
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(*block, blocks, &bytes)) {
        return failure(ErrorCode::does_not_fit, std::to_string(blocks) + " blocks of " +
                                                    std::to_string(*block) +
                                                    " bytes exceed 64 bits");
    }
    return static_cast<std::size_t>(bytes);
}

}  // namespace

Pool::Pool(Buffer memory, PoolLayout layout, const BlockShape& shape, std::int64_t blocks)
    : memory_(std::move(memory)),
      view_(poolView(layout, shape, blocks, memory_.data())),
      runs_(blockRuns(layout, shape, blocks, memory_.data())) {}

Result<Pool> Pool::onDevice(Device& device, PoolLayout layout, const BlockShape& shape,
                            std::int64_t blocks) {
    return poolBytes(shape, blocks)
        .and_then([&](std::size_t bytes) { return Buffer::onDevice(device, bytes); })
        .map([&](Buffer&& memory) { return Pool(std::move(memory), layout, shape, blocks); });
}

Result<Pool> Pool::onHost(Device& device, const BlockShape& shape, std::int64_t blocks) {
    return poolBytes(shape, blocks)
        .and_then([&](std::size_t bytes) { return Buffer::onHost(device, bytes); })
        .map([&](Buffer&& memory) {
            return Pool(std::move(memory), PoolLayout::block_major, shape, blocks);
        });
}

}  // namespace kvgrid
