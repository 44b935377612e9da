#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/operations.h"
#include "kernels/paging.h"

namespace kvgrid::cpu {
namespace {

constexpr std::int64_t tokens_per_task = 64;

// Tokens [begin, end), counted from first_position.
void gatherTokens(const GatherParams& params, std::int64_t begin, std::int64_t end) {
    const PoolView& pool = params.pool;
    const std::size_t row_bytes =
        static_cast<std::size_t>(params.head_dim) * bytesPerElement(pool.format);
    const std::size_t token_bytes = row_bytes * static_cast<std::size_t>(params.kv_heads);
    for (std::int64_t token = begin; token < end; ++token) {
        const std::int64_t position = params.first_position + token;
        const std::int64_t logical = position / pool.block_size;
        const std::int64_t block =
            findBlock(params.tables, params.slot, logical, pool.max_num_blocks);
        std::byte* k = static_cast<std::byte*>(params.k) + token * token_bytes;
        std::byte* v = static_cast<std::byte*>(params.v) + token * token_bytes;
        if (block == no_block) {
            std::memset(k, 0, token_bytes);
            std::memset(v, 0, token_bytes);
            continue;
        }
        const std::int64_t within = position - logical * pool.block_size;
        for (int head = 0; head < params.kv_heads; ++head, k += row_bytes, v += row_bytes) {
            const std::byte* const key = keyRow(pool, params.layer, block, head, within);
            std::memcpy(k, key, row_bytes);
            std::memcpy(v, key + pool.value_offset, row_bytes);
        }
    }
}

}  // namespace

void gather(const GatherParams& params, StreamView stream) {
    const std::int64_t tasks = (params.tokens + tokens_per_task - 1) / tokens_per_task;
    cpuDevice(stream).pool().parallelFor(tasks, [&params](std::int64_t task, int) {
        const std::int64_t begin = task * tokens_per_task;
        gatherTokens(params, begin, std::min(begin + tokens_per_task, params.tokens));
    });
}

}  // namespace kvgrid::cpu
