#include "kernels/cuda/attend_kernels.cuh"

namespace kvgrid::cuda {

AttendKernels int8AttendKernels() {
    return attendKernels<NumberFormat::int8>();
}

}  // namespace kvgrid::cuda
