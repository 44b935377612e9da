#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/operations.h"
#include "kernels/paging.h"

namespace kvgrid::cuda {
namespace {

constexpr int threads = 256;
// Blocks of threads that share a run's rows, so many that all together fill a GPU.
constexpr std::int64_t blocks_wanted = 1024;

// Elements [at, at + count) of a head, rotated as ops.h says: each product and sum is rounded by
// itself. `row` counts rows of the step.
template <int count>
__device__ Pack<float, count> rotated(const AppendParams& params, const void* head_rows,
                                      std::int64_t head_row, std::int64_t row, int at) {
    const std::int64_t base = head_row * params.head_dim;
    Pack<float, count> numbers = loadNumbers<count>(params.input_format, head_rows, base + at);
    if (at >= params.rotary_dim) return numbers;
    const int half = params.rotary_dim / 2;
    const bool low = at < half;
    const int angle = low ? at : at - half;
    const auto others =
        loadNumbers<count>(params.input_format, head_rows, base + (low ? at + half : at - half));
    const auto cosines = loadNumbers<count>(NumberFormat::fp32, params.cosines, row * half + angle);
    const auto sines = loadNumbers<count>(NumberFormat::fp32, params.sines, row * half + angle);
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const float own = __fmul_rn(numbers.values[i], cosines.values[i]);
        const float other = __fmul_rn(others.values[i], sines.values[i]);
        numbers.values[i] = low ? __fsub_rn(own, other) : __fadd_rn(own, other);
    }
    return numbers;
}

// Blocks of threads: x runs, y shares of a run's rows. A thread does `count` elements at a time.
template <int count>
__global__ void __launch_bounds__(threads)
    append_kernel(const __grid_constant__ AppendParams params) {
    const Run run = params.runs[blockIdx.x];
    const PoolView& pool = params.pool;
    const int query_heads = params.q == nullptr ? 0 : params.query_heads;
    const int packs = params.head_dim / count;
    const int items = (query_heads + 2 * params.kv_heads) * packs;
    for (std::int64_t row_of_run = blockIdx.y; row_of_run < run.rows; row_of_run += gridDim.y) {
        const std::int64_t row = run.first_row + row_of_run;
        const std::int64_t position = run.first_position + row_of_run;
        const std::int64_t logical = position / pool.block_size;
        const std::int64_t within = position - logical * pool.block_size;
        const std::int64_t block = findBlock(params.tables, run.slot, logical, pool.max_num_blocks);
        for (int item = static_cast<int>(threadIdx.x); item < items; item += threads) {
            const int at = item % packs * count;
            int head = item / packs;
            if (head < query_heads) {
                const std::int64_t head_row = row * params.query_heads + head;
                storeNumbers<count>(NumberFormat::fp32, params.q_rotated,
                                    head_row * params.head_dim + at,
                                    rotated<count>(params, params.q, head_row, row, at));
                continue;
            }
            if (block == no_block) continue;
            head -= query_heads;
            const bool is_key = head < params.kv_heads;
            if (!is_key) head -= params.kv_heads;
            const std::int64_t head_row = row * params.kv_heads + head;
            std::byte* const key = keyRow(pool, params.layer, block, head, within);
            const int to = storedElement(position, at, params.head_dim, sizeof(std::uint16_t));
            if (is_key)
                storeNumbers<count>(pool.format, key, to,
                                    rotated<count>(params, params.k, head_row, row, at));
            else
                storeNumbers<count>(pool.format, key + pool.value_offset, to,
                                    loadNumbers<count>(params.input_format, params.v,
                                                       head_row * params.head_dim + at));
        }
    }
}

bool isIn16Bits(NumberFormat format) {
    return format == NumberFormat::fp16 || format == NumberFormat::bf16;
}

bool aligned(const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

void prepareAppend() {
    load(append_kernel<1>);
    load(append_kernel<4>);
}

void append(const AppendParams& params, StreamView stream) {
    if (!isIn16Bits(params.pool.format))
        throw Error(ErrorCode::internal, "append: only fp16 and bf16 K and V are implemented");
    if (params.input_format != NumberFormat::fp32 && !isIn16Bits(params.input_format))
        throw Error(ErrorCode::internal, "append: the input is not fp32, fp16 or bf16");
    if (params.run_count == 0 || params.rows == 0) return;
    useDevice(stream);
    const dim3 grid(static_cast<unsigned>(params.run_count),
                    gridFor(std::min(params.rows, blocks_wanted / params.run_count), 65535));
    // Rows of inputs, cosines and pool that let four neighbours be one access.
    const bool wide = params.head_dim % 4 == 0 && params.rotary_dim % 8 == 0 && aligned(params.q) &&
                      aligned(params.k) && aligned(params.v);
    if (wide)
        append_kernel<4><<<grid, threads, 0, handleOf(stream)>>>(params);
    else
        append_kernel<1><<<grid, threads, 0, handleOf(stream)>>>(params);
    checkLaunch("append_kernel");
}

}  // namespace kvgrid::cuda
