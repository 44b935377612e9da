// The leaf of the fold: attention of some query rows over the tokens of one stripe. Compiled once
// for each instruction set, so it has no ordinary include guard.
//
// What a row gets depends on its own tokens alone: a score is one chain of multiply-adds over the
// head dim and one tree of additions; an output element is one chain over the row's tokens in
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
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {

// The order in which head_dim stored numbers lie in vectors: chunks of two vectors as StoredVectors
// loads them, then, if there is room for only one more, one in plain order.
inline constexpr int chunk_size = 2 * vector_lanes;
inline constexpr bool has_odd_vector = head_dim_unit % chunk_size != 0;

template <NumberFormat format>
HWY_INLINE void toVectorOrder(const float* HWY_RESTRICT from, int head_dim,
                              float* HWY_RESTRICT to) {
    int d = 0;
    if constexpr (StoredVectors<format>::interleaved) {
        for (; d + chunk_size <= head_dim; d += chunk_size)
            for (int i = 0; i < vector_lanes; ++i) {
                to[d + i] = from[d + 2 * i];
                to[d + vector_lanes + i] = from[d + 2 * i + 1];
            }
    }
    for (; d < head_dim; ++d)
        to[d] = from[d];
}

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

template <NumberFormat format>
HWY_INLINE const typename Stored<format>::Bits* elements(const std::byte* row) {
    return reinterpret_cast<const typename Stored<format>::Bits*>(row);
}

// Asks for the line of element d when d begins one, into the second-level cache: the first has few
// lines that may be on their way, and they would bound the rate.
template <NumberFormat format>
HWY_INLINE void prefetchChunk(const std::byte* row, int d) {
    constexpr int line_elements = 64 / sizeof(typename Stored<format>::Bits);
    if (chunk_size >= line_elements || d % line_elements == 0)
        for (int i = 0; i < chunk_size; i += line_elements)
            __builtin_prefetch(elements<format>(row) + d + i, 0, 2);
}

// Scores of `rows` query rows against tile_vectors / rows tokens: scale * q.k into
// scores[row * score_stride + token]. With `fetch`, each line that is read asks for one of the row
// `ahead` rows later.
template <NumberFormat format, int rows, bool fetch>
HWY_INLINE void scoreTile(const float* HWY_RESTRICT q, const std::byte* const* keys, int head_dim,
                          float scale, int ahead, float* HWY_RESTRICT scores) {
    constexpr int tokens = tile_vectors / rows;
    const FloatTag tag;
    Floats dots[tile_vectors];
    for (Floats& dot : dots)
        dot = hn::Zero(tag);
    int d = 0;
    for (; d + chunk_size <= head_dim; d += chunk_size) {
        Floats first[tokens];
        Floats second[tokens];
        for (int t = 0; t < tokens; ++t)
            StoredVectors<format>::loadPair(elements<format>(keys[t]) + d, first[t], second[t]);
        if constexpr (fetch)
            for (int t = 0; t < tokens; ++t)
                prefetchChunk<format>(keys[t + ahead], d);
        for (int r = 0; r < rows; ++r) {
            const Floats q_first = hn::LoadU(tag, q + r * head_dim + d);
            const Floats q_second = hn::LoadU(tag, q + r * head_dim + d + vector_lanes);
            for (int t = 0; t < tokens; ++t) {
                Floats& dot = dots[r * tokens + t];
                dot = hn::MulAdd(second[t], q_second, hn::MulAdd(first[t], q_first, dot));
            }
        }
    }
    if (has_odd_vector && d < head_dim) {
        for (int t = 0; t < tokens; ++t) {
            const Floats key = StoredVectors<format>::load(elements<format>(keys[t]) + d);
            if constexpr (fetch) prefetchChunk<format>(keys[t + ahead], d);
            for (int r = 0; r < rows; ++r) {
                Floats& dot = dots[r * tokens + t];
                dot = hn::MulAdd(key, hn::LoadU(tag, q + r * head_dim + d), dot);
            }
        }
    }
    storeSums<tokens>(dots, scale, AttendScratch::score_stride, scores);
}

// Adds weight * v of tokens [begin, end) to the running sums of `rows` query rows, for `vectors`
// vectors of the head dim from element d on.
template <NumberFormat format, int rows, int vectors, bool fetch>
HWY_INLINE void weighTile(const float* HWY_RESTRICT weights, const std::byte* const* values,
                          int begin, int end, int head_dim, int d, int ahead,
                          float* HWY_RESTRICT sums) {
    const FloatTag tag;
    Floats out[rows * vectors];
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < vectors; ++i)
            out[r * vectors + i] = hn::LoadU(tag, sums + r * head_dim + d + i * vector_lanes);
    for (int t = begin; t < end; ++t) {
        const auto* const row = elements<format>(values[t]) + d;
        Floats value[vectors];
        if constexpr (vectors == 1) {
            value[0] = StoredVectors<format>::load(row);
            if constexpr (fetch) prefetchChunk<format>(values[t + ahead], d);
        } else {
            for (int i = 0; i < vectors; i += 2)
                StoredVectors<format>::loadPair(row + i * vector_lanes, value[i], value[i + 1]);
            if constexpr (fetch)
                for (int i = 0; i < vectors; i += 2)
                    prefetchChunk<format>(values[t + ahead], d + i * vector_lanes);
        }
        for (int r = 0; r < rows; ++r) {
            const Floats weight = hn::Set(tag, weights[r * AttendScratch::score_stride + t]);
            for (int i = 0; i < vectors; ++i)
                out[r * vectors + i] = hn::MulAdd(weight, value[i], out[r * vectors + i]);
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < vectors; ++i)
            hn::StoreU(out[r * vectors + i], tag, sums + r * head_dim + d + i * vector_lanes);
}

// weighTile over the whole head dim.
template <NumberFormat format, int rows, bool fetch>
HWY_NOINLINE void weigh(const float* weights, const std::byte* const* values, int begin, int end,
                        int head_dim, int ahead, float* sums) {
    int d = 0;
    for (; d + 2 * chunk_size <= head_dim; d += 2 * chunk_size)
        weighTile<format, rows, 4, fetch>(weights, values, begin, end, head_dim, d, ahead, sums);
    for (; d + chunk_size <= head_dim; d += chunk_size)
        weighTile<format, rows, 2, fetch>(weights, values, begin, end, head_dim, d, ahead, sums);
    if constexpr (has_odd_vector) {
        if (d < head_dim)
            weighTile<format, rows, 1, fetch>(weights, values, begin, end, head_dim, d, ahead,
                                              sums);
    }
}

// scores[i] = cap * tanh(scores[i] / cap) for i < count; overwrites up to a vector beyond.
HWY_NOINLINE void softcap(float cap, float* HWY_RESTRICT scores, int count) {
    const FloatTag tag;
    const Floats caps = hn::Set(tag, cap);
    for (int i = 0; i < count; i += vector_lanes) {
        // Unlike Exp below, Tanh leaves NaN as it is.
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
        // Highway's Exp turns NaN into 0, which would hide a broken input.
        const Floats weight = hn::IfThenElse(hn::IsNaN(distance), distance, hn::Exp(tag, distance));
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
    int ahead;      // fetch the row that comes so many rows later; 0: do not
    // Of its tokens' K and V, where the format has scales; a vector beyond the last one is
    // readable.
    const float* key_scales;
    const float* value_scales;
};

// Scores of `rows` query rows, from q and scores on, and the stripe's tokens [begin, end).
template <NumberFormat format, int rows, bool fetch>
HWY_NOINLINE void scoreRows(const Stripe& stripe, const float* q, int begin, int end,
                            float* scores) {
    constexpr int step = tile_vectors / rows;
    for (int t = begin; t < end; t += step)
        scoreTile<format, rows, fetch>(q, stripe.rows + t, stripe.head_dim, stripe.scale,
                                       stripe.ahead, scores + t);
}

// Weighs the stripe's tokens [begin, end): those that only some of `rows` query rows see yet, those
// that all see, then what only some see still.
template <NumberFormat format, int rows, bool fetch>
HWY_INLINE void weighRows(const Stripe& stripe, const float* weights, const Seen* seen, int begin,
                          int end, float* sums) {
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
                weigh<format, 1, true>(weights + r * AttendScratch::score_stride, values, own_first,
                                       own_last, stripe.head_dim, 0, sums + r * stripe.head_dim);
        }
    };
    weigh_own(begin, common_begin);
    if (common_begin < common_end)
        weigh<format, rows, fetch>(weights, values, common_begin, common_end, stripe.head_dim,
                                   stripe.ahead, sums);
    weigh_own(common_end, end);
}

