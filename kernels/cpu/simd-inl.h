// Vectors of fp32: loading stored K and V, and summing a tile of dot products. Compiled once for
// each instruction set, so it has no ordinary include guard.
#if defined(KVGRID_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVGRID_KERNELS_CPU_SIMD_INL_H_
#undef KVGRID_KERNELS_CPU_SIMD_INL_H_
#else
#define KVGRID_KERNELS_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "kernels/number_formats.h"

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using Floats = hn::Vec<FloatTag>;

// fp32 numbers in a vector.
inline constexpr int vector_lanes = static_cast<int>(HWY_LANES(float));

// How 2 * vector_lanes stored numbers become two vectors. Where `interleaved`, `first` holds the
// even and `second` the odd ones, which for bf16 and e4m3 is cheaper than to keep their order. A
// number is `unit` times what the vector holds, scales apart.
template <NumberFormat format>
struct StoredVectors;

template <>
struct StoredVectors<NumberFormat::bf16> {
    static constexpr bool interleaved = vector_lanes > 1;
    static constexpr float unit = 1.0F;

    static HWY_INLINE Floats load(const std::uint16_t* from) {
        const FloatTag tag;
        const hn::Rebind<std::uint16_t, FloatTag> narrow;
        const hn::RebindToUnsigned<FloatTag> wide;
        return hn::BitCast(tag, hn::ShiftLeft<16>(hn::PromoteTo(wide, hn::LoadU(narrow, from))));
    }

    static HWY_INLINE void loadPair(const std::uint16_t* from, Floats& first, Floats& second) {
#if HWY_TARGET == HWY_SCALAR
        first = load(from);
        second = load(from + 1);
#else
        const FloatTag tag;
        const hn::RebindToUnsigned<FloatTag> wide;
        const hn::Repartition<std::uint16_t, FloatTag> pairs;
        const auto bits = hn::BitCast(wide, hn::LoadU(pairs, from));
        first = hn::BitCast(tag, hn::ShiftLeft<16>(bits));
        second = hn::BitCast(tag, hn::And(bits, hn::Set(wide, 0xFFFF0000U)));
#endif
    }
};

template <>
struct StoredVectors<NumberFormat::fp16> {
    static constexpr bool interleaved = false;
    static constexpr float unit = 1.0F;

    static HWY_INLINE Floats load(const std::uint16_t* from) {
        const FloatTag tag;
#if HWY_TARGET == HWY_SCALAR
        return hn::Set(tag, fp16ToFloat(*from));
#else
        const hn::Rebind<hwy::float16_t, FloatTag> narrow;
        return hn::PromoteTo(tag, hn::LoadU(narrow, reinterpret_cast<const hwy::float16_t*>(from)));
#endif
    }

    static HWY_INLINE void loadPair(const std::uint16_t* from, Floats& first, Floats& second) {
        first = load(from);
        second = load(from + vector_lanes);
    }
};

template <>
struct StoredVectors<NumberFormat::fp8_e4m3> {
#if HWY_CAP_GE256 || HWY_TARGET == HWY_NEON
    // Bytes become the bits of fp16 numbers, but that their bias is larger by 8. There is no NaN
    // among them.
    static constexpr bool interleaved = true;
    static constexpr float unit = 256.0F;

    using HalfBits = hn::Rebind<std::int16_t, FloatTag>;

    // Of numbers whose bytes are the upper ones; what the lower ones hold goes. Two copies of the
    // sign lie above the other bits.
    static HWY_INLINE Floats fromUpperBytes(hn::Vec<HalfBits> bytes) {
        const hn::Rebind<hwy::float16_t, FloatTag> halves;
        const auto bits = hn::And(hn::ShiftRight<1>(bytes),
                                  hn::Set(HalfBits(), static_cast<std::int16_t>(0xBF80)));
        return hn::PromoteTo(FloatTag(), hn::BitCast(halves, bits));
    }

    static HWY_INLINE Floats load(const std::uint8_t* from) {
        const hn::Rebind<std::int8_t, FloatTag> narrow;
        const auto bytes = hn::LoadU(narrow, reinterpret_cast<const std::int8_t*>(from));
        return fromUpperBytes(hn::ShiftLeft<8>(hn::PromoteTo(HalfBits(), bytes)));
    }

    static HWY_INLINE void loadPair(const std::uint8_t* from, Floats& first, Floats& second) {
        const hn::Repartition<std::uint8_t, HalfBits> all;
        const auto bytes = hn::BitCast(HalfBits(), hn::LoadU(all, from));
        first = fromUpperBytes(hn::ShiftLeft<8>(bytes));
        second = fromUpperBytes(bytes);
    }
#else
    static constexpr bool interleaved = false;
    static constexpr float unit = 1.0F;

    static HWY_INLINE Floats load(const std::uint8_t* from) {
        HWY_ALIGN float numbers[vector_lanes];
        for (int i = 0; i < vector_lanes; ++i)
            numbers[i] = e4m3ToFloat(from[i]);
        return hn::Load(FloatTag(), numbers);
    }

    static HWY_INLINE void loadPair(const std::uint8_t* from, Floats& first, Floats& second) {
        first = load(from);
        second = load(from + vector_lanes);
    }
#endif
};

