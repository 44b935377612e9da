// Scores of a few query rows against a few tokens, with K and q in vectors along the head dim.
// Compiled once for each instruction set, so it has no ordinary include guard.
//
// HeadDimLanes here and TokenLanes (token_lanes-inl.h) are two ways to make scores, with the same
// names in both; their bits differ.
//
// Loops over registers are unrolled before anything else, lest the compiler keeps them in memory.
#if defined(KVGRID_KERNELS_CPU_SCORE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVGRID_KERNELS_CPU_SCORE_TILE_INL_H_
#undef KVGRID_KERNELS_CPU_SCORE_TILE_INL_H_
#else
#define KVGRID_KERNELS_CPU_SCORE_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>

#include "kernels/cpu/attend_unit.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {

// The order in which head_dim stored numbers lie in vectors: chunks of two vectors as StoredVectors
// loads them, then, if there is room for only one more, one in plain order.
inline constexpr int chunk_size = 2 * vector_lanes;
inline constexpr bool has_odd_vector = head_dim_unit % chunk_size != 0;

template <NumberFormat format>
HWY_INLINE const typename Stored<format>::Bits* elements(const std::byte* row) {
    return reinterpret_cast<const typename Stored<format>::Bits*>(row);
}

// Asks for a line, into the second-level cache: the first has few lines that may be on their way,
// and they would bound the rate.
HWY_INLINE void prefetchLine(const void* line) {
    __builtin_prefetch(line, 0, 2);
}

// Asks for the line of element d when d begins one.
template <NumberFormat format>
HWY_INLINE void prefetchChunk(const std::byte* row, int d) {
    constexpr int line_elements = 64 / sizeof(typename Stored<format>::Bits);
    if (chunk_size >= line_elements || d % line_elements == 0)
        for (int i = 0; i < chunk_size; i += line_elements)
            prefetchLine(elements<format>(row) + d + i);
}

#if HWY_CAP_GE512

// A vector holds numbers of two tokens, in halves: sums over 16 lanes would cost a quarter of the
// tile's multiply-adds, as most of their steps are shuffles.
template <NumberFormat format>
struct HeadDimLanes {
    // Query rows of the largest tile. More of them decode K less often, but were no faster: they
    // load more of q for each token.
    static constexpr int most_rows = 4;

    // Tokens of a tile come in so many pairs: token t with t + tile_pairs.
    template <int rows>
    static constexpr int tile_pairs = rows <= 2 ? 8 : 4;
    template <int rows>
    static constexpr int tile_tokens = 2 * tile_pairs<rows>;

    // A score is so many times what the vectors give.
    static constexpr float unit = StoredVectors<format>::unit;

    // Numbers that stage writes for one of q: each half of a vector twice.
    static constexpr int staged_factor = 2;

    // Brings q of row `row` of a tile of `rows` to where scoreTile wants it, the tile's q being at
    // `tile`: row by row, in the order of StoredVectors::loadHalves.
    static HWY_INLINE void stage(const float* HWY_RESTRICT from, int head_dim, int /*rows*/,
                                 int row, float* HWY_RESTRICT tile) {
        constexpr int half = vector_lanes / 2;
        constexpr int step = StoredVectors<format>::interleaved ? 2 : 1;
        constexpr int second = StoredVectors<format>::interleaved ? 1 : half;
        float* to = tile + staged_factor * row * head_dim;
        for (int d = 0; d < head_dim; d += vector_lanes, to += 2 * vector_lanes)
            for (int i = 0; i < half; ++i) {
                to[i] = to[half + i] = from[d + step * i];
                to[2 * half + i] = to[3 * half + i] = from[d + second + step * i];
            }
    }

