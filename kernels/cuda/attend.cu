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
static_assert(fold_warps * fold_most >= 1 << most_unit_bits);

// Folds the units of cut trees: a row of a tree a block of threads.
__global__ void __launch_bounds__(fold_warps* warp_size)
    attend_fold_kernel(const __grid_constant__ AttendLaunch launch) {
    constexpr int at_once = 4 * warp_size;  // numbers of a state
    __shared__ __align__(16) float exchange[fold_warps][at_once];
    __shared__ float exchange_lse[fold_warps];
    const AttendParams& params = launch.params;
    const int head_dim = params.head_dim;
    const int group = params.query_heads / params.kv_heads;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int items = launch.plan.header->trees * tile_rows;
    // Also where there is nothing to fold: whoever comes next waits for this launch alone.
    waitForLaunchBefore();
    letNextLaunchStart();
    for (int item = static_cast<int>(blockIdx.x); item < items;
         item += static_cast<int>(gridDim.x)) {
        const Unit tree = loadUnit(launch.plan.trees + item / tile_rows);
        const int row = item % tile_rows;
        if (row >= tree.rows) continue;
        const int units = 1 << (tree.shape.round_bits - tree.round_bits);
        const int units_per_warp = units > fold_warps ? units / fold_warps : 1;
        const int parts = units / units_per_warp;
        const auto slotOf = [&](int index) {
            const std::int64_t unit = std::int64_t{warp} * units_per_warp + index;
            return static_cast<const float*>(params.workspace) +
                   (tree.workspace_slot + unit * tree.slot_stride) * slotNumbers(head_dim);
        };
        FoldWeights fold;
        if (warp < parts) {
            fold = foldWeights(units_per_warp, [&](int index) {
                return slotOf(index)[tile_rows * head_dim + row];
            });
            if (lane == 0) exchange_lse[warp] = fold.lse;
        }
        const Unit::Query query = tree.query(row, group);
        const std::int64_t to = query.row * params.query_heads + tree.kv_head * group + query.head;
        for (int first = 0; first < head_dim; first += at_once) {
            const int at = first + 4 * lane;
            const bool owns = at < head_dim;
            if (warp < parts)
                *reinterpret_cast<float4*>(&exchange[warp][4 * lane]) =
                    foldOuts<float4>(units_per_warp, fold, [&](int index) {
                        return owns ? *reinterpret_cast<const float4*>(slotOf(index) +
                                                                       row * head_dim + at)
                                    : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
                    });
            __syncthreads();
            const int number = static_cast<int>(threadIdx.x);
            if (number < at_once) {
                const FoldWeights last =
                    foldWeights(parts, [&](int index) { return exchange_lse[index]; });
                const auto out = foldOuts<float>(
                    parts, last, [&](int index) { return exchange[index][number]; });
                const float lse = __shfl_sync(all_lanes, last.lse, 0);
                if (first + number < head_dim)
                    params.out[to * head_dim + first + number] = lse == empty_lse ? 0.0F : out;
                if (number == 0) params.lse[to] = lse;
            }
            __syncthreads();
        }
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

AttendKernel kernelFor(NumberFormat format, int head_dim) {
    if (format != NumberFormat::fp16 && format != NumberFormat::bf16)
        throw Error(ErrorCode::internal, "attend: only fp16 and bf16 K and V are implemented");
    for (const AttendKernel& kernel :
         format == NumberFormat::fp16 ? fp16AttendKernels() : bf16AttendKernels())
        if (kernel.head_dim == head_dim) return kernel;
    throw Error(ErrorCode::internal, "attend: head dim " + std::to_string(head_dim));
}

}  // namespace

bool prepareAttend(int block_bytes, int multiprocessor_bytes) {
    const SharedMemory shared{block_bytes, multiprocessor_bytes};
    load(attend_fold_kernel);
    preparePlan();
    for (const AttendKernels& kernels : {fp16AttendKernels(), bf16AttendKernels()})
        for (const AttendKernel& kernel : kernels)
            load(kernel.function, kernel.sharedBytes(stagesFor(kernel, shared)));
    // The GPU may be newer than the code: PTX for sm_80 has no such wait.
    constexpr int overlapping_version = 90;
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, attend_fold_kernel), "cudaFuncGetAttributes");
    return attributes.ptxVersion >= overlapping_version;
}

std::size_t attendWorkspaceBytes(std::int64_t, int, int head_dim) {
    return static_cast<std::size_t>(most_slots * slotNumbers(head_dim)) * sizeof(float);
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
    launch.stages = stagesFor(kernel, {device.sharedBytes(), device.sharedBytesOfMultiprocessor()});
    const std::int64_t room = static_cast<std::int64_t>(params.workspace_bytes / sizeof(float));
    launch.slots = std::min(most_slots, room / slotNumbers(params.head_dim));
    return launch;
}

AttendKernel checkedKernel(const AttendParams& params) {
    const int group = params.kv_heads > 0 ? params.query_heads / params.kv_heads : 0;
    if (group < 1) throw Error(ErrorCode::internal, "attend: no query heads");
    return kernelFor(params.pool.format, params.head_dim);
}

}  // namespace

void planAttend(const AttendParams& params, StreamView stream) {
    const AttendKernel kernel = checkedKernel(params);
    launchPlan(launchOf(params, kernel, useDevice(stream)), handleOf(stream));
}

void attend(const AttendParams& params, StreamView stream) {
    const AttendKernel kernel = checkedKernel(params);
    if (params.run_count == 0) return;
    const CudaDevice& device = useDevice(stream);
    const AttendLaunch launch = launchOf(params, kernel, device);
    launchOverlapping(device, kernel.function, static_cast<unsigned>(launch.blocks),
                      attend_warps * warp_size,
                      static_cast<std::size_t>(kernel.sharedBytes(launch.stages)), stream, launch);
    checkLaunch("attend_kernel");
    // A tree of one round is not cut.
    if (params.max_position < attend_warps * stripe_tokens || launch.slots == 0) return;
    const auto grid =
        static_cast<unsigned>(device.multiprocessors() * fold_blocks_per_multiprocessor);
    // It may start while the last units are computed: it waits before it reads them.
    launchOverlapping(device, attend_fold_kernel, grid, fold_warps * warp_size, 0, stream, launch);
    checkLaunch("attend_fold_kernel");
}

}  // namespace kvgrid::cuda
