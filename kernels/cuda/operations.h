// The operations of the CUDA device, each in the file of its name. Contracts: kernels/ops.h.
//
// prepareX loads the kernels of X on the current device and raises their limits: unavailable when
// this build has no code for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ops.h"

namespace kvgrid::cuda {

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

void prepareAppend();
void prepareGather();
// Bytes of shared memory that one block of threads, and those of one multiprocessor, may have.
// Whether the code that runs on this GPU waits where a launch overlaps the one before it.
[[nodiscard]] bool prepareAttend(int block_bytes, int multiprocessor_bytes);
void prepareMerge();
void prepareCopyBlocks();
void prepareOutput();
void prepareReadRuns();

}  // namespace kvgrid::cuda
