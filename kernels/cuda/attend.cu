#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/attend_plan.h"
#include "kernels/cuda/fold_states.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/operations.h"
#include "kernels/cuda/ptx.cuh"

namespace kvgrid::cuda {
namespace {

// What the workspace holds at most: enough units for many more multiprocessors than there are.
constexpr std::int64_t most_slots = 4096;
constexpr int least_stages = 2;

static_assert(fold_warps * small_tree >= 1 << most_unit_bits && small_tree == warp_size &&
              2 * small_tree / fold_warps == 4);
// Numbers of the workspace are counted by an int.
static_assert(most_slots * slotNumbers(2 * product_rows, 256) < std::int64_t{1} << 31);

// Units of which the lanes of a warp hold several numbers each; of more it is one number a lane.
constexpr int few_units = 8;

// Numbers of a row that a warp folds at a time.
__device__ __forceinline__ int numbersAtOnce(int units) {
    return units <= few_units ? FoldGroups(units).numbers() : warp_size;
}

// A row of a cut tree.
struct TreeRow {
    const float* out;  // in the slot of the tree's first unit
    const float* lse;
    int stride;  // from one unit's slot to the next's, in numbers
    int units;
    int head_dim;
    float* to_out;
    float* to_lse;

    __device__ TreeRow(const AttendLaunch& launch, const Unit& tree, int row) {
        const AttendParams& params = launch.params;
        head_dim = params.head_dim;
        const auto numbers = static_cast<int>(slotNumbers(launch.tile_rows, head_dim));
        const float* const slot =
            static_cast<const float*>(params.workspace) + tree.workspace_slot * numbers;
        out = slot + row * head_dim;
        lse = slot + launch.tile_rows * head_dim + row;
        stride = tree.slot_stride * numbers;
        units = 1 << (tree.shape.round_bits - tree.round_bits);
        const int group = params.query_heads / params.kv_heads;
        const Unit::Query query = tree.query(row, group);
        const std::int64_t to = query.row * params.query_heads + tree.kv_head * group + query.head;
        to_out = params.out + to * head_dim;
        to_lse = params.lse + to;
    }

