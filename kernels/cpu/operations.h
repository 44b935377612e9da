// The operations of the CPU device, each in the file of its name. Contracts: kernels/ops.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ops.h"

namespace kvgrid::cpu {

void append(const AppendParams& params, StreamView stream);
void gather(const GatherParams& params, StreamView stream);
void planAttend(const AttendParams& params, StreamView stream);
void attend(const AttendParams& params, StreamView stream);
void merge(const MergeParams& params, StreamView stream);
void copyBlocks(const CopyBlocksParams& params, StreamView stream);
void output(const OutputParams& params, StreamView stream);
void readRuns(const ReadRunsParams& params, StreamView stream);
[[nodiscard]] std::size_t attendWorkspaceBytes(std::int64_t rows, int query_heads, int head_dim);
[[nodiscard]] std::size_t attendPlanBytes(std::int64_t rows, std::int64_t runs, int query_heads);

}  // namespace kvgrid::cpu
