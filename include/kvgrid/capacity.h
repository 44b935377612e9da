// Exact sizes: bytes a token, a block, a rank; whether a model and context fit, and by how much.
#pragma once

#include <cstdint>
#include <vector>

#include <kvgrid/config.h>
#include <kvgrid/error.h>
#include <kvgrid/types.h>

namespace kvgrid {

struct CapacityRequest {
    Geometry geometry;
    int ranks = 1;
    Grid grid;                 // 0 x 0: auto
    std::int64_t context = 0;  // tokens of each sequence
    std::int64_t batch = 1;    // sequences
    NumberFormat kv_format = NumberFormat::bf16;
    int block_size = 64;
    std::int64_t memory_bytes = 0;  // of each rank; 0: fits is not judged
};

struct GroupCapacity {
    int layers = 0;
    std::int64_t window = 0;           // 0: none
    std::int64_t bytes_per_token = 0;  // all layers of the group, K and V, scales, all ranks
    std::int64_t block_bytes = 0;      // one block on one rank
    std::int64_t blocks_per_sequence =
        0;  // on one rank; of a window, those that decoding token by token holds at most
    std::int64_t rank_bytes = 0;  // batch x blocks x block_bytes
};

struct Capacity {
    Grid grid;
    double duplication_factor =
        1.0;  // bytes stored over bytes needed; 1: no KV head is stored twice
    std::int64_t bytes_per_token = 0;  // all layers and ranks, before any window is full
    std::int64_t rank_bytes = 0;
    std::int64_t total_bytes = 0;
    bool fits = true;
    std::int64_t spare_bytes = 0;  // a rank; negative: missing
    std::vector<GroupCapacity> groups;
};

// invalid_argument: the argument by name, or a byte count beyond 64 bits.
[[nodiscard]] Result<Capacity> computeCapacity(const CapacityRequest& request);

// Device blocks on one rank that a sequence of `tokens` takes in a group when it runs at most
// step_tokens at a time. Of a window, those of the step that holds most.
[[nodiscard]] std::int64_t blocksOfSequence(const LayerGroup& group, std::int64_t tokens,
                                            std::int64_t step_tokens, int block_size);

// Bytes of one block of a group on one rank that owns `local_kv_heads`: all its layers, K and V,
// scales.
[[nodiscard]] Result<std::int64_t> blockBytes(const LayerGroup& group, int local_kv_heads,
                                              int block_size, NumberFormat format);

}  // namespace kvgrid
