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

// A vector of *from alone. As an integer: x86-64 processors load and broadcast those without a
// shuffle, which floats cost some of them with AVX-512.
HWY_INLINE Floats broadcast(const float* from) {
    const hn::RebindToSigned<FloatTag> bits;
    std::int32_t number;
    hwy::CopySameSize(from, &number);
    return hn::BitCast(FloatTag(), hn::Set(bits, number));
}

#if HWY_CAP_GE512
// A vector whose lower half is read from `a`, the upper from `b`.
template <class Tag, typename T>
HWY_INLINE hn::Vec<Tag> loadSideBySide(Tag tag, const T* a, const T* b) {
    const hn::Half<Tag> half;
    return hn::Combine(tag, hn::LoadU(half, b), hn::LoadU(half, a));
}
#endif

// How 2 * vector_lanes stored numbers become two vectors. Where `interleaved`, `first` holds the
// even and `second` the odd ones, which for bf16 and e4m3 is cheaper than to keep their order. A
// number is `unit` times what the vector holds, scales apart. loadHalves does so with vector_lanes
// numbers of each of two rows, one in the lower halves, one in the upper.
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

#if HWY_TARGET != HWY_SCALAR
    static HWY_INLINE void split(hn::Vec<hn::Repartition<std::uint16_t, FloatTag>> pairs,
                                 Floats& first, Floats& second) {
        const FloatTag tag;
        const hn::RebindToUnsigned<FloatTag> wide;
        const auto bits = hn::BitCast(wide, pairs);
        first = hn::BitCast(tag, hn::ShiftLeft<16>(bits));
        second = hn::BitCast(tag, hn::And(bits, hn::Set(wide, 0xFFFF0000U)));
    }
#endif

    static HWY_INLINE void loadPair(const std::uint16_t* from, Floats& first, Floats& second) {
#if HWY_TARGET == HWY_SCALAR
        first = load(from);
        second = load(from + 1);
#else
        const hn::Repartition<std::uint16_t, FloatTag> pairs;
        split(hn::LoadU(pairs, from), first, second);
#endif
    }

#if HWY_CAP_GE512
    static HWY_INLINE void loadHalves(const std::uint16_t* a, const std::uint16_t* b, Floats& first,
                                      Floats& second) {
        const hn::Repartition<std::uint16_t, FloatTag> pairs;
        split(loadSideBySide(pairs, a, b), first, second);
    }
#endif
};

// What vectors of numbers in plain order have in common: Derived loads one.
template <typename Derived, typename Bits>
struct PlainVectors {
    static constexpr bool interleaved = false;

    static HWY_INLINE void loadPair(const Bits* from, Floats& first, Floats& second) {
        first = Derived::load(from);
        second = Derived::load(from + vector_lanes);
    }

#if HWY_CAP_GE512
    static HWY_INLINE void loadHalves(const Bits* a, const Bits* b, Floats& first, Floats& second) {
        constexpr int half = vector_lanes / 2;
        first = Derived::loadHalf(a, b);
        second = Derived::loadHalf(a + half, b + half);
    }
#endif
};

template <>
struct StoredVectors<NumberFormat::fp16>
    : PlainVectors<StoredVectors<NumberFormat::fp16>, std::uint16_t> {
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

#if HWY_CAP_GE512
    static HWY_INLINE Floats loadHalf(const std::uint16_t* a, const std::uint16_t* b) {
        const hn::Rebind<std::uint16_t, FloatTag> bits;
        const hn::Rebind<hwy::float16_t, FloatTag> narrow;
        return hn::PromoteTo(FloatTag(), hn::BitCast(narrow, loadSideBySide(bits, a, b)));
    }
#endif
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
        split(hn::BitCast(HalfBits(), hn::LoadU(all, from)), first, second);
    }

    static HWY_INLINE void split(hn::Vec<HalfBits> bytes, Floats& first, Floats& second) {
        first = fromUpperBytes(hn::ShiftLeft<8>(bytes));
        second = fromUpperBytes(bytes);
    }

#if HWY_CAP_GE512
    static HWY_INLINE void loadHalves(const std::uint8_t* a, const std::uint8_t* b, Floats& first,
                                      Floats& second) {
        const hn::Repartition<std::uint8_t, HalfBits> all;
        split(hn::BitCast(HalfBits(), loadSideBySide(all, a, b)), first, second);
    }
#endif
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
struct StoredVectors<NumberFormat::int8>
    : PlainVectors<StoredVectors<NumberFormat::int8>, std::int8_t> {
    static constexpr float unit = 1.0F;

    static HWY_INLINE Floats load(const std::int8_t* from) {
        const FloatTag tag;
        const hn::Rebind<std::int8_t, FloatTag> narrow;
        const hn::RebindToSigned<FloatTag> wide;
        return hn::ConvertTo(tag, hn::PromoteTo(wide, hn::LoadU(narrow, from)));
    }

#if HWY_CAP_GE512
    static HWY_INLINE Floats loadHalf(const std::int8_t* a, const std::int8_t* b) {
        const hn::Rebind<std::int8_t, FloatTag> narrow;
        const hn::RebindToSigned<FloatTag> wide;
        return hn::ConvertTo(FloatTag(), hn::PromoteTo(wide, loadSideBySide(narrow, a, b)));
    }
#endif
};

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

#endif

#if HWY_CAP_GE512

// Vectors that one call of storePairSums sums.
inline constexpr int most_sums = 8;

// Sums over the halves of vectors, times `factor` and with the same tree of additions for each:
// those of vectors i = 0 to pairs - 1 to to[i] (lower half) and to[pairs + i] (upper), those of the
// next vectors likewise to to + stride.
template <int pairs>
HWY_INLINE void storePairSums(const Floats* vectors, float factor, std::ptrdiff_t stride,
                              float* HWY_RESTRICT to) {
    static_assert(pairs == 4 || pairs == most_sums);
    const FloatTag tag;
    const Floats a = sumWithinBlocks(vectors);
    const Floats b = sumWithinBlocks(vectors + 4);
    // Blocks: lower half of a, of b, upper half of a, of b.
    const Floats sums =
        hn::Mul(hn::Add(hn::OddEvenBlocks(b, a), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b))),
                hn::Set(tag, factor));
    const hn::Half<FloatTag> half;
    const hn::Half<decltype(half)> quarter;
    const auto lower = hn::LowerHalf(half, sums);
    const auto upper = hn::UpperHalf(half, sums);
    float* const next = to + (pairs == 4 ? stride : 4);
    hn::StoreU(hn::LowerHalf(quarter, lower), quarter, to);
    hn::StoreU(hn::UpperHalf(quarter, lower), quarter, next);
    hn::StoreU(hn::LowerHalf(quarter, upper), quarter, to + pairs);
    hn::StoreU(hn::UpperHalf(quarter, upper), quarter, next + pairs);
}

#else

// Vectors that one call of storeSums sums.
inline constexpr int tile_vectors = vector_lanes < 4 ? 4 : vector_lanes;

#if HWY_TARGET != HWY_SCALAR
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
#if HWY_CAP_GE256
    const Floats sums =
        hn::Mul(sumHalves(sumWithinBlocks(vectors), sumWithinBlocks(vectors + 4)), factors);
#else
    const Floats sums = hn::Mul(sumWithinBlocks(vectors), factors);
#endif
    storeRuns<run>(sums, stride, to);
#endif
}

#endif

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
