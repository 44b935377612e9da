#include "kernels/cuda/fold_states.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/operations.h"

namespace kvgrid::cuda {
namespace {

constexpr int warps = 8;
constexpr std::int64_t most_blocks = 1 << 20;
static_assert(fold_most >= lane_count);

// A state a warp, four numbers of it a thread.
__global__ void __launch_bounds__(warps* warp_size)
    merge_kernel(const __grid_constant__ MergeParams params) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int part_bits = 31 - __clz(params.parts);
    for (std::int64_t row = std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
         row < params.rows; row += std::int64_t{gridDim.x} * warps) {
        // In order of the tree: + parts / 2 is folded first, so it is the lowest bit.
        const auto stateAt = [&](int index) {
            const std::int64_t part = static_cast<std::int64_t>(
                __brev(static_cast<unsigned>(index)) >> 1 >> (31 - part_bits));
            return part * params.rows + row;
        };
        const FoldWeights fold =
            foldWeights(params.parts, [&](int index) { return params.lse_parts[stateAt(index)]; });
        const float lse = __shfl_sync(all_lanes, fold.lse, 0);
        for (int first = 0; first < params.head_dim; first += 4 * warp_size) {
            const int at = first + 4 * lane;
            const bool owns = at < params.head_dim;
            const auto read = [&](int index) {
                return owns ? *reinterpret_cast<const float4*>(
                                  params.out_parts + stateAt(index) * params.head_dim + at)
                            : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
            };
            FoldParts<float4> parts;
            parts.load(0, params.parts, read);
            const float4 out = foldOuts(params.parts, fold, parts, read);
            if (owns)
                *reinterpret_cast<float4*>(params.out + row * params.head_dim + at) =
                    lse == empty_lse ? make_float4(0.0F, 0.0F, 0.0F, 0.0F) : out;
        }
        // Last, for it may lie in the first part.
        __syncwarp();
        if (lane == 0) params.lse[row] = lse;
    }
}

}  // namespace

void prepareMerge() {
    load(merge_kernel);
}

void merge(const MergeParams& params, StreamView stream) {
    if (params.head_dim % 4 != 0 || params.parts < 1 || params.parts > fold_most)
        throw Error(ErrorCode::internal, "merge: head dim " + std::to_string(params.head_dim) +
                                             ", " + std::to_string(params.parts) + " parts");
    if (params.rows == 0) return;
    useDevice(stream);
    merge_kernel<<<gridFor((params.rows + warps - 1) / warps, most_blocks), warps * warp_size, 0,
                   handleOf(stream)>>>(params);
    checkLaunch("merge_kernel");
}

}  // namespace kvgrid::cuda
