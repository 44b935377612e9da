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

// The same for b from 1 to 3 and an a of at most b that is 0, or at least 2^-30, or any if b is 1:
// of other operands, of which there are none then, a division on a GPU looks out most of its time.
// Newton's reciprocal, and what is left of the quotient added to it twice (Markstein): the last
// gives the number nearest to it.
KVGRID_HOST_DEVICE float quotientBy1To3(float a, float b) {
#ifdef __CUDA_ARCH__
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
    reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-b, reciprocal, 1.0F), reciprocal);
    float out = __fmul_rn(a, reciprocal);
    out = __fmaf_rn(reciprocal, __fmaf_rn(-b, out, a), out);
    return __fmaf_rn(reciprocal, __fmaf_rn(-b, out, a), out);
#else
    return a / b;
#endif
}

// a * b + c, rounded twice.
KVGRID_HOST_DEVICE float step(float a, float b, float c) {
    return sum(product(a, b), c);
}

}  // namespace kvgrid::exact
