#include <cuda.h>

#include <array>
#include <numeric>

#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/attend_plan.h"
#include "kernels/cuda/fold_states.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/operations.h"
#include "kernels/cuda/ptx.cuh"

namespace kvgrid::cuda {
namespace {

constexpr int least_stages = 2;
// Room in the workspace for the states that attend_rows_kernel folds: of a token range of 2M with
// so many multiprocessors, of a longer one with fewer.
constexpr std::int64_t fold_levels = 12;
constexpr std::int64_t fold_blocks = 160;

// Units that a warp of attend_fold_kernel folds at a time, each lane one number of a row.
constexpr int units_at_once = 32;
static_assert(2 * fold_warps * units_at_once == 1 << most_unit_bits && units_at_once == warp_size);
// Where a team folds units of the largest tree, 2 a warp of the smallest are left.
static_assert(2 * fold_warps <= 2 << small_tree_bits);

// A row of a tree: where it lies in the workspace, in numbers.
struct TreeRow {
    const AttendLaunch& launch;
    int out;  // of the tree's first unit
    int lse;
    int stride;  // from one unit to the next
    int units;
    std::int64_t to;  // the state of the output

    __device__ TreeRow(const AttendLaunch& attend, const Unit& tree, int row) : launch(attend) {
        const AttendParams& params = launch.params;
        const auto numbers = static_cast<int>(slotNumbers(launch.tile_rows, params.head_dim));
        out = tree.workspace_slot * numbers + row * params.head_dim;
        lse = tree.workspace_slot * numbers + launch.tile_rows * params.head_dim + row;
        stride = tree.slot_stride * numbers;
        units = 1 << tree.cutBits();
        to = outputRow(params, tree, row);
    }