    // Scores of `rows` query rows, their q from stage, against tile_tokens<rows> tokens: scale *
    // q.k into scores[row * score_stride + token]; with three rows it overwrites those of a fourth.
    // Each line that is read asks for one of the row `ahead` rows later.
    template <int rows>
    static HWY_INLINE void scoreTile(const float* HWY_RESTRICT q, const std::byte* const* keys,
                                     int head_dim, float scale, int ahead,
                                     float* HWY_RESTRICT scores) {
        constexpr int pairs = tile_pairs<rows>;
        constexpr int line_elements = 64 / sizeof(typename Stored<format>::Bits);
        const FloatTag tag;
        Floats dots[2 * most_sums];
        HWY_UNROLL(16)
        for (Floats& dot : dots)
            dot = hn::Zero(tag);
        for (int d = 0; d < head_dim; d += vector_lanes) {
            Floats first[pairs];
            Floats second[pairs];
            HWY_UNROLL(16)
            for (int p = 0; p < pairs; ++p)
                StoredVectors<format>::loadHalves(elements<format>(keys[p]) + d,
                                                  elements<format>(keys[p + pairs]) + d, first[p],
                                                  second[p]);
            if (d % line_elements == 0) {
                HWY_UNROLL(16)
                for (int t = 0; t < 2 * pairs; ++t)
                    prefetchLine(elements<format>(keys[t + ahead]) + d);
            }
            HWY_UNROLL(16)
            for (int r = 0; r < rows; ++r) {
                const float* const q_halves = q + 2 * (r * head_dim + d);
                const Floats q_first = hn::LoadU(tag, q_halves);
                const Floats q_second = hn::LoadU(tag, q_halves + vector_lanes);
                HWY_UNROLL(16)
                for (int p = 0; p < pairs; ++p) {
                    Floats& dot = dots[r * pairs + p];
                    dot = hn::MulAdd(second[p], q_second, hn::MulAdd(first[p], q_first, dot));
                }
            }
        }
        HWY_UNROLL(2)
        for (int i = 0; i < rows * pairs; i += most_sums)
            storePairSums<pairs>(dots + i, scale, AttendScratch::score_stride,
                                 scores + i / pairs * AttendScratch::score_stride);
    }
};

#else

template <NumberFormat format>
struct HeadDimLanes {
    // Query rows of the largest tile. More of them decode K less often, but were no faster: they
    // load more of q for each token.
    static constexpr int most_rows = 4;

    // What storeSums sums beyond the tile's rows is not used.
    template <int rows>
    static constexpr int tile_tokens = tile_vectors / (rows == 3 ? 4 : rows);

    // A score is so many times what the vectors give.
    static constexpr float unit = StoredVectors<format>::unit;

    // Numbers that stage writes for one of q.
    static constexpr int staged_factor = 1;

    // Brings q of row `row` of a tile of `rows` to where scoreTile wants it, the tile's q being at
    // `tile`: row by row, in the order of vectors.
    static HWY_INLINE void stage(const float* HWY_RESTRICT from, int head_dim, int /*rows*/,
                                 int row, float* HWY_RESTRICT tile) {
        float* const to = tile + row * head_dim;
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

    // Scores of `rows` query rows, their q from stage, against tile_tokens<rows> tokens: scale *
    // q.k into scores[row * score_stride + token]; with three rows it overwrites those of a fourth.
    // Each line that is read asks for one of the row `ahead` rows later.
    template <int rows>
    static HWY_INLINE void scoreTile(const float* HWY_RESTRICT q, const std::byte* const* keys,
                                     int head_dim, float scale, int ahead,
                                     float* HWY_RESTRICT scores) {
        constexpr int tokens = tile_tokens<rows>;
        const FloatTag tag;
        Floats dots[tile_vectors];
        HWY_UNROLL(16)
        for (Floats& dot : dots)
            dot = hn::Zero(tag);
        int d = 0;
        for (; d + chunk_size <= head_dim; d += chunk_size) {
            Floats first[tokens];
            Floats second[tokens];
            HWY_UNROLL(16)
            for (int t = 0; t < tokens; ++t)
                StoredVectors<format>::loadPair(elements<format>(keys[t]) + d, first[t], second[t]);
            HWY_UNROLL(16)
            for (int t = 0; t < tokens; ++t)
                prefetchChunk<format>(keys[t + ahead], d);
            HWY_UNROLL(16)
            for (int r = 0; r < rows; ++r) {
                const Floats q_first = hn::LoadU(tag, q + r * head_dim + d);
                const Floats q_second = hn::LoadU(tag, q + r * head_dim + d + vector_lanes);
                HWY_UNROLL(16)
                for (int t = 0; t < tokens; ++t) {
                    Floats& dot = dots[r * tokens + t];
                    dot = hn::MulAdd(second[t], q_second, hn::MulAdd(first[t], q_first, dot));
                }
            }
        }
        if (has_odd_vector && d < head_dim) {
            HWY_UNROLL(16)
            for (int t = 0; t < tokens; ++t) {
                const Floats key = StoredVectors<format>::load(elements<format>(keys[t]) + d);
                prefetchChunk<format>(keys[t + ahead], d);
                HWY_UNROLL(16)
                for (int r = 0; r < rows; ++r) {
                    Floats& dot = dots[r * tokens + t];
                    dot = hn::MulAdd(key, hn::LoadU(tag, q + r * head_dim + d), dot);
                }
            }
        }
        storeSums<tokens>(dots, scale, AttendScratch::score_stride, scores);
    }
};

#endif

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
