// The attend kernels of this build; each format is a file of its own.
#pragma once

#include <cuda_runtime.h>

#include <array>

#include "kernels/cuda/attend_schedule.cuh"

namespace kvgrid::cuda {

struct AttendKernel {
    using Function = void(AttendLaunch);

    int head_dim = 0;
    int tile_rows = 0;                  // 8; or 16, from sm_90 on
    int threads = 0;                    // of a block
    int blocks_per_multiprocessor = 1;  // of threads, at once
    Function* function = nullptr;       // the __global__ function
    // Of a block of threads with rings of so many stages.
    int (*sharedBytes)(int stages) = nullptr;
};

using AttendKernels = std::array<AttendKernel, 10>;

[[nodiscard]] AttendKernels fp16AttendKernels();
[[nodiscard]] AttendKernels bf16AttendKernels();
[[nodiscard]] AttendKernels fp8AttendKernels();
[[nodiscard]] AttendKernels int8AttendKernels();

}  // namespace kvgrid::cuda
