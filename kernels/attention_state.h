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
// The lower stripe or lane is always the left operand. The formula is made of IEEE operations
// alone, so the merge itself gives the same bits on every device; leaves are a device's own.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/exact.h"
#include "kernels/host_device.h"

namespace kvgrid {

inline constexpr int stripe_tokens = 256;
inline constexpr int lane_count = 64;

inline constexpr float empty_lse = -std::numeric_limits<float>::infinity();

namespace exact {

// exp(x) for x <= 0, to 1e-7; 0 where the result would be subnormal. exp(x) = 2^n exp(r), with n
// the integer nearest to x / ln 2; ln 2 in two parts, the first short enough that n times it is
// exact (Cody and Waite); the polynomial is that of the Cephes library's expf.
KVGRID_HOST_DEVICE float expOfNonPositive(float x) {
    if (!(x > -87.0F)) return x != x ? x : 0.0F;
    constexpr float to_integer = 12582912.0F;  // 1.5 x 2^23: adding it rounds to an integer
    const float n = sum(step(x, 1.44269504F, to_integer), -to_integer);
    const float r = step(n, 2.12194440e-4F, step(n, -0.693359375F, x));
    float p = 1.9875691500e-4F;
    p = step(p, r, 1.3981999507e-3F);
    p = step(p, r, 8.3334519073e-3F);
    p = step(p, r, 4.1665795894e-2F);
    p = step(p, r, 1.6666665459e-1F);
    p = step(p, r, 5.0000001201e-1F);
    p = sum(step(p, product(r, r), r), 1.0F);
    const std::int32_t exponent = static_cast<std::int32_t>(n) + 127;
    return product(p, __builtin_bit_cast(float, exponent << 23));
}

// log(x) for 1 <= x <= 2, to 1e-7: 2 artanh((x - 1) / (x + 1)), by its series.
KVGRID_HOST_DEVICE float logOfOneToTwo(float x) {
    const float z = quotientBy1To3(sum(x, -1.0F), sum(x, 1.0F));
    const float w = product(z, z);
    float p = 1.0F / 13.0F;
    p = step(p, w, 1.0F / 11.0F);
    p = step(p, w, 1.0F / 9.0F);
    p = step(p, w, 1.0F / 7.0F);
    p = step(p, w, 1.0F / 5.0F);
    p = step(p, w, 1.0F / 3.0F);
    p = step(p, w, 1.0F);
    return product(sum(z, z), p);
}

}  // namespace exact

// What a merge multiplies its operands with, and the lse of the result.
struct MergeWeights {
    float left;
    float right;
    float lse;
};

// Exactly (1, 0, left_lse) or (0, 1, right_lse) when the other side is empty; callers then copy
// instead of multiplying (mergeOut does), because 0 x NaN is NaN.
KVGRID_HOST_DEVICE MergeWeights mergeWeights(float left_lse, float right_lse) {
    const bool left_is_top = left_lse > right_lse;
    const float top = left_is_top ? left_lse : right_lse;
    const float low = left_is_top ? right_lse : left_lse;
    // exp(top - top) is 1, or NaN where top is not finite.
    const float of_top = exact::sum(1.0F, exact::sum(top, -top));
    // Below 2^-24 it adds nothing to 1.
    const float of_low = exact::expOfNonPositive(exact::sum(low, -top));
    const float sum = exact::sum(of_top, of_low);
    const float top_weight = exact::quotientBy1To3(of_top, sum);
    const float low_weight = exact::quotientBy1To3(of_low, sum);
    const float lse = exact::sum(top, exact::logOfOneToTwo(sum));
    if (right_lse == empty_lse) return {1.0F, 0.0F, left_lse};
    if (left_lse == empty_lse) return {0.0F, 1.0F, right_lse};
    return {left_is_top ? top_weight : low_weight, left_is_top ? low_weight : top_weight, lse};
}

// One element of `out`, where no weight is 0.
KVGRID_HOST_DEVICE float mergeBoth(const MergeWeights& weights, float left, float right) {
    return exact::step(weights.left, left, exact::product(weights.right, right));
}

// One element of `out`.
KVGRID_HOST_DEVICE float mergeOut(const MergeWeights& weights, float left, float right) {
    const float both = mergeBoth(weights, left, right);
    const float one = weights.right == 0.0F ? left : right;
    return weights.right == 0.0F || weights.left == 0.0F ? one : both;  // no branch
}

}  // namespace kvgrid
