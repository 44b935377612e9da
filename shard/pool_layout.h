// Strides and bytes of a block. The one place that knows how a pool lies in memory.
//
//   block_major, contiguous   [block][layer][KV head][K, V]: [token][head_dim], [token] scales
//   layer_major               [K, V][layer][block]: [token][KV head][head_dim], [KV head][token]
//                             scales
//
// Scales, of formats that have them, are 2 bytes each, and those of a block and KV head are padded
// to a multiple of 16 bytes. In block-major a KV head's K tile and V tile are adjacent: for 64
// tokens of 128 16-bit elements one 32 KB run, and a block is one run to copy to the host.
// Layer-major is the classic paged pool, pool[(layer * max_num_blocks + block) * block_size +
// within] * kv_dim, for K and then for V.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvgrid/error.h>
#include <kvgrid/types.h>

#include "kernels/ops.h"

namespace kvgrid {

// What one block of a layer group holds on one rank.
struct BlockShape {
    int layers = 0;
    int kv_heads = 0;  // of this rank
    int head_dim = 0;
    std::int64_t block_size = 0;  // tokens
    NumberFormat format = NumberFormat::bf16;
};

// Bytes of one block: layers x KV heads x 2 x (tokens x head_dim elements + scaleBytes).
// does_not_fit: beyond 64 bits.
[[nodiscard]] Result<std::int64_t> blockBytes(const BlockShape& shape);

// The pool of `blocks` blocks at `data`, and the same as runs to copy. The sizes were checked:
// blocks x blockBytes fits 64 bits.
[[nodiscard]] PoolView poolView(PoolLayout layout, const BlockShape& shape, std::int64_t blocks,
                                std::byte* data);
[[nodiscard]] BlockRuns blockRuns(PoolLayout layout, const BlockShape& shape, std::int64_t blocks,
                                  std::byte* data);

}  // namespace kvgrid
