#include "kernels/cuda/fold_states.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/operations.h"

namespace kvgrid::cuda {
namespace {

constexpr int warps = 8;
constexpr std::int64_t most_blocks = 1 << 20;
static_assert(fold_most >= lane_count);

// A state a warp.
__global__ void __launch_bounds__(warps* warp_size)
    merge_kernel(const __grid_constant__ MergeParams params) {
    const int part_bits = 31 - __clz(params.parts);
    const FoldGroups groups(params.parts);
    for (std::int64_t row = std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
         row < params.rows; row += std::int64_t{gridDim.x} * warps) {
        // In order of the tree: + parts / 2 is folded first, so it is the lowest bit.
        const auto load = [&](StatePart& state, int index, int number) {
            const std::int64_t part = static_cast<std::int64_t>(
                __brev(static_cast<unsigned>(index)) >> 1 >> (31 - part_bits));
            const std::int64_t at = part * params.rows + row;
            state.load(params.out_parts + at * params.head_dim + number, params.lse_parts + at);
        };
        float lse = empty_lse;
        for (int first = 0; first < params.head_dim; first += groups.numbers()) {
            const int number = first + groups.firstNumber();
            const bool owns = number < params.head_dim;
            StatePart state;
            StatePart next;
            if (owns) load(state, groups.state(), number);
            if (owns && groups.two) load(next, groups.state() + 1, number);
            foldGroups(groups, state, next);
            if (owns && groups.isFirst())
                state.storeOutput(params.out + row * params.head_dim + number);
            if (first == 0) lse = state.lse;
        }
        // Last, for it may lie in the first part.
        __syncwarp();
        if (isFirstLane()) params.lse[row] = lse;
    }
}

}  // namespace

void prepareMerge() {
    load(merge_kernel);
}

void merge(const MergeParams& params, StreamView stream) {
    const bool is_power = params.parts > 0 && (params.parts & (params.parts - 1)) == 0;
    if (params.head_dim % part_numbers != 0 || !is_power || params.parts > fold_most)
        throw Error(ErrorCode::internal, "merge: head dim " + std::to_string(params.head_dim) +
                                             ", " + std::to_string(params.parts) + " parts");
    if (params.rows == 0) return;
    useDevice(stream);
    merge_kernel<<<gridFor((params.rows + warps - 1) / warps, most_blocks), warps * warp_size, 0,
                   handleOf(stream)>>>(params);
    checkLaunch("merge_kernel");
}

}  // namespace kvgrid::cuda
