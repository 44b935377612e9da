// Folding states that lie in memory, in order of an aligned binary tree: for merge and attend.
// Lanes hold states side by side; each level of the tree is one turn of a small loop. Straight code
// for all levels took longer to fetch than to run: it runs once a launch.
#pragma once

#include <cstdint>

#include "kernels/attention_state.h"
#include "kernels/cuda/ptx.cuh"

namespace kvgrid::cuda {

inline constexpr int part_numbers = 8;
// States that one fold takes: two a lane.
inline constexpr int fold_most = 2 * warp_size;

// Some of a state's numbers, and its lse.
struct StatePart {
    float lse = empty_lse;
    float out[part_numbers] = {};

    __device__ __forceinline__ void load(const float* out_from, const float* lse_from) {
        const auto* const four = reinterpret_cast<const float4*>(out_from);
        const float4 low = four[0];
        const float4 high = four[1];
        lse = *lse_from;
        const float numbers[part_numbers] = {low.x,  low.y,  low.z,  low.w,
                                             high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < part_numbers; ++i)
            out[i] = numbers[i];
    }
    __device__ __forceinline__ void store(float* to) const {
        auto* const four = reinterpret_cast<float4*>(to);
        four[0] = make_float4(out[0], out[1], out[2], out[3]);
        four[1] = make_float4(out[4], out[5], out[6], out[7]);
    }
    // As an output: that of no tokens is 0.
    __device__ __forceinline__ void storeOutput(float* to) const {
        StatePart output;
        if (lse != empty_lse) output = *this;
        output.store(to);
    }
};

// How `count` states, a power of two up to fold_most, lie in a warp: in groups of neighbouring
// lanes, each of which has numbers of its own.
struct FoldGroups {
    bool two;   // states a lane, neighbours, else one
    int lanes;  // of a group

    __device__ explicit FoldGroups(int count)
        : two(count > warp_size),
          lanes(two ? warp_size : count) {}

    [[nodiscard]] __device__ int numbers() const {  // of the warp
        return warp_size / lanes * part_numbers;
    }
    // Of this lane:
    [[nodiscard]] __device__ int state() const {  // its first
        const int lane = static_cast<int>(threadIdx.x) % warp_size % lanes;
        return two ? 2 * lane : lane;
    }
    [[nodiscard]] __device__ int firstNumber() const {
        return static_cast<int>(threadIdx.x) % warp_size / lanes * part_numbers;
    }
    [[nodiscard]] __device__ bool isFirst() const { return state() == 0; }
};

// Called by all lanes. `state` of a group's first lane becomes that of the whole group; `next` is
// the lane's second, if it has two.
__device__ __forceinline__ void foldGroups(const FoldGroups& groups, StatePart& state,
                                           const StatePart& next) {
#pragma unroll 1
    for (int distance = groups.two ? 0 : 1; distance < groups.lanes;
         distance = distance == 0 ? 1 : 2 * distance) {
        const auto right = [&](float mine, float of_next) {
            const float of_other = __shfl_down_sync(all_lanes, mine, distance);
            return distance == 0 ? of_next : of_other;
        };
        const MergeWeights weights = mergeWeights(state.lse, right(state.lse, next.lse));
        state.lse = weights.lse;
#pragma unroll
        for (int i = 0; i < part_numbers; ++i)
            state.out[i] = mergeOut(weights, state.out[i], right(state.out[i], next.out[i]));
    }
}

struct FoldedNumber {
    float out;
    float lse;
};

// Called by all lanes: each folds one number of `count` states, which lie `stride` numbers apart;
// `out` points to the lane's number of the first state, read if the lane `owns` it. `weights` is
// shared memory of the warp, [count]. Without lse it reads nothing.
template <int count>
__device__ __forceinline__ FoldedNumber foldNumbers(const float* out, bool owns, const float* lse,
                                                    int stride, float2* weights) {
    static_assert(count <= warp_size);
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    float numbers[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
        numbers[i] = owns ? *out : 0.0F;
        out += stride;
    }
    float folded_lse = lane < count ? (lse != nullptr ? lse[lane * stride] : 0.0F) : empty_lse;
    // Of a level's merges behind those of the level below, one a lane.
    float2* to = weights + lane;
    __syncwarp();
#pragma unroll 1
    for (int merges = count / 2; merges > 0; merges /= 2) {
        const float left = __shfl_sync(all_lanes, folded_lse, 2 * lane % warp_size);
        const float right = __shfl_sync(all_lanes, folded_lse, (2 * lane + 1) % warp_size);
        const MergeWeights merge = mergeWeights(left, right);
        if (lane < merges) *to = make_float2(merge.left, merge.right);
        folded_lse = merge.lse;
        to += merges;
    }
    __syncwarp();
#pragma unroll
    for (int distance = 1; distance < count; distance *= 2) {
#pragma unroll
        for (int i = 0; i < count; i += 2 * distance) {
            const float2 merge = weights[i / (2 * distance)];
            numbers[i] = mergeOut({merge.x, merge.y, 0.0F}, numbers[i], numbers[i + distance]);
        }
        weights += count / (2 * distance);
    }
    return {numbers[0], __shfl_sync(all_lanes, folded_lse, 0)};
}

}  // namespace kvgrid::cuda
