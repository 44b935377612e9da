#include <algorithm>
#include <bit>
#include <string>

#include <kvgrid/error.h>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/merge_states.h"
#include "kernels/cpu/operations.h"

namespace kvgrid::cpu {
namespace {

constexpr std::int64_t states_per_task = 16;

}  // namespace

void merge(const MergeParams& params, StreamView stream) {
    CpuDevice& device = cpuDevice(stream);
    if (params.parts < 1 || !std::has_single_bit(static_cast<unsigned>(params.parts)))
        throw Error(ErrorCode::internal, "merge: " + std::to_string(params.parts) + " parts");
    const std::int64_t tasks = (params.rows + states_per_task - 1) / states_per_task;
    device.pool().parallelFor(tasks, [&](std::int64_t task, int thread) {
        auto* const scratch = reinterpret_cast<float*>(device.scratch(thread));
        const std::int64_t first = task * states_per_task;
        const std::int64_t end = std::min(first + states_per_task, params.rows);
        for (std::int64_t row = first; row < end; ++row) {
            const StateParts parts{.out = params.out_parts + row * params.head_dim,
                                   .lse = params.lse_parts + row,
                                   .out_stride = params.rows * params.head_dim,
                                   .lse_stride = params.rows,
                                   .count = params.parts,
                                   .head_dim = params.head_dim};
            mergeParts(parts, scratch, params.out + row * params.head_dim, params.lse + row);
        }
    });
}

}  // namespace kvgrid::cpu
