// All attend kernels of a format.
#pragma once

#include "kernels/cuda/attend_kernel.cuh"
#include "kernels/cuda/attend_rows_kernel.cuh"

namespace kvgrid::cuda {

template <NumberFormat format>
AttendKernels attendKernels() {
    return {attendKernel<format, 64, 1>(),      attendKernel<format, 80, 1>(),
            attendKernel<format, 96, 1>(),      attendKernel<format, 128, 1>(),
            attendKernel<format, 256, 1>(),     attendKernel<format, 64, 2>(),
            attendKernel<format, 80, 2>(),      attendKernel<format, 96, 2>(),
            attendKernel<format, 128, 2>(),     attendKernel<format, 256, 2>(),
            attendRowsKernel<format, 64, 2>(),  attendRowsKernel<format, 80, 2>(),
            attendRowsKernel<format, 96, 2>(),  attendRowsKernel<format, 128, 2>(),
            attendRowsKernel<format, 256, 2>(), attendRowsKernel<format, 64, 1>(),
            attendRowsKernel<format, 80, 1>(),  attendRowsKernel<format, 96, 1>(),
            attendRowsKernel<format, 128, 1>(), attendRowsKernel<format, 256, 1>()};
}

}  // namespace kvgrid::cuda
