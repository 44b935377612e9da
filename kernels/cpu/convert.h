// Rows of numbers between fp32 and the stored formats, vectorised.
#pragma once

#include <cstdint>

#include <kvgrid/types.h>

namespace kvgrid::cpu {

// fp32, fp16 and bf16; any other format throws Error. Rounding as in number_formats.h.
void toFloats(NumberFormat format, const void* from, std::int64_t count, float* to);
void fromFloats(NumberFormat format, const float* from, std::int64_t count, void* to);

}  // namespace kvgrid::cpu
