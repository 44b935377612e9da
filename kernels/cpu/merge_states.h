// Merging states in memory: loops around the formula of attention_state.h, for attend and merge.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/attention_state.h"

namespace kvgrid::cpu {

// out[i] = merge(left[i], right[i]) for one state of head_dim numbers; returns its lse. out may be
// left. What lies beside an lse of -inf is not used.
inline float mergeState(const float* left, float left_lse, const float* right, float right_lse,
                        int head_dim, float* out) {
    const MergeWeights weights = mergeWeights(left_lse, right_lse);
    for (int i = 0; i < head_dim; ++i)
        out[i] = mergeOut(weights, left[i], right[i]);
    return weights.lse;
}

// A state in memory that somebody else owns. `out` is not read when lse is -inf.
struct StateView {
    const float* out;
    float lse;
};

// The parts of one state: part p has its out at out + p * out_stride, its lse at lse + p *
// lse_stride.
struct StateParts {
    const float* out;
    const float* lse;
    std::int64_t out_stride;
    std::int64_t lse_stride;
    int count;  // a power of two
    int head_dim;
};

// Folds parts first, first + stride, first + 2 stride, ... as lanes fold. `scratch` holds head_dim
// numbers for each doubling of the stride. The result is one of the parts or lies at `scratch`.
inline StateView foldParts(const StateParts& parts, int first, int stride, float* scratch) {
    if (stride >= parts.count)
        return {parts.out + first * parts.out_stride, parts.lse[first * parts.lse_stride]};
    const StateView left = foldParts(parts, first, 2 * stride, scratch);
    if (left.lse == empty_lse) return foldParts(parts, first + stride, 2 * stride, scratch);
    const StateView right = foldParts(parts, first + stride, 2 * stride, scratch + parts.head_dim);
    if (right.lse == empty_lse) return left;
    return {scratch, mergeState(left.out, left.lse, right.out, right.lse, parts.head_dim, scratch)};
}

// Numbers of scratch that foldParts needs.
inline std::size_t foldScratch(int count, int head_dim) {
    std::size_t levels = 1;
    while ((std::int64_t{1} << levels) < count)
        ++levels;
    return (levels + 1) * static_cast<std::size_t>(head_dim);
}

// Folds all parts into (out, lse); out may be the first part.
inline void mergeParts(const StateParts& parts, float* scratch, float* out, float* lse) {
    const StateView state = foldParts(parts, 0, 1, scratch);
    const auto bytes = static_cast<std::size_t>(parts.head_dim) * sizeof(float);
    if (state.lse == empty_lse)
        std::memset(out, 0, bytes);
    else if (state.out != out)
        std::memcpy(out, state.out, bytes);
    *lse = state.lse;
}

}  // namespace kvgrid::cpu
