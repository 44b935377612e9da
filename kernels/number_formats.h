// Conversions between fp32 and the stored formats, shared by host and device.
//
// Rounding is to nearest, ties to even. NaN stays NaN; overflow of fp16 and bf16 is infinity.
// fp8 e4m3 and int8 have their place here and come with the low-bit formats; until then the floors
// above refuse them.
#pragma once

#include <cstdint>

#include <kvgrid/types.h>

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

// A format as a type, for code that is compiled once a format.
//   Bits       how one number is stored
//   toFloat    exact
//   fromFloat  rounds to nearest, ties to even
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

}  // namespace kvgrid
