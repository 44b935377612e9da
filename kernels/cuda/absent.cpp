// In place of the CUDA device where it is not built.
#include "kernels/device.h"
#include "kernels/profile_range.h"

namespace kvgrid {

std::unique_ptr<Device> makeCudaDevice(int) {
    throw Error(ErrorCode::unavailable,
                "this kvgrid was built without the CUDA device (configure with -DKVGRID_CUDA=ON)");
}

int cudaDeviceCount() {
    return 0;
}

std::string cudaDeviceId(int) {
    return {};
}

std::string cudaLibrary() {
    return {};
}

ProfileRange::ProfileRange(const char*) noexcept {}
// NOLINTNEXTLINE(modernize-use-equals-default): where CUDA is, it does something
ProfileRange::~ProfileRange() {}

}  // namespace kvgrid
