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

constexpr int fold_warps = 16;
constexpr int fold_blocks_per_multiprocessor = 2;
static_assert(fold_warps * fold_most >= 1 << most_unit_bits && fold_most >= small_tree &&
              fold_warps <= 2 * small_tree);

// One row of a cut tree.
struct TreeRow {
    const float* first;   // the slot of the tree's first unit
    std::int64_t stride;  // from one unit's slot to the next's, in numbers
    int units;
    int row;          // of the tile
    int lse_at;       // of the row's lse in a slot
    std::int64_t to;  // state of the output
    bool there;

    __device__ TreeRow(const AttendLaunch& launch, const Unit& tree, int row_of_tile)
        : row(row_of_tile),
          there(row_of_tile < tree.rows) {
        const AttendParams& params = launch.params;
        const std::int64_t numbers = slotNumbers(launch.tile_rows, params.head_dim);
        first = static_cast<const float*>(params.workspace) + tree.workspace_slot * numbers;
        stride = tree.slot_stride * numbers;
        units = 1 << (tree.shape.round_bits - tree.round_bits);
        lse_at = launch.tile_rows * params.head_dim + row;
        const int group = params.query_heads / params.kv_heads;
        const Unit::Query query = tree.query(there ? row : 0, group);
        to = query.row * params.query_heads + tree.kv_head * group + query.head;
    }
};

constexpr int fold_numbers = 4 * warp_size;  // of a state, at a time

// Four numbers a lane of the out of units, from `first` on; zeros beyond the head dim.
struct UnitOuts {
    const TreeRow& tree;
    const float* units;
    int head_dim;
    int first;

    __device__ __forceinline__ float4 operator()(int index) const {
        const int at = first + 4 * (static_cast<int>(threadIdx.x) % warp_size);
        if (at >= head_dim) return make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        return *reinterpret_cast<const float4*>(units + index * tree.stride + tree.row * head_dim +
                                                at);
    }
};

// A row of a tree of many units: by a block of threads.
__device__ void foldLargeRow(const AttendParams& params, const TreeRow& tree) {
    __shared__ __align__(16) float exchange[fold_warps][fold_numbers];
    __shared__ float exchange_lse[fold_warps];
    const int head_dim = params.head_dim;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int units_per_warp = tree.units / fold_warps;
    const float* const mine = tree.first + std::int64_t{warp} * units_per_warp * tree.stride;
    FoldWeights fold;
    for (int first = 0; first < head_dim; first += fold_numbers) {
        const UnitOuts read{tree, mine, head_dim, first};
        FoldParts<float4> parts;
        parts.load(0, units_per_warp, read);
        if (first == 0) {
            fold = foldWeights(units_per_warp,
                               [&](int index) { return mine[index * tree.stride + tree.lse_at]; });
            if (lane == 0) exchange_lse[warp] = fold.lse;
        }
        *reinterpret_cast<float4*>(&exchange[warp][4 * lane]) =
            foldOuts(units_per_warp, fold, parts, read);
        __syncthreads();
        const int number = static_cast<int>(threadIdx.x);
        if (number < fold_numbers) {
            const auto readWarp = [&](int index) { return exchange[index][number]; };
            FoldParts<float> warps;
            warps.load(0, fold_warps, readWarp);
            const FoldWeights last =
                foldWeights(fold_warps, [&](int index) { return exchange_lse[index]; });
            const float out = foldOuts(fold_warps, last, warps, readWarp);
            const float lse = __shfl_sync(all_lanes, last.lse, 0);
            if (first + number < head_dim)
                params.out[tree.to * head_dim + first + number] = lse == empty_lse ? 0.0F : out;
            if (number == 0) params.lse[tree.to] = lse;
        }
        __syncthreads();
    }
}

// A row of a tree of few units: by a warp.
__device__ void foldSmallRow(const AttendParams& params, const TreeRow& tree) {
    const int head_dim = params.head_dim;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    FoldWeights fold;
    float lse = empty_lse;
    for (int first = 0; first < head_dim; first += fold_numbers) {
        const UnitOuts read{tree, tree.first, head_dim, first};
        FoldParts<float4> parts;
        parts.load(0, tree.units, read);
        if (first == 0) {
            fold = foldWeights(tree.units, [&](int index) {
                return tree.first[index * tree.stride + tree.lse_at];
            });
            lse = __shfl_sync(all_lanes, fold.lse, 0);
        }
        const float4 out = foldOuts(tree.units, fold, parts, read);
        const int at = first + 4 * lane;
        if (at < head_dim)
            *reinterpret_cast<float4*>(params.out + tree.to * head_dim + at) =
                lse == empty_lse ? make_float4(0.0F, 0.0F, 0.0F, 0.0F) : out;
    }
    if (lane == 0) params.lse[tree.to] = lse;
}

// Folds the units of cut trees.
__global__ void __launch_bounds__(fold_warps* warp_size)
    attend_fold_kernel(const __grid_constant__ AttendLaunch launch) {
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const PlanHeader header = *launch.plan.header;
    const int rows = launch.tile_rows;
    // Also where there is nothing to fold: whoever comes next waits for this launch alone.
    waitForLaunchBefore();
    letNextLaunchStart();
    if (blockIdx.x == 0 && threadIdx.x == 0) launch.plan.header->taken = 0;
    for (int item = static_cast<int>(blockIdx.x); item < header.large_trees * rows;
         item += static_cast<int>(gridDim.x)) {
        const TreeRow tree(launch, loadUnit(launch.plan.trees + item / rows), item % rows);
        if (tree.there) foldLargeRow(launch.params, tree);
    }
    // Blocks of threads without a large row come first.
    const auto block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    for (int item = warp * static_cast<int>(gridDim.x) + block; item < header.small_trees * rows;
         item += fold_warps * static_cast<int>(gridDim.x)) {
        const Unit* const unit = launch.plan.trees + most_trees - 1 - item / rows;
        const TreeRow tree(launch, loadUnit(unit), item % rows);
        if (tree.there) foldSmallRow(launch.params, tree);
    }
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
    const auto grid =
        static_cast<unsigned>(device.multiprocessors() * fold_blocks_per_multiprocessor);
    // It may start while the last units are computed: it waits before it reads them.
    launchOverlapping(device, attend_fold_kernel, grid, fold_warps * warp_size, 0, stream, launch);
    checkLaunch("attend_fold_kernel");
}

}  // namespace kvgrid::cuda
