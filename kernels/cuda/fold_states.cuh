// Folding states that lie in memory, in order of an aligned binary tree: for merge and attend.
#pragma once

#include <cstdint>

#include "kernels/attention_state.h"

namespace kvgrid::cuda {

// Four neighbouring numbers of a state's out, and its lse.
struct StatePart {
    float4 out;
    float lse;
};

// What lies beside an lse of -inf is passed on but never computed with.
__device__ __forceinline__ StatePart merged(const StatePart& left, const StatePart& right) {
    const MergeWeights weights = mergeWeights(left.lse, right.lse);
    return {make_float4(mergeOut(weights, left.out.x, right.out.x),
                        mergeOut(weights, left.out.y, right.out.y),
                        mergeOut(weights, left.out.z, right.out.z),
                        mergeOut(weights, left.out.w, right.out.w)),
            weights.lse};
}

__device__ __forceinline__ StatePart emptyPart() {
    return {make_float4(0.0F, 0.0F, 0.0F, 0.0F), empty_lse};
}

inline constexpr int fold_at_once = 8;
inline constexpr int fold_levels = 3;
// States that one foldParts call can fold.
inline constexpr int fold_most = fold_at_once << fold_levels;

// Folds states 0 to count - 1; count is a power of two up to fold_most. read(index) loads one;
// eight are loaded at once.
template <typename Read>
__device__ __forceinline__ StatePart foldParts(int count, const Read& read) {
    StatePart stack[fold_levels];
    StatePart top = emptyPart();
    for (int chunk = 0; chunk * fold_at_once < count; ++chunk) {
        StatePart parts[fold_at_once];
#pragma unroll
        for (int i = 0; i < fold_at_once; ++i)
            parts[i] =
                chunk * fold_at_once + i < count ? read(chunk * fold_at_once + i) : emptyPart();
#pragma unroll
        for (int distance = 1; distance < fold_at_once; distance *= 2)
#pragma unroll
            for (int i = 0; i < fold_at_once; i += 2 * distance)
                parts[i] = merged(parts[i], parts[i + distance]);
        top = parts[0];
        // A set bit of `chunk` is a left sibling that waits; a clear one is where this one waits.
        bool waits = false;
#pragma unroll
        for (int level = 0; level < fold_levels; ++level) {
            if (waits) continue;
            if ((chunk >> level & 1) != 0) {
                top = merged(stack[level], top);
            } else {
                stack[level] = top;
                waits = true;
            }
        }
    }
    return top;
}

}  // namespace kvgrid::cuda
