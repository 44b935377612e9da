// In place of the CUDA device where it is not built.
#include "kernels/device.h"

namespace kvgrid {

std::unique_ptr<Device> makeCudaDevice(int) {
    throw Error(ErrorCode::unavailable,
                "this kvgrid was built without the CUDA device (configure with -DKVGRID_CUDA=ON)");
}

}  // namespace kvgrid
