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

// Launches a kernel that may start while the one before it in the stream still runs (from sm_90
// on): it calls waitForLaunchBefore.
template <typename Argument>
void launchOverlapping(const CudaDevice& device, void (*kernel)(Argument), dim3 grid,
                       unsigned threads, std::size_t shared_bytes, StreamView stream,
                       const Argument& argument) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = handleOf(stream);
    config.attrs = &attribute;
    config.numAttrs = device.overlapsLaunches() ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, argument), "cudaLaunchKernelEx");
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
    if (shared_bytes == 0) return;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "cudaFuncSetAttribute");
    // Of the memory that it shares with the L1 cache, all: several blocks of threads may want it.
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "cudaFuncSetAttribute");
}

// Blocks of threads for `items`, each of which loops with the grid's stride; at least one.
[[nodiscard]] inline unsigned gridFor(std::int64_t items, std::int64_t most) {
    return static_cast<unsigned>(std::clamp<std::int64_t>(items, 1, most));
}

}  // namespace kvgrid::cuda
