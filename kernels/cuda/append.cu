#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/operations.h"
#include "kernels/cuda/ptx.cuh"
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

// Where a row of a run goes.
struct Place {
    std::int64_t row;  // of the step
    std::int64_t position;
    std::int64_t block;  // or no_block
    std::int64_t within;
};

__device__ Place placeOf(const AppendParams& params, const Run& run, std::int64_t row_of_run) {
    const PoolView& pool = params.pool;
    const std::int64_t position = run.first_position + row_of_run;
    const std::int64_t logical = position / pool.block_size;
    return {run.first_row + row_of_run, position,
            findBlock(params.tables, run.slot, logical, pool.max_num_blocks),
            position - logical * pool.block_size};
}

// Everything before this launch is over, and attend behind it may start: it waits before it reads
// what this writes.
__device__ __forceinline__ void letAttendStart() {
    waitForLaunchBefore();
    letNextLaunchStart();
}

// Blocks of threads: x runs, y shares of a run's rows. A thread does `count` elements at a time.
template <int count>
__global__ void __launch_bounds__(threads)
    append_kernel(const __grid_constant__ AppendParams params) {
    letAttendStart();
    const Run run = params.runs[blockIdx.x];
    const PoolView& pool = params.pool;
    const int query_heads = params.q == nullptr ? 0 : params.query_heads;
    const int packs = params.head_dim / count;
    const int items = (query_heads + 2 * params.kv_heads) * packs;
    for (std::int64_t row_of_run = blockIdx.y; row_of_run < run.rows; row_of_run += gridDim.y) {
        const Place place = placeOf(params, run, row_of_run);
        for (int item = static_cast<int>(threadIdx.x); item < items; item += threads) {
            const int at = item % packs * count;
            int head = item / packs;
            if (head < query_heads) {
                const std::int64_t head_row = place.row * params.query_heads + head;
                storeNumbers<count>(NumberFormat::fp32, params.q_rotated,
                                    head_row * params.head_dim + at,
                                    rotated<count>(params, params.q, head_row, place.row, at));
                continue;
            }
            if (place.block == no_block) continue;
            head -= query_heads;
            const bool is_key = head < params.kv_heads;
            if (!is_key) head -= params.kv_heads;
            const std::int64_t head_row = place.row * params.kv_heads + head;
            std::byte* const key = keyRow(pool, params.layer, place.block, head, place.within);
            const int to =
                storedElement(place.position, at, params.head_dim, sizeof(std::uint16_t));
            if (is_key)
                storeNumbers<count>(pool.format, key, to,
                                    rotated<count>(params, params.k, head_row, place.row, at));
            else
                storeNumbers<count>(pool.format, key + pool.value_offset, to,
                                    loadNumbers<count>(params.input_format, params.v,
                                                       head_row * params.head_dim + at));
        }
    }
}

constexpr int most_scaled_elements = 256;  // of a row that append_scaled_kernel can do

