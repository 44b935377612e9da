// Matrix products of a warp group (Hopper's wgmma), whose sums are in registers and whose second
// operand is in shared memory, read once for all four warps. Layouts: PTX ISA, "Asynchronous
// warpgroup level matrix instructions". Sums are those of Products::multiply (ptx.cuh), bit for
// bit, as both add the 16 products of a step at once.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace kvgrid::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// clang-format off
#define KVGRID_SUMS(i) \
    "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
#define KVGRID_GROUP_PRODUCT_64(type) \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %38, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
                 "}, {%32, %33, %34, %35}, %36, adds, 1, 1, %37;\n}" \
                 : KVGRID_SUMS(0), KVGRID_SUMS(1), KVGRID_SUMS(2), KVGRID_SUMS(3), KVGRID_SUMS(4), KVGRID_SUMS(5), KVGRID_SUMS(6), KVGRID_SUMS(7) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
                   "n"(static_cast<int>(is_transposed)), "n"(static_cast<int>(adds)))
#define KVGRID_GROUP_PRODUCT_128(type) \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %70, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
                 "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
                 "%62, %63" \
                 "}, {%64, %65, %66, %67}, %68, adds, 1, 1, %69;\n}" \
                 : KVGRID_SUMS(0), KVGRID_SUMS(1), KVGRID_SUMS(2), KVGRID_SUMS(3), KVGRID_SUMS(4), KVGRID_SUMS(5), KVGRID_SUMS(6), KVGRID_SUMS(7), KVGRID_SUMS(8), KVGRID_SUMS(9), KVGRID_SUMS(10), KVGRID_SUMS(11), KVGRID_SUMS(12), KVGRID_SUMS(13), KVGRID_SUMS(14), KVGRID_SUMS(15) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
                   "n"(static_cast<int>(is_transposed)), "n"(static_cast<int>(adds)))
#define KVGRID_SHARED_PRODUCT_64(type) \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
                 "}, %32, %33, adds, 1, 1, 0, 0;\n}" \
                 : KVGRID_SUMS(0), KVGRID_SUMS(1), KVGRID_SUMS(2), KVGRID_SUMS(3), KVGRID_SUMS(4), KVGRID_SUMS(5), KVGRID_SUMS(6), KVGRID_SUMS(7) \
                 : "l"(a), "l"(b), "n"(static_cast<int>(adds)))
// clang-format on

// sums += a * b in fp32, or = where it does not `add`: a is 64 x 16, of which each warp of the
// group has 16 rows, b 16 x n in shared memory (groupMatrix): n rows of 16 numbers, or, transposed,
// 16 rows of n. A thread has the rows lane / 4 and lane / 4 + 8 of the warp's:
//   a[row + 2 * half]          columns 2 * (lane % 4) + 8 * half, + 1
//   sums[i][2 * row + column]  columns 8 * i + 2 * (lane % 4) + column
// Called between beginGroupProducts and endGroupProducts.
template <NumberFormat format, bool is_transposed, bool adds, int parts>
__device__ __forceinline__ void multiplyGroup(float (&sums)[parts][4], const std::uint32_t (&a)[4],
                                              std::uint64_t b) {
    constexpr bool is_bf16 = format == NumberFormat::bf16;
    static_assert(is_bf16 || format == NumberFormat::fp16);
    static_assert(parts == 8 || parts == 16);
    if constexpr (parts == 8 && is_bf16)
        KVGRID_GROUP_PRODUCT_64("bf16");
    else if constexpr (parts == 8)
        KVGRID_GROUP_PRODUCT_64("f16");
    else if constexpr (is_bf16)
        KVGRID_GROUP_PRODUCT_128("bf16");
    else
        KVGRID_GROUP_PRODUCT_128("f16");
}

// The same with a of bf16 in shared memory too: 64 rows of 16 numbers.
template <bool adds>
__device__ __forceinline__ void multiplyGroup(float (&sums)[8][4], std::uint64_t a,
                                              std::uint64_t b) {
    KVGRID_SHARED_PRODUCT_64("bf16");
}

#undef KVGRID_GROUP_PRODUCT_64
#undef KVGRID_GROUP_PRODUCT_128
#undef KVGRID_SHARED_PRODUCT_64
#undef KVGRID_SUMS

#else

// Only kernels for sm_90a call them.
template <NumberFormat format, bool is_transposed, bool adds, int parts>
__device__ void multiplyGroup(float (&)[parts][4], const std::uint32_t (&)[4], std::uint64_t) {
    __trap();
}
template <bool adds>
__device__ void multiplyGroup(float (&)[8][4], std::uint64_t, std::uint64_t) {
    __trap();
}

#endif

}  // namespace kvgrid::cuda
