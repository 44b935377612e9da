#include "kernels/cuda/attend_kernels.cuh"

namespace kvgrid::cuda {

AttendKernels fp16AttendKernels() {
    return attendKernels<NumberFormat::fp16>();
}

}  // namespace kvgrid::cuda