    [[nodiscard]] __device__ __forceinline__ bool has(int number) const {
        return number < launch.params.head_dim;
    }
    // Of unit `unit`, the numbers from `number` on; the lse.
    [[nodiscard]] __device__ __forceinline__ const float* outOf(int unit, int number) const {
        return static_cast<const float*>(launch.params.workspace) + (out + unit * stride + number);
    }
    [[nodiscard]] __device__ __forceinline__ const float* lseOf(int unit) const {
        return static_cast<const float*>(launch.params.workspace) + (lse + unit * stride);
    }
    // Of the output, the numbers from `number` on.
    [[nodiscard]] __device__ __forceinline__ float* outputFrom(int number) const {
        return launch.params.out + to * launch.params.head_dim + number;
    }
    __device__ __forceinline__ void storeLse(float of_row) const { launch.params.lse[to] = of_row; }
    __device__ __forceinline__ void store(const StatePart& state, int number) const {
        state.storeOutput(outputFrom(number));
        if (number == 0) storeLse(state.lse);
    }
};

// What a lane folds of up to 32 units, the first of which is number `unit` of the row.
__device__ __forceinline__ FoldedNumber foldUnits(const TreeRow& row, int unit, int units,
                                                  int number, bool owns, bool rehearses,
                                                  float2* weights) {
    const float* const out = row.outOf(unit, number);
    const float* const lse = rehearses ? nullptr : row.lseOf(unit);
    switch (units) {
    case 32:
        return foldNumbers<32>(out, owns, lse, row.stride, weights);
    case 16:
        return foldNumbers<16>(out, owns, lse, row.stride, weights);
    case 8:
        return foldNumbers<8>(out, owns, lse, row.stride, weights);
    case 4:
        return foldNumbers<4>(out, owns, lse, row.stride, weights);
    default:
        return foldNumbers<2>(out, owns, lse, row.stride, weights);
    }
}

// 32 numbers of a row, from `first` on, by a team of warps, each of which folds up to twice 32 of
// the units. Reads and writes no global memory if it `rehearses`.
__device__ __forceinline__ void foldRow(const TreeRow& row, int first, int team_warps,
                                        bool rehearses) {
    __shared__ float2 weights[fold_warps][warp_size];
    __shared__ __align__(16) float exchange[fold_warps][warp_size];
    __shared__ float exchange_lse[fold_warps];
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int warp_of_team = warp % team_warps;
    const int number = first + lane;
    const bool owns = row.has(number) && !rehearses;
    const int of_warp = row.units / team_warps;
    const int at_once = min(of_warp, units_at_once);
    FoldedNumber folded{0.0F, empty_lse};
#pragma unroll 1
    for (int i = 0; i < of_warp; i += at_once) {
        const FoldedNumber next = foldUnits(row, warp_of_team * of_warp + i, at_once, number, owns,
                                            rehearses, weights[warp]);
        const MergeWeights merge = mergeWeights(folded.lse, next.lse);
        folded = {mergeOut(merge, folded.out, next.out), merge.lse};
    }
    if (team_warps == 1) {
        if (owns) *row.outputFrom(number) = folded.lse == empty_lse ? 0.0F : folded.out;
        if (owns && number == 0) row.storeLse(folded.lse);
        return;
    }
    const int team_threads = team_warps * warp_size;
    const int barrier = 1 + warp / team_warps;
    exchange[warp][lane] = folded.out;
    exchange_lse[warp] = folded.lse;
    __syncwarp();
    syncThreads(barrier, team_threads);
    const FoldGroups of_warps(team_warps);
    if (warp_of_team * of_warps.numbers() < warp_size) {
        const int of_part = warp_of_team * of_warps.numbers() + of_warps.firstNumber();
        const bool is_part = of_part < warp_size;
        StatePart state;
        const int from = warp - warp_of_team + of_warps.state();
        if (is_part) state.load(exchange[from] + of_part, exchange_lse + from);
        foldGroups(of_warps, state, StatePart{});
        if (is_part && row.has(first + of_part) && of_warps.isFirst() && !rehearses)
            row.store(state, first + of_part);
    }
    __syncwarp();
    syncThreads(barrier, team_threads);
}

// Folds the units of trees that are cut into many.
__global__ void __launch_bounds__(fold_warps* warp_size, 2)
    attend_fold_kernel(const __grid_constant__ AttendLaunch launch) {
    // The launch behind this one waits for it alone, so all must wait for the one before.
    letNextLaunchStart();
    const int head_dim = launch.params.head_dim;
    const PlanHeader header = *launch.plan.header;
    const int rows = header.trees * launch.tile_rows;
    const int items = rows * ((head_dim + warp_size - 1) / warp_size);
    const int team_warps = max(min(header.most_units / units_at_once, fold_warps), 1);
    const int team = static_cast<int>(threadIdx.x) / warp_size / team_warps;
    const auto grid = static_cast<int>(gridDim.x);
    bool has_rehearsed = false;
    for (int item = team * grid + static_cast<int>(blockIdx.x); item < items;
         item += fold_warps / team_warps * grid) {
        const Unit tree = loadUnit(launch.plan.trees + item % rows / launch.tile_rows);
        if (item % launch.tile_rows >= tree.rows) continue;
        const TreeRow row(launch, tree, item % launch.tile_rows);
        // What the plan says is read before the units are there. So does the code come, which takes
        // longer than it runs: it runs once without them.
#pragma unroll 1
        for (bool rehearses = !has_rehearsed; true; rehearses = false) {
            if (!rehearses) waitForLaunchBefore();
            foldRow(row, item / rows * warp_size, team_warps, rehearses);
            if (!rehearses) break;
        }
        has_rehearsed = true;
    }
    // Who waits for this launch waits for the one before.
    waitForLaunchBefore();
}

// Shared memory of a block of threads, and of a multiprocessor.
struct SharedMemory {
    int block_bytes;
    int multiprocessor_bytes;
};

// Of a block of threads, beside what is static.
int roomFor(const AttendKernel& kernel, const SharedMemory& shared) {
    constexpr int reserved = 1024;     // by the system, of each block
    constexpr int static_bytes = 128;  // beside the dynamic, at most
    return std::min(shared.block_bytes,
                    shared.multiprocessor_bytes / kernel.blocks_per_multiprocessor - reserved) -
           static_bytes;
}

// Tiles that a ring holds, so that as many blocks of threads as wanted run at once.
int stagesFor(const AttendKernel& kernel, const SharedMemory& shared) {
    int stages = kernel.most_stages;
    while (stages > least_stages && kernel.sharedBytes(stages) > roomFor(kernel, shared))
        --stages;
    return stages;
}

bool fits(const AttendKernel& kernel, const SharedMemory& shared) {
    return kernel.sharedBytes(least_stages) <= roomFor(kernel, shared);
}

AttendKernels kernelsOf(NumberFormat format) {
    switch (format) {
    case NumberFormat::fp16:
        return fp16AttendKernels();
    case NumberFormat::bf16:
        return bf16AttendKernels();
    case NumberFormat::fp8_e4m3:
        return fp8AttendKernels();
    case NumberFormat::int8:
        return int8AttendKernels();
    case NumberFormat::fp32:
        break;
    }
    throw Error(ErrorCode::internal, "attend: K and V are fp32");
}

// As they are launched where the code is for sm_90 and newer, or for what was before.
AttendKernels kernelsOf(NumberFormat format, bool for_hopper) {
    AttendKernels kernels = kernelsOf(format);
    if (!for_hopper)
        for (AttendKernel& kernel : kernels)
            kernel.blocks_per_multiprocessor = 1;
    return kernels;
}

int blocksOf(const AttendKernel& kernel, const CudaDevice& device) {
    return device.attendBlocks() > 0 ? device.attendBlocks()
                                     : device.multiprocessors() * kernel.blocks_per_multiprocessor;
}

// Levels of a fold that wait in the workspace, of the longest sequence that the tables have.
int foldLevels(const AttendParams& params) {
    const std::int64_t stripes =
        (params.tables.stride * params.pool.block_size + stripe_tokens - 1) / stripe_tokens;
    constexpr int of_lanes = 5;  // without that of single leaves
    int levels = of_lanes;
    while (std::int64_t{lane_count} << (levels - of_lanes) < stripes)
        ++levels;
    return levels;
}

std::int64_t foldBytes(const AttendParams& params, const AttendKernel& kernel,
                       const CudaDevice& device) {
    return kernel.state_bytes == 0
               ? 0
               : std::int64_t{blocksOf(kernel, device)} * foldLevels(params) * kernel.state_bytes;
}

// Two tiles of attend_kernel should be faster than one of attend_rows_kernel (docs/kernels.md).
constexpr std::int64_t most_rows_of_small_tiles = 32;

// The kernel whose tiles hold the rows of a run of `run_rows` best: all of them in the smallest
// tile, or as many as can be.
AttendKernel kernelFor(const AttendParams& params, std::int64_t run_rows,
                       const CudaDevice& device) {
    const int group = params.kv_heads > 0 ? params.query_heads / params.kv_heads : 0;
    if (group < 1) throw Error(ErrorCode::internal, "attend: no query heads");
    const SharedMemory shared{device.sharedBytes(), device.sharedBytesOfMultiprocessor()};
    const auto workspace = static_cast<std::int64_t>(params.workspace_bytes);
    const std::int64_t rows = std::max<std::int64_t>(run_rows, 1) * group;
    AttendKernel best;
    for (const AttendKernel& kernel : kernelsOf(params.pool.format, device.overlapsLaunches())) {
        const bool better = best.tile_rows < rows
                                ? kernel.tile_rows > best.tile_rows
                                : kernel.tile_rows >= rows && kernel.tile_rows < best.tile_rows;
        // Before sm_90 a warp that copies 16 bytes a thread would not feed eight.
        const bool can = kernel.state_bytes == 0 ||
                         (rows > most_rows_of_small_tiles && device.overlapsLaunches() &&
                          fits(kernel, shared) && foldBytes(params, kernel, device) <= workspace);
        if (kernel.head_dim == params.head_dim && better && can) best = kernel;
    }
    if (best.tile_rows == 0)
        throw Error(ErrorCode::internal, "attend: head dim " + std::to_string(params.head_dim));
    return best;
}

// Several kernels may be the same function with shared memory of their own: it gets the most.
void loadKernels(const AttendKernels& kernels, const SharedMemory& shared) {
    for (const AttendKernel& kernel : kernels) {
        int bytes = 0;
        for (const AttendKernel& like : kernels)
            if (like.function == kernel.function && (like.state_bytes == 0 || fits(like, shared)))
                bytes = std::max(bytes, like.sharedBytes(stagesFor(like, shared)));
        if (bytes > 0) load(kernel.function, bytes);
    }
}

}  // namespace

bool prepareAttend(int block_bytes, int multiprocessor_bytes) {
    const SharedMemory shared{block_bytes, multiprocessor_bytes};
    load(attend_fold_kernel);
    preparePlan();
    // The GPU may be newer than the code: PTX for sm_80 can neither wait for the launch before nor
    // move registers between warps.
    constexpr int hopper_version = 90;
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, attend_fold_kernel), "cudaFuncGetAttributes");
    const bool for_hopper = attributes.ptxVersion >= hopper_version;
    for (const NumberFormat format :
         {NumberFormat::fp16, NumberFormat::bf16, NumberFormat::fp8_e4m3, NumberFormat::int8})
        loadKernels(kernelsOf(format, for_hopper), shared);
    return for_hopper;
}

