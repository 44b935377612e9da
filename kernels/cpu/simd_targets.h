// Which instruction sets the CPU operations are compiled for; the best one is taken at run time.
// Included before any header of Highway, so that all files agree.
#pragma once

#ifdef HWY_DISABLED_TARGETS
#error "include kernels/cpu/simd_targets.h before Highway"
#endif

// x86 machines without AVX2 take the portable code; they are rare, and each target costs build
// time. The scalable vectors of SVE and RVV cannot lie in arrays, which the register tiles need;
// those machines take NEON or the portable code.
#define HWY_DISABLED_TARGETS \
    (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
