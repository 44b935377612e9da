// Conversions between fp32 and the stored formats, shared by host and device.
//
// Rounding is to nearest, ties to even. NaN stays NaN; overflow of fp16 and bf16 is infinity.
//
// fp8 e4m3 and int8 are stored with a scale, one fp16 number for each row (the head_dim elements of
// K or V of one token and KV head): an element is worth stored * scale, which fp32 holds exactly.
//   amax    the largest |x| of the row, NaN if there is one
//   scale   amax / the format's largest number, rounded up to fp16, at least 2^-24
//   stored  x / scale, rounded
// Rounded up, the scale lets no element exceed the format's largest number. A row that no fp16
// scale can hold has the scale infinity, and a row with a NaN the scale NaN; its elements are
// stored as zeros, so that all of them are worth NaN: a broken input stays visible. Every operation
// is IEEE's, so all devices store the same bits.
//
// With a fixed scale (that of a checkpoint) the scale is not of the row, and elements that lie
// beyond the format's largest number become it, with their sign. A row with an infinity or a NaN
// has the scale that it has above, and is worth NaN.
#pragma once

#include <cstdint>

#include <kvgrid/types.h>

#include "kernels/exact.h"
#include "kernels/host_device.h"

namespace kvgrid {

KVGRID_HOST_DEVICE constexpr float fp16ToFloat(std::uint16_t bits) {
    const std::uint32_t sign = (bits & 0x8000U) << 16;
    const std::uint32_t magnitude = bits & 0x7FFFU;
    if (magnitude >= 0x7C00U)
        return __builtin_bit_cast(float, sign | 0x7F800000U | (magnitude & 0x3FFU) << 13);
    if (magnitude >= 0x0400U)
        return __builtin_bit_cast(float, sign | ((magnitude << 13) + (112U << 23)));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24F;
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, subnormal));
}

KVGRID_HOST_DEVICE constexpr std::uint16_t fp16FromFloat(float value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t sign = (bits >> 16) & 0x8000U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U)
        return static_cast<std::uint16_t>(sign | 0x7E00U | ((magnitude >> 13) & 0x3FFU));
    if (magnitude >= 0x47800000U) return static_cast<std::uint16_t>(sign | 0x7C00U);
    if (magnitude >= 0x38800000U) {
        const std::uint32_t rounding = 0x0FFFU + ((magnitude >> 13) & 1U);
        return static_cast<std::uint16_t>(sign | ((magnitude - (112U << 23) + rounding) >> 13));
    }
    // Below the smallest normal the unit is 2^-24, which is also that of fp32 numbers in [0.5, 1):
    // the addition rounds.
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign |
                                      (__builtin_bit_cast(std::uint32_t, shifted) - 0x3F000000U));
}

KVGRID_HOST_DEVICE constexpr float bf16ToFloat(std::uint16_t bits) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

KVGRID_HOST_DEVICE constexpr std::uint16_t bf16FromFloat(float value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
    return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

// FP8 E4M3 of the Open Compute Project (OFP8 specification 1.0): bias 7, no infinity, NaN where all
// bits after the sign are set, 448 the largest number.
KVGRID_HOST_DEVICE constexpr float e4m3ToFloat(std::uint8_t bits) {
    const std::uint32_t sign = (bits & 0x80U) << 24;
    const std::uint32_t magnitude = bits & 0x7FU;
    if (magnitude == 0x7FU) return __builtin_bit_cast(float, sign | 0x7FC00000U);
    if (magnitude >= 0x08U)
        return __builtin_bit_cast(float, sign | ((magnitude << 20) + (120U << 23)));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-9F;
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, subnormal));
}

// Beyond the largest number, rounded, is NaN. There is one NaN, as its sign differs between
// devices. Both ways are computed, so that loops can be vectorised.
KVGRID_HOST_DEVICE constexpr std::uint8_t e4m3FromFloat(float value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t sign = (bits >> 24) & 0x80U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    const std::uint32_t rounding = 0x7FFFFU + ((magnitude >> 20) & 1U);
    const std::uint32_t normal = (magnitude - (120U << 23) + rounding) >> 20;
    // As with fp16: the unit of subnormals, 2^-9, is that of fp32 numbers in [2^14, 2^15).
    const float shifted = __builtin_bit_cast(float, magnitude) + 0x1p14F;
    const std::uint32_t subnormal = __builtin_bit_cast(std::uint32_t, shifted) - 0x46800000U;
    const std::uint32_t rounded = sign | (magnitude >= 0x3C800000U ? normal : subnormal);
    // 464 is half a unit above 448, which is even.
    return static_cast<std::uint8_t>(magnitude > 0x43E80000U ? 0x7FU : rounded);
}