// Calls tiles.run<rows, fetch>(first) for tiles of 4, 2 and 1 of `count` rows. The first tile
// fetches what comes; small tiles always do, as they are rare or the first.
template <typename Tiles>
HWY_INLINE void forRowTiles(int count, bool fetch, const Tiles& tiles) {
    int r = 0;
    if (count >= 4 && fetch) {
        tiles.template run<4, true>(0);
        r = 4;
    }
    for (; r + 4 <= count; r += 4)
        tiles.template run<4, false>(r);
    if (r + 2 <= count) {
        tiles.template run<2, true>(r);
        r += 2;
    }
    if (r < count) tiles.template run<1, true>(r);
}

template <NumberFormat format>
struct ScoreTiles {
    const Stripe& stripe;
    const float* q;
    int begin;
    int end;
    float* scores;

    template <int rows, bool fetch>
    HWY_INLINE void run(int r) const {
        scoreRows<format, rows, fetch>(stripe, q + r * stripe.head_dim, begin, end,
                                       scores + r * AttendScratch::score_stride);
    }
};

template <NumberFormat format>
struct WeighTiles {
    const Stripe& stripe;
    const float* weights;
    const Seen* seen;
    int begin;
    int end;
    float* sums;

    template <int rows, bool fetch>
    HWY_INLINE void run(int r) const {
        weighRows<format, rows, fetch>(stripe, weights + r * AttendScratch::score_stride, seen + r,
                                       begin, end, sums + r * stripe.head_dim);
    }
};

