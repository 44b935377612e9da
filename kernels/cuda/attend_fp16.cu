#include "kernels/cuda/attend_kernel.cuh"

namespace kvgrid::cuda {

AttendKernels fp16AttendKernels() {
    return attendKernels<NumberFormat::fp16>();
}

}  // namespace kvgrid::cuda
