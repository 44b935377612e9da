#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/fold_states.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/operations.h"

namespace kvgrid::cuda {
namespace {

// What the workspace holds at most: enough units for many more multiprocessors than there are.
constexpr std::int64_t most_slots = 4096;
constexpr int least_stages = 2;

constexpr int fold_warps = 8;
constexpr int fold_blocks_per_multiprocessor = 4;
static_assert(fold_warps * fold_most >= 1 << most_unit_bits);

// Folds the units of cut trees: a row of a tree a block of threads.
__global__ void __launch_bounds__(fold_warps* warp_size)
    attend_fold_kernel(const __grid_constant__ AttendLaunch launch) {
    __shared__ float4 exchange[fold_warps][warp_size];
    __shared__ float exchange_lse[fold_warps];
    const AttendParams& params = launch.params;
    const int head_dim = params.head_dim;
    const int group = params.query_heads / params.kv_heads;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    UnitCursor<true> cursor(params, stepBits(launch));
    Unit tree;
    for (std::int64_t item = blockIdx.x; cursor.find(item / tile_rows, tree); item += gridDim.x) {
        const int row = static_cast<int>(item % tile_rows);
        if (row >= tree.rows) continue;
        const int units = 1 << (tree.shape.round_bits - tree.round_bits);
        const int units_per_warp = units > fold_warps ? units / fold_warps : 1;
        const int parts = units / units_per_warp;
        const Unit::Query query = tree.query(row, group);
        const std::int64_t to = query.row * params.query_heads + tree.kv_head * group + query.head;
        for (int first = 0; first < head_dim; first += 4 * warp_size) {
            const int at = first + 4 * lane;
            const bool owns = at < head_dim;
            if (warp < parts) {
                const StatePart part = foldParts(units_per_warp, [&](int index) {
                    const std::int64_t unit = std::int64_t{warp} * units_per_warp + index;
                    const std::int64_t slot = tree.workspace_slot + unit * tree.slot_stride;
                    const float* const numbers =
                        static_cast<const float*>(params.workspace) + slot * slotNumbers(head_dim);
                    StatePart loaded = emptyPart();
                    loaded.lse = numbers[tile_rows * head_dim + row];
                    if (owns)
                        loaded.out =
                            *reinterpret_cast<const float4*>(numbers + row * head_dim + at);
                    return loaded;
                });
                exchange[warp][lane] = part.out;
                if (lane == 0) exchange_lse[warp] = part.lse;
            }
            __syncthreads();
            if (warp == 0) {
                const StatePart state = foldParts(parts, [&](int index) {
                    return StatePart{exchange[index][lane], exchange_lse[index]};
                });
                if (owns)
                    *reinterpret_cast<float4*>(params.out + to * head_dim + at) =
                        state.lse == empty_lse ? make_float4(0.0F, 0.0F, 0.0F, 0.0F) : state.out;
                if (lane == 0) params.lse[to] = state.lse;
            }
            __syncthreads();
        }
    }
}

// Tiles that a warp's ring holds where a block of threads may have so much shared memory.
int stagesFor(const AttendKernel& kernel, int shared_bytes) {
    constexpr int kept_back = 1024;  // for what the kernel has beside its dynamic shared memory
    int stages = most_stages;
    while (stages > least_stages && kernel.sharedBytes(stages) > shared_bytes - kept_back)
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

void prepareAttend(int shared_bytes) {
    load(attend_fold_kernel);
    for (const AttendKernels& kernels : {fp16AttendKernels(), bf16AttendKernels()})
        for (const AttendKernel& kernel : kernels)
            load(kernel.function, kernel.sharedBytes(stagesFor(kernel, shared_bytes)));
}

std::size_t attendWorkspaceBytes(std::int64_t, int, int head_dim) {
    return static_cast<std::size_t>(most_slots * slotNumbers(head_dim)) * sizeof(float);
}

void attend(const AttendParams& params, StreamView stream) {
    const int group = params.kv_heads > 0 ? params.query_heads / params.kv_heads : 0;
    if (group < 1) throw Error(ErrorCode::internal, "attend: no query heads");
    const AttendKernel kernel = kernelFor(params.pool.format, params.head_dim);
    if (params.run_count == 0) return;
    const CudaDevice& device = useDevice(stream);
    AttendLaunch launch;
    launch.params = params;
    launch.blocks = device.attendBlocks();
    launch.stages = stagesFor(kernel, device.sharedBytes());
    const std::int64_t room = static_cast<std::int64_t>(params.workspace_bytes / sizeof(float));
    launch.slots = std::min(most_slots, room / slotNumbers(params.head_dim));
    kernel.launch(launch, static_cast<unsigned>(launch.blocks), kernel.sharedBytes(launch.stages),
                  handleOf(stream));
    checkLaunch("attend_kernel");
    // A tree of one round is not cut.
    if (params.max_position < attend_warps * stripe_tokens || launch.slots == 0) return;
    const auto grid =
        static_cast<unsigned>(device.multiprocessors() * fold_blocks_per_multiprocessor);
    attend_fold_kernel<<<grid, fold_warps * warp_size, 0, handleOf(stream)>>>(launch);
    checkLaunch("attend_fold_kernel");
}

}  // namespace kvgrid::cuda