std::size_t attendWorkspaceBytes(std::int64_t rows, int query_heads, int head_dim) {
    const auto bytes = [](std::int64_t numbers) {
        return static_cast<std::size_t>(numbers) * sizeof(float);
    };
    constexpr int small_rows = 2 * product_rows;
    if (rows * query_heads <= small_rows)
        return bytes(most_slots * slotNumbers(product_rows, head_dim));
    std::int64_t state_bytes = 0;
    for (const AttendKernel& kernel : kernelsOf(NumberFormat::bf16))
        if (kernel.head_dim == head_dim)
            state_bytes = std::max<std::int64_t>(state_bytes, kernel.state_bytes);
    return bytes(most_slots * slotNumbers(small_rows, head_dim)) +
           static_cast<std::size_t>(fold_levels * fold_blocks * state_bytes);
}

namespace {

// How tiles of so many tokens are copied from the pool, whose strides are whole rows.
RowBoxes boxesOf(const AttendParams& params, int tile_tokens) {
    constexpr int version = 12000;  // of CUDA, that has it
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found{};
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, version,
                                               cudaEnableDefault, &found),
              "cudaGetDriverEntryPointByVersion");
        if (found != cudaDriverEntryPointSuccess)
            throw Error(ErrorCode::unavailable, "the driver has no cuTensorMapEncodeTiled");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    constexpr int rank = 3;
    const PoolView& pool = params.pool;
    const auto row_bytes = static_cast<std::int64_t>(params.head_dim) * 2;
    RowBoxes boxes;
    boxes.rows = static_cast<int>(std::gcd(pool.block_size, std::int64_t{tile_tokens}));
    boxes.token_rows = static_cast<int>(pool.token_stride / row_bytes);
    // Of the two layouts' extents.
    const std::int64_t pool_bytes =
        std::max(pool.max_num_blocks * pool.block_stride, 2 * pool.value_offset);
    if (pool.token_stride % row_bytes != 0 || pool_bytes / pool.token_stride > INT32_MAX)
        throw Error(ErrorCode::internal, "attend: the pool's tokens are no rows, or too many");
    // Block ids are checked before a copy, so the pool's end need not be known.
    const std::array<cuuint64_t, rank> sizes{static_cast<cuuint64_t>(params.head_dim),
                                             static_cast<cuuint64_t>(boxes.token_rows), INT32_MAX};
    const std::array<cuuint64_t, rank - 1> strides{static_cast<cuuint64_t>(row_bytes),
                                                   static_cast<cuuint64_t>(pool.token_stride)};
    const std::array<cuuint32_t, rank> box{part_bytes / 2, 1, static_cast<cuuint32_t>(boxes.rows)};
    const std::array<cuuint32_t, rank> every{1, 1, 1};
    const CUresult status = encode(
        &boxes.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, rank, pool.data, sizes.data(), strides.data(),
        box.data(), every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        throw Error(ErrorCode::internal,
                    "cuTensorMapEncodeTiled: " + std::to_string(static_cast<int>(status)));
    return boxes;
}

