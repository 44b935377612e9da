#include <algorithm>
#include <cstring>

#include "kernels/attention_state.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/operations.h"

namespace kvgrid::cpu {
namespace {

constexpr std::int64_t numbers_per_task = 16384;

// A row of one part, each head merged with its sink on the way. `scratch` holds head_dim numbers.
void mergeSinks(const OutputParams& params, std::int64_t part, std::int64_t row, float* scratch,
                std::byte* to) {
    const std::int64_t first = (part * params.rows + row) * params.heads;
    const auto to_bytes = static_cast<std::int64_t>(bytesPerElement(params.destination_format));
    for (std::int64_t head = 0; head < params.heads; ++head) {
        const MergeWeights weights =
            mergeWeights(params.lse[first + head], params.sinks[part * params.heads + head]);
        const float* const out =
            static_cast<const float*>(params.source) + (first + head) * params.head_dim;
        for (int i = 0; i < params.head_dim; ++i)
            scratch[i] = mergeOut(weights, out[i], 0.0F);
        fromFloats(params.destination_format, scratch, params.head_dim,
                   to + head * params.head_dim * to_bytes);
    }
}

}  // namespace

void output(const OutputParams& params, StreamView stream) {
    if (params.source_format != NumberFormat::fp32 &&
        params.source_format != params.destination_format)
        throw Error(ErrorCode::internal, "output: the source is neither fp32 nor as wanted");
    if (params.sinks != nullptr && params.source_format != NumberFormat::fp32)
        throw Error(ErrorCode::internal, "output: sinks, but the source is not fp32");
    CpuDevice& device = cpuDevice(stream);
    const std::int64_t numbers = params.heads * params.head_dim;  // of one part's row
    const auto from_bytes = static_cast<std::int64_t>(bytesPerElement(params.source_format));
    const auto to_bytes = static_cast<std::int64_t>(bytesPerElement(params.destination_format));
    const std::int64_t count = params.rows * params.parts;
    const std::int64_t step =
        std::max<std::int64_t>(1, numbers_per_task / std::max<std::int64_t>(1, numbers));
    device.pool().parallelFor((count + step - 1) / step, [&](std::int64_t task, int thread) {
        const std::int64_t end = std::min(count, (task + 1) * step);
        for (std::int64_t i = task * step; i < end; ++i) {
            const std::int64_t part = i / params.rows;
            const std::int64_t row = i % params.rows;
            const auto* const from =
                static_cast<const std::byte*>(params.source) + i * numbers * from_bytes;
            auto* const to = static_cast<std::byte*>(params.destination) +
                             (row * params.parts + part) * numbers * to_bytes;
            if (params.sinks != nullptr)
                mergeSinks(params, part, row, reinterpret_cast<float*>(device.scratch(thread)), to);
            else if (params.source_format == params.destination_format)
                std::memcpy(to, from, static_cast<std::size_t>(numbers * to_bytes));
            else
                fromFloats(params.destination_format, reinterpret_cast<const float*>(from), numbers,
                           to);
        }
    });
}

}  // namespace kvgrid::cpu
