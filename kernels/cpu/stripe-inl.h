// The leaf of the fold: attention of some query rows over the tokens of one stripe. Compiled once
// for each instruction set, so it has no ordinary include guard.
//
// What a row gets depends on its own tokens alone: a score is chains of multiply-adds over the head
// dim and additions in a fixed order; an output element is one chain over the row's tokens in
// order. Tiles of rows and tokens only decide what is loaded once. The scale of a token's K
// multiplies the finished score, that of its V the weight, after the weights were summed.
#if defined(KVGRID_KERNELS_CPU_STRIPE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVGRID_KERNELS_CPU_STRIPE_INL_H_
#undef KVGRID_KERNELS_CPU_STRIPE_INL_H_
#else
#define KVGRID_KERNELS_CPU_STRIPE_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend_unit.h"
#include "kernels/cpu/score_tile-inl.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {

// to = from * factor, in plain order.
template <NumberFormat format>
HWY_NOINLINE void fromVectorOrder(const float* HWY_RESTRICT from, int head_dim, float factor,
                                  float* HWY_RESTRICT to) {
    const FloatTag tag;
    const Floats factors = hn::Set(tag, factor);
    int d = 0;
    for (; d + chunk_size <= head_dim; d += chunk_size) {
        const Floats first = hn::Mul(hn::LoadU(tag, from + d), factors);
        const Floats second = hn::Mul(hn::LoadU(tag, from + d + vector_lanes), factors);
        if constexpr (StoredVectors<format>::interleaved) {
            hn::StoreInterleaved2(first, second, tag, to + d);
        } else {
            hn::StoreU(first, tag, to + d);
            hn::StoreU(second, tag, to + d + vector_lanes);
        }
    }
    if (has_odd_vector && d < head_dim)
        hn::StoreU(hn::Mul(hn::LoadU(tag, from + d), factors), tag, to + d);
}

// left = mergeOut(weights, left, right), element by element, in vectors as the compiler makes them.
HWY_INLINE void mergeOuts(const MergeWeights& weights, float* HWY_RESTRICT left,
                          const float* HWY_RESTRICT right, int head_dim) {
    for (int d = 0; d < head_dim; ++d)
        left[d] = mergeOut(weights, left[d], right[d]);
}

// Adds weight * v of tokens [begin, end) to the running sums of `rows` query rows, for `vectors`
// vectors of the head dim from element d on.
template <NumberFormat format, int rows, int vectors>
HWY_INLINE void weighTile(const float* HWY_RESTRICT weights, const std::byte* const* values,
                          int begin, int end, int head_dim, int d, int ahead,
                          float* HWY_RESTRICT sums) {
    const FloatTag tag;
    Floats out[rows * vectors];
    HWY_UNROLL(16)
    for (int r = 0; r < rows; ++r) {
        HWY_UNROLL(16)
        for (int i = 0; i < vectors; ++i)
            out[r * vectors + i] = hn::LoadU(tag, sums + r * head_dim + d + i * vector_lanes);
    }
    for (int t = begin; t < end; ++t) {
        const auto* const row = elements<format>(values[t]) + d;
        Floats value[vectors];
        if constexpr (vectors == 1) {
            value[0] = StoredVectors<format>::load(row);
            prefetchChunk<format>(values[t + ahead], d);
        } else {
            HWY_UNROLL(16)
            for (int i = 0; i < vectors; i += 2)
                StoredVectors<format>::loadPair(row + i * vector_lanes, value[i], value[i + 1]);
            HWY_UNROLL(16)
            for (int i = 0; i < vectors; i += 2)
                prefetchChunk<format>(values[t + ahead], d + i * vector_lanes);
        }
        HWY_UNROLL(16)
        for (int r = 0; r < rows; ++r) {
            const Floats weight = broadcast(weights + r * AttendScratch::score_stride + t);
            HWY_UNROLL(16)
            for (int i = 0; i < vectors; ++i)
                out[r * vectors + i] = hn::MulAdd(weight, value[i], out[r * vectors + i]);
        }
    }
    HWY_UNROLL(16)
    for (int r = 0; r < rows; ++r) {
        HWY_UNROLL(16)
        for (int i = 0; i < vectors; ++i)
            hn::StoreU(out[r * vectors + i], tag, sums + r * head_dim + d + i * vector_lanes);
    }
}

