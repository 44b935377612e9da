// Where a token lies in the pool: one piece of index arithmetic for every operation and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/ops.h"

namespace kvgrid {

inline constexpr std::int64_t no_block = -1;

// The physical block of a sequence's logical block, or no_block when the table's row ends before it
// or the id is outside [0, max_num_blocks): table entries are data, and may be anything.
KVGRID_HOST_DEVICE std::int64_t findBlock(const BlockTableView& tables, std::int32_t slot,
                                          std::int64_t logical, std::int64_t max_num_blocks) {
    if (logical >= tables.stride) return no_block;
    const std::int64_t block = tables.entries[slot * tables.stride + logical];
    return block >= 0 && block < max_num_blocks ? block : no_block;
}

// The first position that a row at `position` sees with a window, or, 0, without.
KVGRID_HOST_DEVICE constexpr std::int64_t firstSeen(std::int64_t position, std::int64_t window) {
    return window == 0 || position < window ? 0 : position - window + 1;
}

// K of a token; its V lies pool.value_offset bytes further.
KVGRID_HOST_DEVICE std::byte* keyRow(const PoolView& pool, std::int64_t layer, std::int64_t block,
                                     std::int64_t head, std::int64_t within) {
    return pool.data + layer * pool.layer_stride + block * pool.block_stride +
           head * pool.head_stride + within * pool.token_stride;
}

// The scale of K of a token, fp16, where the pool's format has scales; that of its V lies
// pool.value_offset bytes further.
KVGRID_HOST_DEVICE std::byte* keyScale(const PoolView& pool, std::int64_t layer, std::int64_t block,
                                       std::int64_t head, std::int64_t within) {
    return pool.data + layer * pool.layer_stride + block * pool.block_stride + pool.scale_offset +
           head * pool.scale_head_stride + within * 2;
}

// On CUDA: where 16-byte chunk `chunk` of a row of row_chunks lies in the row of the token at
// `position`. Rows are permuted so that one chunk of 8 consecutive tokens lies in different banks
// of shared memory, into which whole runs of rows are copied as they are. Rows of an odd number of
// chunks have that by themselves.
KVGRID_HOST_DEVICE constexpr int storedChunk(std::int64_t position, int chunk, int row_chunks) {
    const int shift = row_chunks % 8 == 0   ? 0
                      : row_chunks % 4 == 0 ? 1
                      : row_chunks % 2 == 0 ? 2
                                            : 3;
    return chunk ^ (static_cast<int>(position & 7) >> shift);
}

// The same of one element of a row of head_dim elements of element_bytes.
KVGRID_HOST_DEVICE constexpr int storedElement(std::int64_t position, int element, int head_dim,
                                               int element_bytes) {
    const int per_chunk = 16 / element_bytes;
    return storedChunk(position, element / per_chunk, head_dim / per_chunk) * per_chunk +
           element % per_chunk;
}

}  // namespace kvgrid
