#include "kernels/cpu/convert.h"

#include <algorithm>
#include <string>

#include <kvgrid/error.h>

#include "kernels/cpu/simd_targets.h"
#include "kernels/number_formats.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convert.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Plain loops where the compiler vectorises them, in each target's instructions.

void bf16ToFloats(const std::uint16_t* HWY_RESTRICT from, std::int64_t count,
                  float* HWY_RESTRICT to) {
    for (std::int64_t i = 0; i < count; ++i)
        to[i] = bf16ToFloat(from[i]);
}

void bf16FromFloats(const float* HWY_RESTRICT from, std::int64_t count,
                    std::uint16_t* HWY_RESTRICT to) {
    for (std::int64_t i = 0; i < count; ++i)
        to[i] = bf16FromFloat(from[i]);
}

#if HWY_CAP_GE256 || HWY_TARGET == HWY_NEON
#define KVGRID_NATIVE_FP16 1
#else
#define KVGRID_NATIVE_FP16 0
#endif

void fp16ToFloats(const std::uint16_t* HWY_RESTRICT from, std::int64_t count,
                  float* HWY_RESTRICT to) {
    std::int64_t i = 0;
#if KVGRID_NATIVE_FP16
    const hn::ScalableTag<float> wide;
    const hn::Rebind<hwy::float16_t, decltype(wide)> narrow;
    const auto step = static_cast<std::int64_t>(hn::Lanes(wide));
    const auto* const halves = reinterpret_cast<const hwy::float16_t*>(from);
    for (; i + step <= count; i += step)
        hn::StoreU(hn::PromoteTo(wide, hn::LoadU(narrow, halves + i)), wide, to + i);
#endif
    for (; i < count; ++i)
        to[i] = fp16ToFloat(from[i]);
}

void fp16FromFloats(const float* HWY_RESTRICT from, std::int64_t count,
                    std::uint16_t* HWY_RESTRICT to) {
    std::int64_t i = 0;
#if KVGRID_NATIVE_FP16
    const hn::ScalableTag<float> wide;
    const hn::Rebind<hwy::float16_t, decltype(wide)> narrow;
    const auto step = static_cast<std::int64_t>(hn::Lanes(wide));
    auto* const halves = reinterpret_cast<hwy::float16_t*>(to);
    for (; i + step <= count; i += step)
        hn::StoreU(hn::DemoteTo(narrow, hn::LoadU(wide, from + i)), narrow, halves + i);
#endif
    for (; i < count; ++i)
        to[i] = fp16FromFloat(from[i]);
}

#undef KVGRID_NATIVE_FP16

template <NumberFormat format>
std::uint16_t quantiseRow(const float* HWY_RESTRICT from, std::int64_t count,
                          typename Stored<format>::Bits* HWY_RESTRICT to,
                          std::optional<std::uint16_t> fixed_scale) {
    std::uint32_t amax_bits = 0;
    for (std::int64_t i = 0; i < count; ++i)
        amax_bits = std::max(amax_bits, magnitudeBits(from[i]));
    const std::uint16_t scale = fixed_scale ? fixedScaleFor(amax_bits, *fixed_scale)
                                            : scaleFor(amax_bits, Stored<format>::largest);
    const float factor = fp16ToFloat(scale);
    for (std::int64_t i = 0; i < count; ++i)
        to[i] = quantised<format>(from[i], factor);
    return scale;
}

std::uint16_t quantiseE4m3(const float* from, std::int64_t count, void* to,
                           std::optional<std::uint16_t> fixed_scale) {
    return quantiseRow<NumberFormat::fp8_e4m3>(from, count, static_cast<std::uint8_t*>(to),
                                               fixed_scale);
}

std::uint16_t quantiseInt8(const float* from, std::int64_t count, void* to,
                           std::optional<std::uint16_t> fixed_scale) {
    return quantiseRow<NumberFormat::int8>(from, count, static_cast<std::int8_t*>(to), fixed_scale);
}

