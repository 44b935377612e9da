#include <kvgrid/capacity.h>

#include <algorithm>
#include <optional>
#include <string>

#include "shard/ownership.h"
#include "src/checked_math.h"
#include "src/geometry_checks.h"

namespace kvgrid {

namespace {

tl::unexpected<Failure> tooLarge(const std::string& what) {
    return failure(ErrorCode::invalid_argument, what + " is beyond 64 bits");
}

// K and V of one KV head in one layer of a block, scales and their padding included.
std::int64_t headBlockBytes(const LayerGroup& group, int block_size, NumberFormat format) {
    const auto element = static_cast<std::int64_t>(bytesPerElement(format));
    return 2 * (group.head_dim * element * block_size + scaleBytes(format, block_size));
}

std::int64_t ceilDivide(std::int64_t dividend, std::int64_t divisor) {
    return dividend / divisor + (dividend % divisor != 0 ? 1 : 0);
}

Result<void> validateRequest(const CapacityRequest& request) {
    if (const auto checked = checkGeometry(request.geometry); !checked) return checked;
    if (const auto checked = checkBlockSize(request.block_size); !checked) return checked;
    if (request.context < 1) {
        return failure(ErrorCode::invalid_argument,
                       "context " + std::to_string(request.context) + ": at least 1 token");
    }
    if (request.batch < 1) {
        return failure(ErrorCode::invalid_argument,
                       "batch " + std::to_string(request.batch) + ": at least 1 sequence");
    }
    if (request.memory_bytes < 0) {
        return failure(ErrorCode::invalid_argument,
                       "memory bytes " + std::to_string(request.memory_bytes) + " are negative");
    }
    return {};
}

Result<GroupCapacity> groupCapacity(const LayerGroup& group, const CapacityRequest& request,
                                    const Grid& grid) {
    const auto layers = static_cast<std::int64_t>(group.layers.size());
    // A power of two, the block size divides the padding of its scales too.
    const std::int64_t head_token =
        headBlockBytes(group, request.block_size, request.kv_format) / request.block_size;
    const auto token = checkedProduct({layers, group.kv_heads, head_token});
    if (!token) return tooLarge("bytes a token");
    const auto block =
        blockBytes(group, group.kv_heads / grid.heads, request.block_size, request.kv_format);
    if (!block) return tl::unexpected(block.error());

    GroupCapacity capacity;
    capacity.layers = static_cast<int>(layers);
    capacity.window = group.window;
    capacity.bytes_per_token = *token;
    capacity.block_bytes = *block;
    capacity.blocks_per_sequence = blocksOfSequence(group, request.context, 1, request.block_size);
    const auto rank =
        checkedProduct({request.batch, capacity.blocks_per_sequence, capacity.block_bytes});
    if (!rank) {
        return tooLarge("context " + std::to_string(request.context) + " x batch " +
                        std::to_string(request.batch) + ": bytes a rank");
    }
    capacity.rank_bytes = *rank;
    return capacity;
}

}  // namespace

std::int64_t blocksOfSequence(const LayerGroup& group, std::int64_t tokens,
                              std::int64_t step_tokens, int block_size) {
    const std::int64_t all = ceilDivide(tokens, block_size);
    const std::int64_t step = std::min(step_tokens, tokens);
    if (group.window == 0 || group.window - 1 >= tokens - step) return all;
    return std::min(all, mostBlocksOfWindow(group.window, step, block_size, 1));
}

Result<std::int64_t> blockBytes(const LayerGroup& group, int local_kv_heads, int block_size,
                                NumberFormat format) {
    if (const auto checked = checkLayerGroup(group); !checked) {
        return tl::unexpected(checked.error());
    }
    if (local_kv_heads < 1 || local_kv_heads > group.kv_heads) {
        return failure(ErrorCode::invalid_argument, "local KV heads " +
                                                        std::to_string(local_kv_heads) + ": 1 to " +
                                                        std::to_string(group.kv_heads));
    }
    if (block_size < 1) {
        return failure(ErrorCode::invalid_argument,
                       "block size " + std::to_string(block_size) + ": at least 1 token");
    }
    const auto bytes = checkedProduct({static_cast<std::int64_t>(group.layers.size()),
                                       local_kv_heads, headBlockBytes(group, block_size, format)});
    if (!bytes) return tooLarge("bytes of a block");
    return *bytes;
}

Result<Capacity> computeCapacity(const CapacityRequest& request) {
    if (const auto checked = validateRequest(request); !checked) {
        return tl::unexpected(checked.error());
    }
    const auto grid = chooseGrid(request.geometry, request.ranks, request.grid);
    if (!grid) return tl::unexpected(grid.error());

    Capacity capacity;
    capacity.grid = *grid;
    for (const LayerGroup& group : request.geometry.groups) {
        const auto part = groupCapacity(group, request, *grid);
        if (!part) return tl::unexpected(part.error());
        const auto token = checkedSum({capacity.bytes_per_token, part->bytes_per_token});
        const auto rank = checkedSum({capacity.rank_bytes, part->rank_bytes});
        if (!token || !rank) return tooLarge("the sum over layer groups");
        capacity.bytes_per_token = *token;
        capacity.rank_bytes = *rank;
        capacity.groups.push_back(*part);
    }
    const auto total = checkedProduct({capacity.rank_bytes, request.ranks});
    if (!total) return tooLarge("bytes of all ranks");
    capacity.total_bytes = *total;
    if (request.memory_bytes > 0) {
        capacity.spare_bytes = request.memory_bytes - capacity.rank_bytes;
        capacity.fits = capacity.spare_bytes >= 0;
    }
    return capacity;
}

}  // namespace kvgrid