AttendLaunch launchOf(const AttendParams& params, const AttendKernel& kernel,
                      const CudaDevice& device) {
    AttendLaunch launch;
    launch.params = params;
    launch.plan = planView(params.plan, params.plan_bytes);
    launch.blocks = blocksOf(kernel, device);
    launch.teams = kernel.teams;
    launch.tile_rows = kernel.tile_rows;
    launch.has_teams = kernel.has_teams;
    launch.stages = stagesFor(kernel, {device.sharedBytes(), device.sharedBytesOfMultiprocessor()});
    auto room = static_cast<std::int64_t>(params.workspace_bytes);
    if (kernel.state_bytes > 0) {
        launch.fold_levels = foldLevels(params);
        // Behind the slots.
        room = (room - foldBytes(params, kernel, device)) / 16 * 16;
        launch.fold = static_cast<std::byte*>(params.workspace) + room;
    }
    // Trees of up to 64 leaves are small (unitBits in attend_plan.cu), with a window too.
    launch.folds = params.max_position >= lane_count * stripe_tokens;
    launch.slots = std::min(most_slots, room / (slotNumbers(kernel.tile_rows, params.head_dim) *
                                                static_cast<std::int64_t>(sizeof(float))));
    return launch;
}

// The kernel of attends with these parameters, and which of the two plans is theirs: that for runs
// of one row, or that for params.run_rows where this is cut otherwise.
struct Choice {
    AttendKernel kernel;
    AttendParams params;