// Running sums that weighTile keeps in registers: AVX2 has 16 of them, all others 32.
inline constexpr int most_weigh_vectors = vector_lanes == 8 ? 8 : 16;

// weighTile over the whole head dim.
template <NumberFormat format, int rows>
HWY_NOINLINE void weigh(const float* weights, const std::byte* const* values, int begin, int end,
                        int head_dim, int ahead, float* sums) {
    int d = 0;
    if constexpr (rows * 4 <= most_weigh_vectors)
        for (; d + 2 * chunk_size <= head_dim; d += 2 * chunk_size)
            weighTile<format, rows, 4>(weights, values, begin, end, head_dim, d, ahead, sums);
    for (; d + chunk_size <= head_dim; d += chunk_size)
        weighTile<format, rows, 2>(weights, values, begin, end, head_dim, d, ahead, sums);
    if constexpr (has_odd_vector) {
        if (d < head_dim)
            weighTile<format, rows, 1>(weights, values, begin, end, head_dim, d, ahead, sums);
    }
}

// scores[i] = cap * tanh(scores[i] / cap) for i < count; overwrites up to a vector beyond.
HWY_NOINLINE void softcap(float cap, float* HWY_RESTRICT scores, int count) {
    const FloatTag tag;
    const Floats caps = hn::Set(tag, cap);
    for (int i = 0; i < count; i += vector_lanes) {
        const Floats share = hn::Div(hn::LoadU(tag, scores + i), caps);
        hn::StoreU(hn::Mul(caps, hn::Tanh(tag, share)), tag, scores + i);
    }
}

struct SoftmaxSums {
    float top;  // the largest score
    float sum;  // of exp(score - top)
};

// numbers[i] *= factors[i] for i < count, and up to a vector beyond.
HWY_INLINE void multiply(float* HWY_RESTRICT numbers, const float* HWY_RESTRICT factors,
                         int count) {
    const FloatTag tag;
    for (int i = 0; i < count; i += vector_lanes)
        hn::StoreU(hn::Mul(hn::LoadU(tag, numbers + i), hn::LoadU(tag, factors + i)), tag,
                   numbers + i);
}

// As exact::expOfNonPositive; NaN stays NaN.
HWY_INLINE Floats expOfNonPositive(Floats x) {
    const FloatTag tag;
    // Adding it rounds to an integer, whose lowest bits are then those of an exponent.
    const Floats to_exponent = hn::Set(tag, 12582912.0F + 127.0F);
    const Floats shifted = hn::MulAdd(x, hn::Set(tag, 1.44269504F), to_exponent);
    const Floats n = hn::Sub(shifted, to_exponent);
    const Floats r =
        hn::MulAdd(n, hn::Set(tag, 2.12194440e-4F), hn::MulAdd(n, hn::Set(tag, -0.693359375F), x));
    Floats p = hn::Set(tag, 1.9875691500e-4F);
    for (const float coefficient :
         {1.3981999507e-3F, 8.3334519073e-3F, 4.1665795894e-2F, 1.6666665459e-1F, 5.0000001201e-1F})
        p = hn::MulAdd(p, r, hn::Set(tag, coefficient));
    p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(tag, 1.0F));
    const hn::RebindToUnsigned<FloatTag> bits;
    const Floats power = hn::BitCast(tag, hn::ShiftLeft<23>(hn::BitCast(bits, shifted)));
    return hn::IfThenZeroElse(hn::Le(x, hn::Set(tag, -87.0F)), hn::Mul(p, power));
}

