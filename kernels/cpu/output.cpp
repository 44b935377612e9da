#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/operations.h"

namespace kvgrid::cpu {
namespace {

constexpr std::int64_t numbers_per_task = 16384;

}  // namespace

void output(const OutputParams& params, StreamView stream) {
    if (params.source_format != NumberFormat::fp32 &&
        params.source_format != params.destination_format)
        throw Error(ErrorCode::internal, "output: the source is neither fp32 nor as wanted");
    const std::int64_t numbers = params.heads * params.head_dim;  // of one part's row
    const auto from_bytes = static_cast<std::int64_t>(bytesPerElement(params.source_format));
    const auto to_bytes = static_cast<std::int64_t>(bytesPerElement(params.destination_format));
    const std::int64_t count = params.rows * params.parts;
    const std::int64_t step =
        std::max<std::int64_t>(1, numbers_per_task / std::max<std::int64_t>(1, numbers));
    cpuDevice(stream).pool().parallelFor((count + step - 1) / step, [&](std::int64_t task, int) {
        const std::int64_t end = std::min(count, (task + 1) * step);
        for (std::int64_t i = task * step; i < end; ++i) {
            const std::int64_t part = i / params.rows;
            const std::int64_t row = i % params.rows;
            const auto* const from =
                static_cast<const std::byte*>(params.source) + i * numbers * from_bytes;
            auto* const to = static_cast<std::byte*>(params.destination) +
                             (row * params.parts + part) * numbers * to_bytes;
            if (params.source_format == params.destination_format)
                std::memcpy(to, from, static_cast<std::size_t>(numbers * to_bytes));
            else
                fromFloats(params.destination_format, reinterpret_cast<const float*>(from), numbers,
                           to);
        }
    });
}

}  // namespace kvgrid::cpu
