#include "kernels/cuda/attend_kernels.cuh"

namespace kvgrid::cuda {

AttendKernels bf16AttendKernels() {
    return attendKernels<NumberFormat::bf16>();
}

}  // namespace kvgrid::cuda
