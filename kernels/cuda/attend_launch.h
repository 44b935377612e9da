// The attend kernels of this build, one a head dim and format; each format is a file of its own.
#pragma once

#include <cuda_runtime.h>

#include <array>

#include "kernels/cuda/attend_schedule.cuh"

namespace kvgrid::cuda {

struct AttendKernel {
    using Function = void(AttendLaunch);

    int head_dim = 0;
    int blocks_per_multiprocessor = 1;  // of threads, at once
    Function* function = nullptr;       // the __global__ function
    // Of a block of threads with rings of so many tiles.
    int (*sharedBytes)(int stages) = nullptr;
};

using AttendKernels = std::array<AttendKernel, 5>;

[[nodiscard]] AttendKernels fp16AttendKernels();
[[nodiscard]] AttendKernels bf16AttendKernels();

}  // namespace kvgrid::cuda
