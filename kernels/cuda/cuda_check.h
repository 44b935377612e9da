// Every CUDA call is checked here; what failed becomes an Error (internal) that names the call.
#pragma once

#include <cuda_runtime_api.h>

namespace kvgrid::cuda {

// check(cudaFree(data), "cudaFree");
void check(cudaError_t status, const char* call);

// In destructors: what failed is logged, not thrown.
void checkNoThrow(cudaError_t status, const char* call) noexcept;

// After <<<>>>: the launch of `kernel` was accepted.
inline void checkLaunch(const char* kernel) {
    check(cudaGetLastError(), kernel);
}

}  // namespace kvgrid::cuda