// scores[i] = exp(scores[i] - top) for i < count, count >= 1; overwrites up to a vector beyond.
HWY_NOINLINE SoftmaxSums softmax(float* HWY_RESTRICT scores, int count) {
    const FloatTag tag;
    const int padded = (count + vector_lanes - 1) / vector_lanes * vector_lanes;
    for (int i = count; i < padded; ++i)
        scores[i] = empty_lse;
    Floats largest = hn::Set(tag, empty_lse);
    for (int i = 0; i < padded; i += vector_lanes)
        largest = hn::Max(largest, hn::LoadU(tag, scores + i));
    largest = hn::MaxOfLanes(tag, largest);
    Floats sum = hn::Zero(tag);
    for (int i = 0; i < padded; i += vector_lanes) {
        const Floats distance = hn::Sub(hn::LoadU(tag, scores + i), largest);
        const Floats weight = expOfNonPositive(distance);
        hn::StoreU(weight, tag, scores + i);
        sum = hn::Add(sum, weight);
    }
    return {hn::GetLane(largest), hn::GetLane(hn::SumOfLanes(tag, sum))};
}

// One stripe, as attendStripe sees it.
struct Stripe {
    // K rows of its present tokens, their V rows, and then, readable, `ahead` rows that come next
    // and some padding.
    const std::byte* const* rows;
    int tokens;  // >= 1
    int head_dim;
    float scale;
    float softcap;  // 0: none
    // Ask for the row that comes so many rows later, in each tile of query rows: that was faster
    // than in the first alone. 0: do not.
    int ahead;
    // Of its tokens' K and V, where the format has scales; a vector beyond the last one is
    // readable.
    const float* key_scales;
    const float* value_scales;
};

// Scores of `rows` query rows, from q and scores on, and the stripe's tokens [begin, end).
template <class Lanes, int rows>
HWY_NOINLINE void scoreRows(const Stripe& stripe, const float* q, int begin, int end,
                            float* scores) {
    for (int t = begin; t < end; t += Lanes::template tile_tokens<rows>)
        Lanes::template scoreTile<rows>(q, stripe.rows + t, stripe.head_dim, stripe.scale,
                                        stripe.ahead, scores + t);
}

// Weighs the stripe's tokens [begin, end): those that only some of `rows` query rows see yet, those
// that all see, then what only some see still.
template <NumberFormat format, int rows>
HWY_NOINLINE void weighUnequalRows(const Stripe& stripe, const float* weights, const Seen* seen,
                                   int begin, int end, float* sums) {
    const std::byte* const* const values = stripe.rows + stripe.tokens;
    int common_begin = begin;
    int common_end = end;
    for (int r = 0; r < rows; ++r) {
        common_begin = std::max(common_begin, seen[r].begin);
        common_end = std::min(common_end, seen[r].end);
    }
    common_begin = std::min(common_begin, end);
    common_end = std::max(common_end, common_begin);
    const auto weigh_own = [&](int first, int last) {
        for (int r = 0; r < rows; ++r) {
            const int own_first = std::max(first, seen[r].begin);
            const int own_last = std::min(last, seen[r].end);
            if (own_first < own_last)
                weigh<format, 1>(weights + r * AttendScratch::score_stride, values, own_first,
                                 own_last, stripe.head_dim, 0, sums + r * stripe.head_dim);
        }
    };
    weigh_own(begin, common_begin);
    if (common_begin < common_end)
        weigh<format, rows>(weights, values, common_begin, common_end, stripe.head_dim,
                            stripe.ahead, sums);
    weigh_own(common_end, end);
}

// Calls tiles.run<count>(first) for a count of 1 to `most`; nothing for 0.
template <int most, typename Tiles>
HWY_INLINE void runRowTile(int count, int first, const Tiles& tiles) {
    if constexpr (most > 0) {
        if (count == most) return tiles.template run<most>(first);
        runRowTile<most - 1>(count, first, tiles);
    }
}

// Calls tiles.run<rows>(first) for the largest tiles that `count` rows have, then for one of what
// is left.
template <typename Tiles>
HWY_INLINE void forRowTiles(int count, const Tiles& tiles) {
    int r = 0;
    for (; r + Tiles::most_rows <= count; r += Tiles::most_rows)
        tiles.template run<Tiles::most_rows>(r);
    runRowTile<Tiles::most_rows - 1>(count - r, r, tiles);
}

template <class Lanes>
struct ScoreTiles {
    static constexpr int most_rows = Lanes::most_rows;