// The same for formats with scales: a warp does a row of a head, whose largest number it needs.
template <int count>
__global__ void __launch_bounds__(threads)
    append_scaled_kernel(const __grid_constant__ AppendParams params) {
    letAttendStart();
    constexpr int packs = most_scaled_elements / (warp_size * count);
    const Run run = params.runs[blockIdx.x];
    const PoolView& pool = params.pool;
    const int query_heads = params.q == nullptr ? 0 : params.query_heads;
    const int items = query_heads + 2 * params.kv_heads;
    const int first = static_cast<int>(threadIdx.x) % warp_size * count;
    for (std::int64_t row_of_run = blockIdx.y; row_of_run < run.rows; row_of_run += gridDim.y) {
        const Place place = placeOf(params, run, row_of_run);
        for (int item = static_cast<int>(threadIdx.x) / warp_size; item < items;
             item += threads / warp_size) {
            if (item < query_heads) {
                const std::int64_t head_row = place.row * params.query_heads + item;
                for (int at = first; at < params.head_dim; at += warp_size * count)
                    storeNumbers<count>(NumberFormat::fp32, params.q_rotated,
                                        head_row * params.head_dim + at,
                                        rotated<count>(params, params.q, head_row, place.row, at));
                continue;
            }
            if (place.block == no_block) continue;
            int head = item - query_heads;
            const bool is_key = head < params.kv_heads;
            if (!is_key) head -= params.kv_heads;
            const std::int64_t head_row = place.row * params.kv_heads + head;
            Pack<float, count> numbers[packs];
            std::uint32_t amax_bits = 0;
#pragma unroll
            for (int i = 0; i < packs; ++i) {
                const int at = first + i * warp_size * count;
                if (at >= params.head_dim) continue;
                numbers[i] = is_key ? rotated<count>(params, params.k, head_row, place.row, at)
                                    : loadNumbers<count>(params.input_format, params.v,
                                                         head_row * params.head_dim + at);
#pragma unroll
                for (const float number : numbers[i].values)
                    amax_bits = max(amax_bits, magnitudeBits(number));
            }
            amax_bits = __reduce_max_sync(all_lanes, amax_bits);
            const std::uint16_t scale =
                params.fixed_scales != nullptr
                    ? fixedScaleFor(amax_bits,
                                    params.fixed_scales[is_key ? head : params.kv_heads + head])
                    : scaleFor(amax_bits, pool.format == NumberFormat::fp8_e4m3
                                              ? Stored<NumberFormat::fp8_e4m3>::largest
                                              : Stored<NumberFormat::int8>::largest);
            const std::int64_t kind = is_key ? 0 : pool.value_offset;
            std::byte* const to =
                keyRow(pool, params.layer, place.block, head, place.within) + kind;
#pragma unroll
            for (int i = 0; i < packs; ++i) {
                const int at = first + i * warp_size * count;
                if (at >= params.head_dim) continue;
                storeQuantised<count>(
                    pool.format, to,
                    storedElement(place.position, at, params.head_dim, sizeof(std::uint8_t)),
                    numbers[i], fp16ToFloat(scale));
            }
            if (first == 0)
                *reinterpret_cast<std::uint16_t*>(
                    keyScale(pool, params.layer, place.block, head, place.within) + kind) = scale;
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
    load(append_scaled_kernel<1>);
    load(append_scaled_kernel<4>);
}

void append(const AppendParams& params, StreamView stream) {
    const bool scaled = hasScales(params.pool.format);
    if (!scaled && !isIn16Bits(params.pool.format))
        throw Error(ErrorCode::internal, "append: K and V are not stored as fp32");
    if (scaled && params.head_dim > most_scaled_elements)
        throw Error(ErrorCode::internal, "append: head dim " + std::to_string(params.head_dim));
    if (params.input_format != NumberFormat::fp32 && !isIn16Bits(params.input_format))
        throw Error(ErrorCode::internal, "append: the input is not fp32, fp16 or bf16");
    if (params.run_count == 0 || params.rows == 0) return;
    const CudaDevice& device = useDevice(stream);
    const dim3 grid(static_cast<unsigned>(params.run_count),
                    gridFor(std::min(params.rows, blocks_wanted / params.run_count), 65535));
    // Rows of inputs, cosines and pool that let four neighbours be one access.
    const bool wide = params.head_dim % 4 == 0 && params.rotary_dim % 8 == 0 && aligned(params.q) &&
                      aligned(params.k) && aligned(params.v);
    auto* const kernel = scaled ? (wide ? append_scaled_kernel<4> : append_scaled_kernel<1>)
                                : (wide ? append_kernel<4> : append_kernel<1>);
    launchOverlapping(device, kernel, grid, threads, 0, stream, params);
    checkLaunch(scaled ? "append_scaled_kernel" : "append_kernel");
}

}  // namespace kvgrid::cuda
