// Loads and stores of `count` neighbouring numbers in a format known at run time, one access each.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/number_formats.h"

namespace kvgrid::cuda {

// Numbers that lie side by side, count a power of two; aligned to their size.
template <typename T, int count>
struct alignas(sizeof(T) * count) Pack {
    T values[count];
};

template <int count>
__device__ __forceinline__ Pack<float, count> loadNumbers(NumberFormat format, const void* base,
                                                          std::int64_t at) {
    if (format == NumberFormat::fp32)
        return *reinterpret_cast<const Pack<float, count>*>(static_cast<const float*>(base) + at);
    const auto bits = *reinterpret_cast<const Pack<std::uint16_t, count>*>(
        static_cast<const std::uint16_t*>(base) + at);
    Pack<float, count> numbers;
#pragma unroll
    for (int i = 0; i < count; ++i)
        numbers.values[i] = format == NumberFormat::fp16 ? fp16ToFloat(bits.values[i])
                                                         : bf16ToFloat(bits.values[i]);
    return numbers;
}

template <int count>
__device__ __forceinline__ void storeNumbers(NumberFormat format, void* base, std::int64_t at,
                                             const Pack<float, count>& numbers) {
    if (format == NumberFormat::fp32) {
        *reinterpret_cast<Pack<float, count>*>(static_cast<float*>(base) + at) = numbers;
        return;
    }
    Pack<std::uint16_t, count> bits;
#pragma unroll
    for (int i = 0; i < count; ++i)
        bits.values[i] = format == NumberFormat::fp16 ? fp16FromFloat(numbers.values[i])
                                                      : bf16FromFloat(numbers.values[i]);
    *reinterpret_cast<Pack<std::uint16_t, count>*>(static_cast<std::uint16_t*>(base) + at) = bits;
}

// The same where the format has scales. Its numbers of a row with the scale `scale`.
template <int count>
__device__ __forceinline__ void storeQuantised(NumberFormat format, void* base, std::int64_t at,
                                               const Pack<float, count>& numbers, float scale) {
    Pack<std::uint8_t, count> bits;
#pragma unroll
    for (int i = 0; i < count; ++i)
        bits.values[i] = format == NumberFormat::fp8_e4m3
                             ? quantised<NumberFormat::fp8_e4m3>(numbers.values[i], scale)
                             : static_cast<std::uint8_t>(
                                   quantised<NumberFormat::int8>(numbers.values[i], scale));
    *reinterpret_cast<Pack<std::uint8_t, count>*>(static_cast<std::uint8_t*>(base) + at) = bits;
}

// What a stored number of a row with that scale is worth.
__device__ __forceinline__ float dequantised(NumberFormat format, std::uint8_t bits, float scale) {
    const float number = format == NumberFormat::fp8_e4m3
                             ? e4m3ToFloat(bits)
                             : Stored<NumberFormat::int8>::toFloat(static_cast<std::int8_t>(bits));
    return exact::product(number, scale);
}

}  // namespace kvgrid::cuda