// |value| is 127 at most: `quantised` sees to it.
KVGRID_HOST_DEVICE constexpr std::int8_t int8FromFloat(float value) {
    constexpr float to_integer = 12582912.0F;  // 1.5 x 2^23: adding it rounds to an integer
    return static_cast<std::int8_t>(__builtin_bit_cast(std::uint32_t, value + to_integer) & 0xFFU);
}

// A format as a type, for code that is compiled once a format.
//   Bits       how one number is stored
//   toFloat    exact
//   fromFloat  rounds to nearest, ties to even
//   largest    of formats with scales: their largest number, which a row's largest becomes
template <NumberFormat format>
struct Stored;

template <>
struct Stored<NumberFormat::fp32> {
    using Bits = float;
    KVGRID_HOST_DEVICE static constexpr float toFloat(float bits) { return bits; }
    KVGRID_HOST_DEVICE static constexpr float fromFloat(float value) { return value; }
};

template <>
struct Stored<NumberFormat::fp16> {
    using Bits = std::uint16_t;
    KVGRID_HOST_DEVICE static constexpr float toFloat(Bits bits) { return fp16ToFloat(bits); }
    KVGRID_HOST_DEVICE static constexpr Bits fromFloat(float value) { return fp16FromFloat(value); }
};

template <>
struct Stored<NumberFormat::bf16> {
    using Bits = std::uint16_t;
    KVGRID_HOST_DEVICE static constexpr float toFloat(Bits bits) { return bf16ToFloat(bits); }
    KVGRID_HOST_DEVICE static constexpr Bits fromFloat(float value) { return bf16FromFloat(value); }
};

template <>
struct Stored<NumberFormat::fp8_e4m3> {
    using Bits = std::uint8_t;
    static constexpr float largest = 448.0F;
    KVGRID_HOST_DEVICE static constexpr float toFloat(Bits bits) { return e4m3ToFloat(bits); }
    KVGRID_HOST_DEVICE static constexpr Bits fromFloat(float value) { return e4m3FromFloat(value); }
};

template <>
struct Stored<NumberFormat::int8> {
    using Bits = std::int8_t;
    static constexpr float largest = 127.0F;
    KVGRID_HOST_DEVICE static constexpr float toFloat(Bits bits) { return bits; }
    KVGRID_HOST_DEVICE static constexpr Bits fromFloat(float value) { return int8FromFloat(value); }
};

// |value| as an integer: they order as the magnitudes do, and NaN is larger than all numbers.
KVGRID_HOST_DEVICE constexpr std::uint32_t magnitudeBits(float value) {
    return __builtin_bit_cast(std::uint32_t, value) & 0x7FFFFFFFU;
}

// The fp16 bits of the scale of a row whose largest magnitudeBits are `amax_bits`; `largest` is
// Stored<format>::largest.
KVGRID_HOST_DEVICE std::uint16_t scaleFor(std::uint32_t amax_bits, float largest) {
    if (amax_bits > 0x7F800000U) return 0x7E00U;
    const float exact_scale = exact::quotient(__builtin_bit_cast(float, amax_bits), largest);
    std::uint16_t scale = fp16FromFloat(exact_scale);
    if (fp16ToFloat(scale) < exact_scale) ++scale;  // above the largest number comes infinity
    return scale == 0 ? 1 : scale;                  // 2^-24
}

// The same where the scale is fixed: those fp16 bits, unless the row has an infinity or a NaN.
KVGRID_HOST_DEVICE std::uint16_t fixedScaleFor(std::uint32_t amax_bits, std::uint16_t fixed) {
    if (amax_bits > 0x7F800000U) return 0x7E00U;
    return amax_bits == 0x7F800000U ? std::uint16_t{0x7C00U} : fixed;
}

// An element of a row with that scale, as it is stored.
template <NumberFormat format>
KVGRID_HOST_DEVICE typename Stored<format>::Bits quantised(float value, float scale) {
    constexpr float largest = Stored<format>::largest;
    const float quotient = exact::quotient(value, scale);
    const float at_most = quotient > largest ? largest : quotient;
    const float within = at_most < -largest ? -largest : at_most;
    return Stored<format>::fromFloat(within == within ? within : 0.0F);
}

}  // namespace kvgrid
