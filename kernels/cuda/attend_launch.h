// The attend kernels of this build; each format is a file of its own.
#pragma once

#include <cuda_runtime.h>

#include <array>

#include "kernels/cuda/attend_schedule.cuh"

namespace kvgrid::cuda {

struct AttendKernel {
    using Function = void(AttendLaunch);

    int head_dim = 0;
    int tile_rows = 0;                  // query rows of a unit, at most
    int teams = 1;                      // of a block of threads, each at a unit of its own
    bool has_teams = false;             // of four warps, for leaves of a launch with little to do
    int threads = 0;                    // of a block
    int blocks_per_multiprocessor = 1;  // of threads, at once
    int most_stages = 0;                // of a ring
    int box_tokens = 0;                 // of a tile, where that is copied by boxes (RowBoxes)
    // Of a state of a block of threads that waits in the workspace for its right half; 0: none
    // does.
    int state_bytes = 0;
    Function* function = nullptr;  // the __global__ function
    // Of a block of threads with rings of so many stages.
    int (*sharedBytes)(int stages) = nullptr;
};

using AttendKernels = std::array<AttendKernel, 20>;

[[nodiscard]] AttendKernels fp16AttendKernels();
[[nodiscard]] AttendKernels bf16AttendKernels();
[[nodiscard]] AttendKernels fp8AttendKernels();
[[nodiscard]] AttendKernels int8AttendKernels();

}  // namespace kvgrid::cuda