// Tokens whose K or V stays in the first-level cache while all query rows pass over it.
inline constexpr int token_tile = 16;

// Attention of `rows` query rows (at most rows_at_once) over a stripe; query row r sees its tokens
// seen[r]. q in vector order. Writes out[r * head_dim ...] and lse[r].
template <NumberFormat format>
HWY_NOINLINE void attendStripe(const Stripe& stripe, const float* q, const Seen* seen, int rows,
                               AttendScratch& scratch, float* out, float* lse) {
    int first = stripe.tokens;
    int last = 0;
    for (int r = 0; r < rows; ++r) {
        if (seen[r].begin == seen[r].end) continue;
        first = std::min(first, seen[r].begin);
        last = std::max(last, seen[r].end);
    }
    for (int t = first; t < last; t += token_tile)
        forRowTiles(
            rows, stripe.ahead > 0,
            ScoreTiles<format>{stripe, q, t, std::min(t + token_tile, last), scratch.scores});
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
    for (int t = first; t < last; t += token_tile)
        forRowTiles(rows, stripe.ahead > 0,
                    WeighTiles<format>{stripe, scratch.scores, seen, t,
                                       std::min(t + token_tile, last), scratch.sums});
    for (int r = 0; r < rows; ++r)
        fromVectorOrder<format>(scratch.sums + r * stripe.head_dim, stripe.head_dim,
                                sum_of[r] == 0.0F ? 0.0F : StoredVectors<format>::unit / sum_of[r],
                                out + r * stripe.head_dim);
}

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
