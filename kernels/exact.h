// Sums, products and quotients that no compiler may fuse or approximate: what is written with these
// has the same bits on every device.
#pragma once

#include "kernels/host_device.h"

namespace kvgrid::exact {

KVGRID_HOST_DEVICE float sum(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

KVGRID_HOST_DEVICE float product(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

KVGRID_HOST_DEVICE float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// a * b + c, rounded twice.
KVGRID_HOST_DEVICE float step(float a, float b, float c) {
    return sum(product(a, b), c);
}

}  // namespace kvgrid::exact
