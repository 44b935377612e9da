#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/operations.h"
#include "kernels/paging.h"

namespace kvgrid::cpu {
namespace {

constexpr std::int64_t tokens_per_task = 64;
constexpr int max_row = 1024;  // head_dim at most

// A row of the pool, as the caller wants it.
void readRow(const GatherParams& params, const std::byte* row, const std::byte* scale, void* to) {
    const NumberFormat format = params.pool.format;
    if (!hasScales(format)) {
        std::memcpy(to, row, static_cast<std::size_t>(params.head_dim) * bytesPerElement(format));
        return;
    }
    std::uint16_t bits = 0;
    std::memcpy(&bits, scale, sizeof(bits));
    alignas(64) std::array<float, max_row> numbers;
    dequantise(format, row, bits, params.head_dim, numbers.data());
    fromFloats(params.format, numbers.data(), params.head_dim, to);
}

// Tokens [begin, end), counted from first_position.
void gatherTokens(const GatherParams& params, std::int64_t begin, std::int64_t end) {
    const PoolView& pool = params.pool;
    const std::size_t row_bytes =
        static_cast<std::size_t>(params.head_dim) * bytesPerElement(params.format);
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
            const std::byte* const scale = keyScale(pool, params.layer, block, head, within);
            readRow(params, key, scale, k);
            readRow(params, key + pool.value_offset, scale + pool.value_offset, v);
        }
    }
}

}  // namespace

void gather(const GatherParams& params, StreamView stream) {
    const bool scaled = hasScales(params.pool.format);
    if (scaled ? hasScales(params.format) : params.format != params.pool.format)
        throw Error(ErrorCode::internal, "gather: another format than the pool's");
    if (params.head_dim > max_row)
        throw Error(ErrorCode::internal, "gather: head dim " + std::to_string(params.head_dim));
    const std::int64_t tasks = (params.tokens + tokens_per_task - 1) / tokens_per_task;
    cpuDevice(stream).pool().parallelFor(tasks, [&params](std::int64_t task, int) {
        const std::int64_t begin = task * tokens_per_task;
        gatherTokens(params, begin, std::min(begin + tokens_per_task, params.tokens));
    });
}

}  // namespace kvgrid::cpu