    const Stripe& stripe;
    const float* q;
    int begin;
    int end;
    float* scores;

    template <int rows>
    HWY_INLINE void run(int r) const {
        scoreRows<Lanes, rows>(stripe, q + Lanes::staged_factor * r * stripe.head_dim, begin, end,
                               scores + r * AttendScratch::score_stride);
    }
};

template <NumberFormat format>
struct WeighTiles {
    static constexpr int most_rows = 4;  // more decode V less often, but were no faster

    const Stripe& stripe;
    const float* weights;
    const Seen* seen;
    Seen common;  // what all query rows see
    int begin;
    int end;
    float* sums;

    template <int rows>
    HWY_INLINE void run(int r) const {
        const float* const own = weights + r * AttendScratch::score_stride;
        float* const to = sums + r * stripe.head_dim;
        if (common.begin <= begin && end <= common.end)
            weigh<format, rows>(own, stripe.rows + stripe.tokens, begin, end, stripe.head_dim,
                                stripe.ahead, to);
        else
            weighUnequalRows<format, rows>(stripe, own, seen + r, begin, end, to);
    }
};

// Tokens whose K or V stays in the first-level cache while all query rows pass over it.
inline constexpr int token_tile = 32;
// With several tiles of query rows those of V are as many as have so many bytes: sums are loaded
// and stored once a tile.
inline constexpr int value_tile_bytes = 16384;

// Attention of `rows` query rows (at most rows_at_once) over a stripe; query row r sees its tokens
// seen[r]. q as Lanes::stage has it. Writes out[r * head_dim ...] and lse[r].
template <NumberFormat format, class Lanes>
HWY_NOINLINE void attendStripe(const Stripe& stripe, const float* q, const Seen* seen, int rows,
                               AttendScratch& scratch, float* out, float* lse) {
    int first = stripe.tokens;
    int last = 0;
    Seen common{.begin = 0, .end = stripe.tokens};
    for (int r = 0; r < rows; ++r) {
        common.begin = std::max(common.begin, seen[r].begin);
        common.end = std::min(common.end, seen[r].end);
        if (seen[r].begin == seen[r].end) continue;
        first = std::min(first, seen[r].begin);
        last = std::max(last, seen[r].end);
    }
    for (int t = first; t < last; t += token_tile)
        forRowTiles(
            rows, ScoreTiles<Lanes>{stripe, q, t, std::min(t + token_tile, last), scratch.scores});
    float sum_of[AttendScratch::rows_at_once];
    for (int r = 0; r < rows; ++r) {
        sum_of[r] = 0.0F;
        lse[r] = empty_lse;
        const int begin = seen[r].begin;
        const int count = seen[r].end - begin;
        if (count == 0) continue;
        float* const scores = scratch.scores + r * AttendScratch::score_stride + begin;
        if constexpr (hasScales(format)) multiply(scores, stripe.key_scales + begin, count);
        if (stripe.softcap != 0.0F) softcap(stripe.softcap, scores, count);
        const SoftmaxSums sums = softmax(scores, count);
        if constexpr (hasScales(format)) multiply(scores, stripe.value_scales + begin, count);
        sum_of[r] = sums.sum;
        lse[r] = sums.top + std::log(sums.sum);
    }
    std::memset(scratch.sums, 0, static_cast<std::size_t>(rows * stripe.head_dim) * sizeof(float));
    const int row_bytes = stripe.head_dim * static_cast<int>(sizeof(typename Stored<format>::Bits));
    const int value_tile =
        rows > WeighTiles<format>::most_rows ? value_tile_bytes / row_bytes : token_tile;
    for (int t = first; t < last; t += value_tile)
        forRowTiles(rows, WeighTiles<format>{stripe, scratch.scores, seen, common, t,
                                             std::min(t + value_tile, last), scratch.sums});
    for (int r = 0; r < rows; ++r)
        fromVectorOrder<format>(scratch.sums + r * stripe.head_dim, stripe.head_dim,
                                sum_of[r] == 0.0F ? 0.0F : StoredVectors<format>::unit / sum_of[r],
                                out + r * stripe.head_dim);
}

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
