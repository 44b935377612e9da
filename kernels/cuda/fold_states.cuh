// Folding states that lie in memory, in order of an aligned binary tree: for merge and attend. A
// warp folds; the weights of a level's merges are computed side by side, one a lane.
#pragma once

#include <cstdint>

#include "kernels/attention_state.h"
#include "kernels/cuda/attend_schedule.cuh"

namespace kvgrid::cuda {

inline constexpr int fold_at_once = 8;
inline constexpr int fold_levels = 6;
// States that one fold takes: two a lane.
inline constexpr int fold_most = 1 << fold_levels;
static_assert(fold_most == 2 * warp_size);

// The weights of all merges of a fold. Lane j has those of merge j of each level: of the states (or
// merged states) 2 j and 2 j + 1.
struct FoldWeights {
    float left[fold_levels];
    float right[fold_levels];
    float lse;  // of everything, in lane 0
};

// Of states 0 to count - 1; count is a power of two up to fold_most. read(index) gives an lse.
template <typename Read>
__device__ __forceinline__ FoldWeights foldWeights(int count, const Read& read) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    FoldWeights fold;
    float left = empty_lse;
    float right = empty_lse;
    if (2 * lane < count) left = read(2 * lane);
    if (2 * lane + 1 < count) right = read(2 * lane + 1);
#pragma unroll
    for (int level = 0; level < fold_levels; ++level) {
        if (level > 0) {
            // Lanes beyond the level's merges have nobody's.
            left = __shfl_sync(all_lanes, fold.lse, 2 * lane % warp_size);
            right = __shfl_sync(all_lanes, fold.lse, (2 * lane + 1) % warp_size);
        }
        if (level > 0 && count >> (level + 1) == 0) break;
        const MergeWeights weights = mergeWeights(left, right);
        fold.left[level] = weights.left;
        fold.right[level] = weights.right;
        fold.lse = weights.lse;
    }
    return fold;
}

// What lies beside an lse of -inf is passed on but never computed with.
__device__ __forceinline__ float mergedNumbers(const MergeWeights& weights, float left,
                                               float right) {
    return mergeOut(weights, left, right);
}
__device__ __forceinline__ float4 mergedNumbers(const MergeWeights& weights, const float4& left,
                                                const float4& right) {
    if (weights.right == 0.0F) return left;
    if (weights.left == 0.0F) return right;
    return make_float4(mergeOut(weights, left.x, right.x), mergeOut(weights, left.y, right.y),
                       mergeOut(weights, left.z, right.z), mergeOut(weights, left.w, right.w));
}

// Some numbers of eight states: a float or a float4 in each lane.
template <typename Numbers>
struct FoldParts {
    Numbers parts[fold_at_once];

    // Of the states from `first` on of `count`, as read(index) loads them of one.
    template <typename Read>
    __device__ __forceinline__ void load(int first, int count, const Read& read) {
#pragma unroll
        for (int i = 0; i < fold_at_once; ++i)
            if (first + i < count) parts[i] = read(first + i);
    }
};

// The same of the folded out. `loaded`: of the first eight, which may be loaded ahead of the
// weights.
template <typename Numbers, typename Read>
__device__ __forceinline__ Numbers foldOuts(int count, const FoldWeights& fold,
                                            FoldParts<Numbers> loaded, const Read& read) {
    const auto merged = [&](int level, int merge, const Numbers& left, const Numbers& right) {
        return mergedNumbers({__shfl_sync(all_lanes, fold.left[level], merge),
                              __shfl_sync(all_lanes, fold.right[level], merge), 0.0F},
                             left, right);
    };
    constexpr int chunk_levels = 3;
    static_assert(fold_at_once == 1 << chunk_levels);
    Numbers waiting[fold_levels - chunk_levels];
    Numbers top{};
    for (int chunk = 0; chunk * fold_at_once < count; ++chunk) {
        if (chunk > 0) loaded.load(chunk * fold_at_once, count, read);
        Numbers(&parts)[fold_at_once] = loaded.parts;
#pragma unroll
        for (int level = 0; level < chunk_levels; ++level) {
            if (count >> level <= 1) break;
#pragma unroll
            for (int i = 0; i < fold_at_once; i += 2 << level)
                if (i < count)
                    parts[i] = merged(level, (chunk * fold_at_once + i) >> (level + 1), parts[i],
                                      parts[i + (1 << level)]);
        }
        top = parts[0];
        // A set bit of `chunk` is a left sibling that waits; a clear one is where this one waits.
        bool waits = false;
#pragma unroll
        for (int level = 0; level < fold_levels - chunk_levels; ++level) {
            if (waits) continue;
            if ((chunk >> level & 1) != 0) {
                top = merged(chunk_levels + level, chunk >> (level + 1), waiting[level], top);
            } else {
                waiting[level] = top;
                waits = true;
            }
        }
    }
    return top;
}

}  // namespace kvgrid::cuda
