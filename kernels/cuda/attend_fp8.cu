#include "kernels/cuda/attend_kernels.cuh"

namespace kvgrid::cuda {

AttendKernels fp8AttendKernels() {
    return attendKernels<NumberFormat::fp8_e4m3>();
}

}  // namespace kvgrid::cuda
