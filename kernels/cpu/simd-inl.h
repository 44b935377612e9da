// Vectors of fp32: loading stored K and V, and summing a tile of dot products. Compiled once for
// each instruction set, so it has no ordinary include guard.
#if defined(KVGRID_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVGRID_KERNELS_CPU_SIMD_INL_H_
#undef KVGRID_KERNELS_CPU_SIMD_INL_H_
#else
#define KVGRID_KERNELS_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

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
// even and `second` the odd ones, which for bf16 is cheaper than to keep their order.
template <NumberFormat format>
struct StoredVectors;

template <>
struct StoredVectors<NumberFormat::bf16> {
    static constexpr bool interleaved = vector_lanes > 1;

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

    static HWY_INLINE Floats load(const std::uint16_t* from) {
        const FloatTag tag;
#if HWY_TARGET == HWY_SCALAR
        return hn::Set(tag, fp16ToFloat(*from));
#elif HWY_TARGET == HWY_SSE4
        // No conversion instruction. 2^112 rebiases the exponent, and is exact for subnormals too.
        const hn::Rebind<std::uint16_t, FloatTag> narrow;
        const hn::RebindToUnsigned<FloatTag> wide;
        const auto bits = hn::PromoteTo(wide, hn::LoadU(narrow, from));
        const auto magnitude = hn::And(bits, hn::Set(wide, 0x7FFFU));
        const auto shifted = hn::ShiftLeft<13>(magnitude);
        const auto finite =
            hn::BitCast(wide, hn::Mul(hn::BitCast(tag, shifted), hn::Set(tag, 0x1p112F)));
        const auto special = hn::Or(shifted, hn::Set(wide, 0x7F800000U));
        const auto value =
            hn::IfThenElse(hn::Gt(magnitude, hn::Set(wide, 0x7BFFU)), special, finite);
        return hn::BitCast(tag, hn::Or(value, hn::ShiftLeft<16>(hn::Xor(bits, magnitude))));
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

// Vectors that one call of sumTile sums.
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
#endif

// sums[i] = the sum of the lanes of vectors[i]. The tree of additions is the same for each i.
HWY_INLINE void sumTile(const Floats* vectors, float* HWY_RESTRICT sums) {
    const FloatTag tag;
#if HWY_TARGET == HWY_SCALAR
    for (int i = 0; i < tile_vectors; ++i)
        hn::StoreU(vectors[i], tag, sums + i);
#elif HWY_CAP_GE512
    const Floats a = sumWithinBlocks(vectors);
    const Floats b = sumWithinBlocks(vectors + 4);
    const Floats c = sumWithinBlocks(vectors + 8);
    const Floats d = sumWithinBlocks(vectors + 12);
    const Floats ac = sumHalves(a, c);  // blocks: two parts of a, two of c
    const Floats bd = sumHalves(b, d);
    const Floats upright = hn::OddEvenBlocks(bd, ac);
    const Floats crossed = hn::SwapAdjacentBlocks(hn::OddEvenBlocks(ac, bd));
    hn::StoreU(hn::Add(upright, crossed), tag, sums);
#elif HWY_CAP_GE256
    hn::StoreU(sumHalves(sumWithinBlocks(vectors), sumWithinBlocks(vectors + 4)), tag, sums);
#else
    hn::StoreU(sumWithinBlocks(vectors), tag, sums);
#endif
}

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