template <NumberFormat format>
void dequantiseRow(const typename Stored<format>::Bits* HWY_RESTRICT from, std::uint16_t scale,
                   std::int64_t count, float* HWY_RESTRICT to) {
    const float factor = fp16ToFloat(scale);
    for (std::int64_t i = 0; i < count; ++i)
        to[i] = Stored<format>::toFloat(from[i]) * factor;
}

void dequantiseE4m3(const void* from, std::uint16_t scale, std::int64_t count, float* to) {
    dequantiseRow<NumberFormat::fp8_e4m3>(static_cast<const std::uint8_t*>(from), scale, count, to);
}

void dequantiseInt8(const void* from, std::uint16_t scale, std::int64_t count, float* to) {
    dequantiseRow<NumberFormat::int8>(static_cast<const std::int8_t*>(from), scale, count, to);
}

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvgrid::cpu {
namespace {

HWY_EXPORT(bf16ToFloats);
HWY_EXPORT(bf16FromFloats);
HWY_EXPORT(fp16ToFloats);
HWY_EXPORT(fp16FromFloats);
HWY_EXPORT(quantiseE4m3);
HWY_EXPORT(quantiseInt8);
HWY_EXPORT(dequantiseE4m3);
HWY_EXPORT(dequantiseInt8);

[[noreturn]] void refuse(NumberFormat format) {
    throw Error(ErrorCode::internal, "number format " + std::to_string(static_cast<int>(format)) +
                                         " cannot be converted here");
}

}  // namespace

void toFloats(NumberFormat format, const void* from, std::int64_t count, float* to) {
    const auto* const bits = static_cast<const std::uint16_t*>(from);
    switch (format) {
    case NumberFormat::fp32:
        std::copy_n(static_cast<const float*>(from), count, to);
        return;
    case NumberFormat::fp16:
        HWY_DYNAMIC_DISPATCH(fp16ToFloats)(bits, count, to);
        return;
    case NumberFormat::bf16:
        HWY_DYNAMIC_DISPATCH(bf16ToFloats)(bits, count, to);
        return;
    case NumberFormat::fp8_e4m3:
    case NumberFormat::int8:
        break;
    }
    refuse(format);
}

void fromFloats(NumberFormat format, const float* from, std::int64_t count, void* to) {
    auto* const bits = static_cast<std::uint16_t*>(to);
    switch (format) {
    case NumberFormat::fp32:
        std::copy_n(from, count, static_cast<float*>(to));
        return;
    case NumberFormat::fp16:
        HWY_DYNAMIC_DISPATCH(fp16FromFloats)(from, count, bits);
        return;
    case NumberFormat::bf16:
        HWY_DYNAMIC_DISPATCH(bf16FromFloats)(from, count, bits);
        return;
    case NumberFormat::fp8_e4m3:
    case NumberFormat::int8:
        break;
    }
    refuse(format);
}

std::uint16_t quantise(NumberFormat format, const float* from, std::int64_t count, void* to,
                       std::optional<std::uint16_t> fixed_scale) {
    if (format == NumberFormat::fp8_e4m3)
        return HWY_DYNAMIC_DISPATCH(quantiseE4m3)(from, count, to, fixed_scale);
    if (format == NumberFormat::int8)
        return HWY_DYNAMIC_DISPATCH(quantiseInt8)(from, count, to, fixed_scale);
    refuse(format);
}

void dequantise(NumberFormat format, const void* from, std::uint16_t scale, std::int64_t count,
                float* to) {
    if (format == NumberFormat::fp8_e4m3)
        HWY_DYNAMIC_DISPATCH(dequantiseE4m3)(from, scale, count, to);
    else if (format == NumberFormat::int8)
        HWY_DYNAMIC_DISPATCH(dequantiseInt8)(from, scale, count, to);
    else
        refuse(format);
}

}  // namespace kvgrid::cpu
#endif