    // Of the whole row, the lane's numbers from `number` on.
    __device__ __forceinline__ void store(const StatePart& state, int number) const {
        state.storeOutput(to_out + number);
        if (number == 0) *to_lse = state.lse;
    }
};

// A row of up to 8 units, by a warp: the numbers from `first` on that it folds at a time.
__device__ __forceinline__ void foldFewUnits(const TreeRow& row, int first) {
    const FoldGroups groups(row.units);
    const int number = first + groups.firstNumber();
    const bool owns = number < row.head_dim;
    StatePart state;
    const int at = groups.state() * row.stride;
    if (owns) state.load(row.out + at + number, row.lse + at);
    foldGroups(groups, state, StatePart{});
    if (owns && groups.isFirst()) row.store(state, number);
}

// A row of more, by a team of warps, each of which folds up to 32 of the units: 32 numbers of it.
__device__ __forceinline__ void foldManyUnits(const TreeRow& row, int first, int team_warps) {
    __shared__ float2 weights[fold_warps][warp_size];
    __shared__ __align__(16) float exchange[fold_warps][warp_size];
    __shared__ float exchange_lse[fold_warps];
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int warp_of_team = warp % team_warps;
    const int number = first + lane;
    const bool owns = number < row.head_dim;
    const int units = row.units / team_warps;
    const int at = warp_of_team * units * row.stride;
    const float* const out = row.out + at + number;
    FoldedNumber folded;
    switch (units) {
    case 32:
        folded = foldNumbers<32>(out, owns, row.lse + at, row.stride, weights[warp]);
        break;
    case 16:
        folded = foldNumbers<16>(out, owns, row.lse + at, row.stride, weights[warp]);
        break;
    case 8:
        folded = foldNumbers<8>(out, owns, row.lse + at, row.stride, weights[warp]);
        break;
    default:
        folded = foldNumbers<4>(out, owns, row.lse + at, row.stride, weights[warp]);
    }
    if (team_warps == 1) {
        if (owns) row.to_out[number] = folded.lse == empty_lse ? 0.0F : folded.out;
        if (number == 0) *row.to_lse = folded.lse;
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
        if (is_part && first + of_part < row.head_dim && of_warps.isFirst())
            row.store(state, first + of_part);
    }
    __syncwarp();
    syncThreads(barrier, team_threads);
}

// Folds the units of cut trees: those of many units first.
__global__ void __launch_bounds__(fold_warps* warp_size, 2)
    attend_fold_kernel(const __grid_constant__ AttendLaunch launch) {
    // The launch behind this one waits for it alone, so all must wait for the one before.
    letNextLaunchStart();
    const int head_dim = launch.params.head_dim;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const auto block = static_cast<int>(blockIdx.x);
    const auto grid = static_cast<int>(gridDim.x);
    const PlanHeader header = *launch.plan.header;
#pragma unroll 1
    for (int kind = 0; kind < 2; ++kind) {
        const bool large = kind == 0;
        const int rows = (large ? header.large_trees : header.small_trees) * launch.tile_rows;
        const int numbers = numbersAtOnce(large ? header.large_units : header.small_units);
        const int items = rows * ((head_dim + numbers - 1) / numbers);
        const int team_warps = large ? header.large_units / small_tree : 1;
        const int team = warp / team_warps;
        // Blocks of threads without a large tree come first to small ones.
        const int begin = team * grid + (large ? block : grid - 1 - block);
        for (int item = begin; item < items; item += fold_warps / team_warps * grid) {
            const int index = item % rows / launch.tile_rows;
            const Unit tree =
                loadUnit(launch.plan.trees + (large ? index : most_trees - 1 - index));
            if (item % launch.tile_rows >= tree.rows) continue;
            const TreeRow row(launch, tree, item % launch.tile_rows);
            const int first = item / rows * numbersAtOnce(row.units);
            if (first >= head_dim) continue;
            // What the plan says is read before.
            waitForLaunchBefore();
            if (row.units <= few_units)
                foldFewUnits(row, first);
            else
                foldManyUnits(row, first, team_warps);
        }
    }
    waitForLaunchBefore();
    if (block == 0 && threadIdx.x == 0) launch.plan.header->taken = 0;
}

// Shared memory of a block of threads, and of a multiprocessor.
struct SharedMemory {
    int block_bytes;
    int multiprocessor_bytes;
};

// Tiles that a warp's ring holds, so that as many blocks of threads as wanted run at once.
int stagesFor(const AttendKernel& kernel, const SharedMemory& shared) {
    constexpr int reserved = 1024;     // by the system, of each block
    constexpr int static_bytes = 128;  // beside the dynamic, at most
    const int room =
        std::min(shared.block_bytes,
                 shared.multiprocessor_bytes / kernel.blocks_per_multiprocessor - reserved);
    int stages = most_stages;
    while (stages > least_stages && kernel.sharedBytes(stages) > room - static_bytes)
        --stages;
    return stages;
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

AttendKernel kernelFor(const AttendParams& params, const CudaDevice& device) {
    const int group = params.kv_heads > 0 ? params.query_heads / params.kv_heads : 0;
    if (group < 1) throw Error(ErrorCode::internal, "attend: no query heads");
    const int tile_rows = group > product_rows ? 2 * product_rows : product_rows;
    for (const AttendKernel& kernel : kernelsOf(params.pool.format, device.overlapsLaunches()))
        if (kernel.head_dim == params.head_dim && kernel.tile_rows == tile_rows) return kernel;
    throw Error(ErrorCode::internal, "attend: head dim " + std::to_string(params.head_dim));
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
        for (const AttendKernel& kernel : kernelsOf(format, for_hopper))
            load(kernel.function, kernel.sharedBytes(stagesFor(kernel, shared)));
    return for_hopper;
}

std::size_t attendWorkspaceBytes(std::int64_t, int, int head_dim) {
    return static_cast<std::size_t>(most_slots * slotNumbers(product_rows, head_dim)) *
           sizeof(float);
}

namespace {

AttendLaunch launchOf(const AttendParams& params, const AttendKernel& kernel,
                      const CudaDevice& device) {
    AttendLaunch launch;
    launch.params = params;
    launch.plan = planView(params.plan, params.plan_bytes);
    launch.blocks = device.attendBlocks() > 0
                        ? device.attendBlocks()
                        : device.multiprocessors() * kernel.blocks_per_multiprocessor;
    launch.tile_rows = kernel.tile_rows;
    launch.stages = stagesFor(kernel, {device.sharedBytes(), device.sharedBytesOfMultiprocessor()});
    const std::int64_t room = static_cast<std::int64_t>(params.workspace_bytes / sizeof(float));
    // A tree of one round is not cut. One that begins behind the first stripe has all lanes.
    const std::int64_t uncut = params.window == 0 ? attend_warps * stripe_tokens : stripe_tokens;
    launch.folds = params.max_position >= uncut;
    launch.slots = std::min(most_slots, room / slotNumbers(kernel.tile_rows, params.head_dim));
    return launch;
}

}  // namespace

void planAttend(const AttendParams& params, StreamView stream) {
    const CudaDevice& device = useDevice(stream);
    const AttendKernel kernel = kernelFor(params, device);
    launchPlan(launchOf(params, kernel, device), handleOf(stream));
}

void attend(const AttendParams& params, StreamView stream) {
    const CudaDevice& device = useDevice(stream);
    const AttendKernel kernel = kernelFor(params, device);
    if (params.run_count == 0) return;
    const AttendLaunch launch = launchOf(params, kernel, device);
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