    Choice(const AttendParams& of, std::int64_t run_rows, const CudaDevice& device)
        : kernel(kernelFor(of, run_rows, device)),
          params(of) {
        const std::size_t bytes = of.plan_bytes / 32 * 16;
        if (kernel.tile_rows != kernelFor(of, 1, device).tile_rows)
            params.plan = static_cast<std::byte*>(of.plan) + bytes;
        params.plan_bytes = bytes;
    }
};

}  // namespace

void planAttend(const AttendParams& params, StreamView stream) {
    const CudaDevice& device = useDevice(stream);
    const Choice one(params, 1, device);
    launchPlan(launchOf(one.params, one.kernel, device), handleOf(stream));
    const Choice many(params, params.run_rows, device);
    if (many.params.plan != one.params.plan)
        launchPlan(launchOf(many.params, many.kernel, device), handleOf(stream));
}

void attend(const AttendParams& params, StreamView stream) {
    const CudaDevice& device = useDevice(stream);
    const Choice choice(params, params.run_rows, device);
    if (params.run_count == 0) return;
    const AttendKernel& kernel = choice.kernel;
    AttendLaunch launch = launchOf(choice.params, kernel, device);
    if (kernel.box_tokens > 0) launch.boxes = boxesOf(params, kernel.box_tokens);
    launchOverlapping(device, kernel.function, static_cast<unsigned>(launch.blocks),
                      static_cast<unsigned>(kernel.threads),
                      static_cast<std::size_t>(kernel.sharedBytes(launch.stages)), stream, launch);
    checkLaunch("attend_kernel");
    if (!launch.folds) return;
    const auto grid = static_cast<unsigned>(device.multiprocessors());
    // It may start while the last units are computed: it waits before it reads them.
    launchOverlapping(device, attend_fold_kernel, grid, fold_warps * warp_size, 0, stream, launch);
    checkLaunch("attend_fold_kernel");
}

}  // namespace kvgrid::cuda
