// Scores of a few query rows against 16 tokens, whose numbers are in the lanes of a vector: K is
// transposed as it is loaded, and no sum goes over lanes. For AVX-512; with 8 lanes, and 16
// registers, it was slower than HeadDimLanes. Compiled once for each instruction set, so it has no
// ordinary include guard.
#if defined(KVGRID_KERNELS_CPU_TOKEN_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVGRID_KERNELS_CPU_TOKEN_LANES_INL_H_
#undef KVGRID_KERNELS_CPU_TOKEN_LANES_INL_H_
#else
#define KVGRID_KERNELS_CPU_TOKEN_LANES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend_unit.h"
#include "kernels/cpu/score_tile-inl.h"
#include "kernels/cpu/simd-inl.h"

#if HWY_CAP_GE512

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {

// From this GQA group on TokenLanes are faster. With fewer query rows memory bounds attention, or
// too few of them share the transposing.
inline constexpr int token_lanes_group = 5;
// Not for fp16, whose conversion wants numbers side by side, nor for e4m3, whose subnormal numbers
// want instructions of their own: they gained nothing.
template <NumberFormat format>
inline constexpr bool has_token_lanes =
    format == NumberFormat::bf16 || format == NumberFormat::int8;

// A word of stored numbers of each of 16 tokens.
using WordTag = hn::RebindToUnsigned<FloatTag>;
using Words = hn::Vec<WordTag>;

// 16 bytes of each token, those of token 4 b + i in block b of tokens[i]: words[i] becomes word i
// of each token.
HWY_INLINE void transpose(const Words (&tokens)[4], Words (&words)[4]) {
    const WordTag tag;
    const hn::Repartition<std::uint64_t, WordTag> pairs;
    const auto a = hn::BitCast(pairs, hn::InterleaveLower(tag, tokens[0], tokens[1]));
    const auto b = hn::BitCast(pairs, hn::InterleaveLower(tag, tokens[2], tokens[3]));
    const auto c = hn::BitCast(pairs, hn::InterleaveUpper(tag, tokens[0], tokens[1]));
    const auto d = hn::BitCast(pairs, hn::InterleaveUpper(tag, tokens[2], tokens[3]));
    words[0] = hn::BitCast(tag, hn::InterleaveLower(pairs, a, b));
    words[1] = hn::BitCast(tag, hn::InterleaveUpper(pairs, a, b));
    words[2] = hn::BitCast(tag, hn::InterleaveLower(pairs, c, d));
    words[3] = hn::BitCast(tag, hn::InterleaveUpper(pairs, c, d));
}

// Block b: 16 bytes of rows[4 * b], from byte `at` on. `volatile` has the compiler read the
// addresses anew each time: there are registers for few of the 16.
HWY_INLINE Words loadBlocks(const std::byte* const volatile* rows, int at) {
    const WordTag tag;
    const hn::Half<WordTag> half;
    const hn::Half<decltype(half)> block;
    const auto load = [&](int b) {
        return hn::LoadU(block, reinterpret_cast<const std::uint32_t*>(rows[4 * b] + at));
    };
    return hn::Combine(tag, hn::Combine(half, load(3), load(2)),
                       hn::Combine(half, load(1), load(0)));
}

// How a vector of words becomes `count` vectors of numbers, in the order of the row. A number is
// `unit` times what the vector holds, scales apart.
template <NumberFormat format>
struct KeyWords;

template <>
struct KeyWords<NumberFormat::bf16> {
    static constexpr int count = 2;
    static constexpr float unit = 1.0F;

    static HWY_INLINE void split(Words words, Floats* to) {
        const FloatTag tag;
        to[0] = hn::BitCast(tag, hn::ShiftLeft<16>(words));
        to[1] = hn::BitCast(tag, hn::And(words, hn::Set(WordTag(), 0xFFFF0000U)));
    }
};

template <>
struct KeyWords<NumberFormat::int8> {
    static constexpr int count = 4;
    static constexpr float unit = 0x1p-24F;

    static HWY_INLINE void split(Words words, Floats* to) {
        to[0] = fromUpperBytes(hn::ShiftLeft<24>(words));
        to[1] = fromUpperBytes(hn::ShiftLeft<16>(words));
        to[2] = fromUpperBytes(hn::ShiftLeft<8>(words));
        to[3] = fromUpperBytes(words);
    }

    static HWY_INLINE Floats fromUpperBytes(Words words) {
        const hn::RebindToSigned<WordTag> bits;
        return hn::ConvertTo(FloatTag(),
                             hn::BitCast(bits, hn::And(words, hn::Set(WordTag(), 0xFF000000U))));
    }
};

template <NumberFormat format>
struct TokenLanes {
    // Query rows of the largest tile: two vectors of sums each.
    static constexpr int most_rows = 8;

    template <int rows>
    static constexpr int tile_tokens = vector_lanes;

    // A score is so many times what the vectors give.
    static constexpr float unit = KeyWords<format>::unit;

    // Numbers that stage writes for one of q.
    static constexpr int staged_factor = 1;

    // Brings q of row `row` of a tile of `rows` to where scoreTile wants it, the tile's q being at
    // `tile`: element by element, those of all rows side by side.
    static HWY_INLINE void stage(const float* HWY_RESTRICT from, int head_dim, int rows, int row,
                                 float* HWY_RESTRICT tile) {
        for (int d = 0; d < head_dim; ++d)
            tile[d * rows + row] = from[d];
    }

    // Scores of `rows` query rows, their q from stage, against tile_tokens<rows> tokens: scale *
    // q.k into scores[row * score_stride + token]. Of 32 elements the even and the odd ones have a
    // chain each: one over all of them would round scores more often than HeadDimLanes do.
    // Each line that is read asks for one of the row `ahead` rows later; a row's last line, if it
    // is a shorter one, for those of some tokens.
    template <int rows>
    static HWY_INLINE void scoreTile(const float* HWY_RESTRICT q, const std::byte* const* keys,
                                     int head_dim, float scale, int ahead,
                                     float* HWY_RESTRICT scores) {
        using Numbers = KeyWords<format>;
        constexpr int step = 16;
        constexpr int line = 64;
        const FloatTag tag;
        constexpr int chain_bytes = 32 * static_cast<int>(sizeof(typename Stored<format>::Bits));
        Floats even[rows];
        Floats odd[rows];
        Floats sums[rows];
        HWY_UNROLL(8)
        for (int r = 0; r < rows; ++r)
            even[r] = odd[r] = sums[r] = hn::Zero(tag);
        const int row_bytes = head_dim * static_cast<int>(sizeof(typename Stored<format>::Bits));
        Words tokens[4];
        HWY_UNROLL(4)
        for (int i = 0; i < 4; ++i)
            tokens[i] = loadBlocks(keys + i, 0);
        for (int at = 0; at < row_bytes; at += step) {
            Words words[4];
            transpose(tokens, words);
            const int next = at + step < row_bytes ? at + step : 0;
            // A quarter of the tokens in each quarter of a line.
            const int first = at % line / step * 4;
            HWY_UNROLL(4)
            for (int t = first; t < first + 4; ++t)
                prefetchLine(keys[t + ahead] + at / line * line);
            HWY_UNROLL(4)
            for (int w = 0; w < 4; ++w) {
                Floats key[Numbers::count];
                Numbers::split(words[w], key);
                HWY_UNROLL(4)
                for (int i = 0; i < Numbers::count; i += 2) {
                    HWY_UNROLL(8)
                    for (int r = 0; r < rows; ++r)
                        even[r] = hn::MulAdd(key[i], broadcast(q + i * rows + r), even[r]);
                    HWY_UNROLL(8)
                    for (int r = 0; r < rows; ++r)
                        odd[r] = hn::MulAdd(key[i + 1], broadcast(q + (i + 1) * rows + r), odd[r]);
                }
                q += Numbers::count * rows;
                // Between the multiply-adds: together the loads would keep them waiting.
                tokens[w] = loadBlocks(keys + w, next);
            }
            if (next % chain_bytes != 0) continue;
            HWY_UNROLL(8)
            for (int r = 0; r < rows; ++r) {
                sums[r] = hn::Add(sums[r], hn::Add(even[r], odd[r]));
                even[r] = odd[r] = hn::Zero(tag);
            }
        }
        const Floats scales = hn::Set(tag, scale);
        HWY_UNROLL(8)
        for (int r = 0; r < rows; ++r)
            hn::StoreU(hn::Mul(sums[r], scales), tag, scores + r * AttendScratch::score_stride);
    }
};

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

#endif  // per-target include guard
