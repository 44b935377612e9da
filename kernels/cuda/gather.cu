#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/operations.h"
#include "kernels/paging.h"

namespace kvgrid::cuda {
namespace {

constexpr int threads = 128;
constexpr std::int64_t most_blocks = 1 << 20;

struct GatherLaunch {
    GatherParams params;
    int row_packs;  // of 16 bytes
};

// A token a block of threads, 16 bytes a thread.
__global__ void __launch_bounds__(threads)
    gather_kernel(const __grid_constant__ GatherLaunch launch) {
    const GatherParams& params = launch.params;
    const PoolView& pool = params.pool;
    const int row_packs = launch.row_packs;
    const int items = 2 * params.kv_heads * row_packs;
    for (std::int64_t token = blockIdx.x; token < params.tokens; token += gridDim.x) {
        const std::int64_t position = params.first_position + token;
        const std::int64_t logical = position / pool.block_size;
        const std::int64_t within = position - logical * pool.block_size;
        const std::int64_t block =
            findBlock(params.tables, params.slot, logical, pool.max_num_blocks);
        for (int item = static_cast<int>(threadIdx.x); item < items; item += threads) {
            const int pack = item % row_packs;
            const int head = item / row_packs % params.kv_heads;
            const bool is_key = item < items / 2;
            uint4 data = make_uint4(0, 0, 0, 0);
            if (block != no_block) {
                const std::byte* const key = keyRow(pool, params.layer, block, head, within);
                data = reinterpret_cast<const uint4*>(
                    is_key ? key : key + pool.value_offset)[storedChunk(position, pack, row_packs)];
            }
            auto* const to = static_cast<uint4*>(is_key ? params.k : params.v);
            to[(token * params.kv_heads + head) * row_packs + pack] = data;
        }
    }
}

// The same of a format with scales: 16 numbers a thread, multiplied and rounded into params.format.
__global__ void __launch_bounds__(threads)
    gather_scaled_kernel(const __grid_constant__ GatherLaunch launch) {
    constexpr int count = 4;  // numbers written at a time
    const GatherParams& params = launch.params;
    const PoolView& pool = params.pool;
    const int row_packs = launch.row_packs;
    const int items = 2 * params.kv_heads * row_packs;
    for (std::int64_t token = blockIdx.x; token < params.tokens; token += gridDim.x) {
        const std::int64_t position = params.first_position + token;
        const std::int64_t logical = position / pool.block_size;
        const std::int64_t within = position - logical * pool.block_size;
        const std::int64_t block =
            findBlock(params.tables, params.slot, logical, pool.max_num_blocks);
        for (int item = static_cast<int>(threadIdx.x); item < items; item += threads) {
            const int pack = item % row_packs;
            const int head = item / row_packs % params.kv_heads;
            const bool is_key = item < items / 2;
            Pack<std::uint8_t, sizeof(uint4)> data{};
            float scale = 0.0F;
            if (block != no_block) {
                const std::int64_t kind = is_key ? 0 : pool.value_offset;
                const std::byte* const row = keyRow(pool, params.layer, block, head, within) + kind;
                data = reinterpret_cast<const Pack<std::uint8_t, sizeof(uint4)>*>(
                    row)[storedChunk(position, pack, row_packs)];
                scale = fp16ToFloat(*reinterpret_cast<const std::uint16_t*>(
                    keyScale(pool, params.layer, block, head, within) + kind));
            }
            const std::int64_t to = ((token * params.kv_heads + head) * row_packs + pack) *
                                    static_cast<std::int64_t>(sizeof(uint4));
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof(uint4)); i += count) {
                Pack<float, count> numbers;
#pragma unroll
                for (int j = 0; j < count; ++j)
                    numbers.values[j] = dequantised(pool.format, data.values[i + j], scale);
                storeNumbers<count>(params.format, is_key ? params.k : params.v, to + i, numbers);
            }
        }
    }
}

}  // namespace

void prepareGather() {
    load(gather_kernel);
    load(gather_scaled_kernel);
}

void gather(const GatherParams& params, StreamView stream) {
    const NumberFormat format = params.pool.format;
    const std::size_t row_bytes =
        static_cast<std::size_t>(params.head_dim) * bytesPerElement(format);
    if (row_bytes % sizeof(uint4) != 0)
        throw Error(ErrorCode::internal, "gather: head dim " + std::to_string(params.head_dim));
    const bool scaled = hasScales(format);
    if (scaled ? hasScales(params.format) : params.format != format)
        throw Error(ErrorCode::internal, "gather: another format than the pool's");
    if (params.tokens == 0) return;
    useDevice(stream);
    auto* const kernel = scaled ? gather_scaled_kernel : gather_kernel;
    kernel<<<gridFor(params.tokens, most_blocks), threads, 0, handleOf(stream)>>>(
        {params, static_cast<int>(row_bytes / sizeof(uint4))});
    checkLaunch(scaled ? "gather_scaled_kernel" : "gather_kernel");
}

}  // namespace kvgrid::cuda
