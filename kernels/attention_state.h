// The attention state and its merge: the only merge formula in the tree, for host and device.
//
// Attention of a query over a set of tokens is a state (out, lse): `out` in fp32, normalised, and
// `lse`, the natural logarithm of the sum of exponentials of the scores, scale included. States
// over disjoint sets merge; in exact arithmetic the merge is associative and commutative (Milakov
// and Gimelshein, arXiv 1805.02867). The state of the empty set is (0, -inf): merging it returns
// the other operand bit for bit.
//
// The fold order is fixed, so that the same tokens give the same bits however they were scheduled:
//   leaf    one stripe: positions [256 i, 256 i + 256)
//   lane    stripe i lies in lane i mod 64; the stripes of a lane fold in an aligned binary tree
//   over i div 64 lanes   fold with lane + 32, then + 16, + 8, + 4, + 2, + 1
// The lower stripe or lane is always the left operand.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/host_device.h"

namespace kvgrid {

inline constexpr int stripe_tokens = 256;
inline constexpr int lane_count = 64;

inline constexpr float empty_lse = -std::numeric_limits<float>::infinity();

// What a merge multiplies its operands with, and the lse of the result.
struct MergeWeights {
    float left;
    float right;
    float lse;
};

// Exactly (1, 0, left_lse) or (0, 1, right_lse) when the other side is empty; callers then copy
// instead of multiplying (mergeOut does), because 0 x NaN is NaN.
KVGRID_HOST_DEVICE MergeWeights mergeWeights(float left_lse, float right_lse) {
    if (right_lse == empty_lse) return {1.0F, 0.0F, left_lse};
    if (left_lse == empty_lse) return {0.0F, 1.0F, right_lse};
    const float top = left_lse > right_lse ? left_lse : right_lse;
    const float left = expf(left_lse - top);
    const float right = expf(right_lse - top);
    const float sum = left + right;
    return {left / sum, right / sum, top + logf(sum)};
}

// One element of `out`. No fused multiply-add: the bits must not depend on what the compiler fuses.
KVGRID_HOST_DEVICE float mergeOut(const MergeWeights& weights, float left, float right) {
    if (weights.right == 0.0F) return left;
    if (weights.left == 0.0F) return right;
#ifdef __CUDA_ARCH__
    return __fadd_rn(__fmul_rn(weights.left, left), __fmul_rn(weights.right, right));
#else
    return weights.left * left + weights.right * right;
#endif
}

}  // namespace kvgrid
