#include "kernels/cuda/attend_kernel.cuh"

namespace kvgrid::cuda {

AttendKernels bf16AttendKernels() {
    return attendKernels<NumberFormat::bf16>();
}

}  // namespace kvgrid::cuda
