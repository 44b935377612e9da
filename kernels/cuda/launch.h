// What every launcher needs: loading kernels ahead of use, and grids within the limits.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include <kvgrid/error.h>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/cuda_device.h"

namespace kvgrid::cuda {

[[nodiscard]] inline ::cudaStream_t handleOf(StreamView stream) noexcept {
    return static_cast<::cudaStream_t>(stream.handle());
}

// Loads a kernel, and lets its blocks of threads have `shared_bytes` of dynamic shared memory.
template <typename Kernel>
void load(Kernel* kernel, int shared_bytes = 0) {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
        (void)cudaGetLastError();
        throw Error(ErrorCode::unavailable,
                    "this build has no code for this GPU (KVGRID_CUDA_ARCHITECTURES)");
    }
    check(status, "cudaFuncGetAttributes");
    if (shared_bytes > 0)
        check(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
            "cudaFuncSetAttribute");
}

// Blocks of threads for `items`, each of which loops with the grid's stride; at least one.
[[nodiscard]] inline unsigned gridFor(std::int64_t items, std::int64_t most) {
    return static_cast<unsigned>(std::clamp<std::int64_t>(items, 1, most));
}

}  // namespace kvgrid::cuda