template <>
struct StoredVectors<NumberFormat::int8> {
    static constexpr bool interleaved = false;
    static constexpr float unit = 1.0F;

    static HWY_INLINE Floats load(const std::int8_t* from) {
        const FloatTag tag;
        const hn::Rebind<std::int8_t, FloatTag> narrow;
        const hn::RebindToSigned<FloatTag> wide;
        return hn::ConvertTo(tag, hn::PromoteTo(wide, hn::LoadU(narrow, from)));
    }

    static HWY_INLINE void loadPair(const std::int8_t* from, Floats& first, Floats& second) {
        first = load(from);
        second = load(from + vector_lanes);
    }
};

// Vectors that one call of storeSums sums.
inline constexpr int tile_vectors = vector_lanes < 4 ? 4 : vector_lanes;

#if HWY_TARGET != HWY_SCALAR
// Four vectors become one: block b holds, for each of the four, the sum of its block b.
HWY_INLINE Floats sumWithinBlocks(const Floats* vectors) {
    const FloatTag tag;
    const hn::Repartition<double, FloatTag> pairs;
    const Floats ab = hn::Add(hn::InterleaveLower(tag, vectors[0], vectors[1]),
                              hn::InterleaveUpper(tag, vectors[0], vectors[1]));
    const Floats cd = hn::Add(hn::InterleaveLower(tag, vectors[2], vectors[3]),
                              hn::InterleaveUpper(tag, vectors[2], vectors[3]));
    const auto ab_pairs = hn::BitCast(pairs, ab);
    const auto cd_pairs = hn::BitCast(pairs, cd);
    return hn::Add(hn::BitCast(tag, hn::InterleaveLower(pairs, ab_pairs, cd_pairs)),
                   hn::BitCast(tag, hn::InterleaveUpper(pairs, ab_pairs, cd_pairs)));
}

#if HWY_CAP_GE256
// Adds the upper half of each operand to its lower half.
HWY_INLINE Floats sumHalves(Floats low, Floats high) {
    const FloatTag tag;
    return hn::Add(hn::ConcatLowerLower(tag, high, low), hn::ConcatUpperUpper(tag, high, low));
}
#endif

// Stores runs of `run` lanes to `to`, to + stride, ...
template <int run>
HWY_INLINE void storeRuns(Floats vector, std::ptrdiff_t stride, float* HWY_RESTRICT to) {
    if constexpr (run == vector_lanes) {
        hn::StoreU(vector, FloatTag(), to);
#if HWY_CAP_GE512
    } else if constexpr (run == 8) {
        const hn::Half<FloatTag> half;
        hn::StoreU(hn::LowerHalf(half, vector), half, to);
        hn::StoreU(hn::UpperHalf(half, vector), half, to + stride);
    } else if constexpr (run == 4) {
        const hn::Half<FloatTag> half;
        const hn::Half<decltype(half)> quarter;
        const auto low = hn::LowerHalf(half, vector);
        const auto high = hn::UpperHalf(half, vector);
        hn::StoreU(hn::LowerHalf(quarter, low), quarter, to);
        hn::StoreU(hn::UpperHalf(quarter, low), quarter, to + stride);
        hn::StoreU(hn::LowerHalf(quarter, high), quarter, to + 2 * stride);
        hn::StoreU(hn::UpperHalf(quarter, high), quarter, to + 3 * stride);
#endif
    } else {
        HWY_ALIGN float lanes[vector_lanes];
        hn::Store(vector, FloatTag(), lanes);
        for (int i = 0; i < vector_lanes; ++i)
            to[i / run * stride + i % run] = lanes[i];
    }
}
#endif

// sums[i] = factor * the sum of the lanes of vectors[i], with the same tree of additions for each
// i. Runs of `run` sums go to `to`, to + stride, ...
template <int run>
HWY_INLINE void storeSums(const Floats* vectors, float factor, std::ptrdiff_t stride,
                          float* HWY_RESTRICT to) {
    const FloatTag tag;
    const Floats factors = hn::Set(tag, factor);
#if HWY_TARGET == HWY_SCALAR
    for (int i = 0; i < tile_vectors; ++i)
        hn::StoreU(hn::Mul(vectors[i], factors), tag, to + i / run * stride + i % run);
#else
#if HWY_CAP_GE512
    const Floats a = sumWithinBlocks(vectors);
    const Floats b = sumWithinBlocks(vectors + 4);
    const Floats c = sumWithinBlocks(vectors + 8);
    const Floats d = sumWithinBlocks(vectors + 12);
    const Floats ac = sumHalves(a, c);  // blocks: two parts of a, two of c
    const Floats bd = sumHalves(b, d);
    const Floats upright = hn::OddEvenBlocks(bd, ac);
    const Floats crossed = hn::SwapAdjacentBlocks(hn::OddEvenBlocks(ac, bd));
    const Floats sums = hn::Mul(hn::Add(upright, crossed), factors);
#elif HWY_CAP_GE256
    const Floats sums =
        hn::Mul(sumHalves(sumWithinBlocks(vectors), sumWithinBlocks(vectors + 4)), factors);
#else
    const Floats sums = hn::Mul(sumWithinBlocks(vectors), factors);
#endif
    storeRuns<run>(sums, stride, to);
#endif
}

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
