// The other ceiling of attend beside memory: what the threads can multiply and add.
#pragma once

#include <cstdint>

#include "kernels/device.h"

namespace kvgrid::cpu {

// All threads of a CPU device multiply and add fp32 numbers in registers, for some milliseconds and
// with the instructions that attend uses. How many multiply-adds they did together: over the time
// that the call took, the rate that no attention can exceed.
[[nodiscard]] std::int64_t multiplyAdds(Device& device);

}  // namespace kvgrid::cpu
