// Rows of numbers between fp32 and the stored formats, vectorised.
#pragma once

#include <cstdint>
#include <optional>

#include <kvgrid/types.h>

namespace kvgrid::cpu {

// fp32, fp16 and bf16; any other format throws Error. Rounding as in number_formats.h.
void toFloats(NumberFormat format, const void* from, std::int64_t count, float* to);
void fromFloats(NumberFormat format, const float* from, std::int64_t count, void* to);

// A row of a format with scales, as number_formats.h says; any other format throws Error. quantise
// returns the fp16 bits of the scale: of the row's own, or, of a sound row, of the fixed one.
[[nodiscard]] std::uint16_t quantise(NumberFormat format, const float* from, std::int64_t count,
                                     void* to,
                                     std::optional<std::uint16_t> fixed_scale = std::nullopt);
void dequantise(NumberFormat format, const void* from, std::uint16_t scale, std::int64_t count,
                float* to);

}  // namespace kvgrid::cpu
