// The instructions that have no CUDA C++ spelling, one function each. sm_80 unless said otherwise.
// Operand layouts: PTX ISA, "Warp-level matrix instructions".
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <kvgrid/types.h>

namespace kvgrid::cuda {

inline constexpr int warp_size = 32;
inline constexpr unsigned all_lanes = 0xFFFFFFFFU;

[[nodiscard]] __device__ __forceinline__ bool isFirstLane() {
    return threadIdx.x % warp_size == 0;
}

// The same value, which the compiler takes for a new one: what follows from it is worked out where
// it is wanted, seldom, and takes no register before.
[[nodiscard]] __device__ __forceinline__ std::uint32_t readAnew(std::uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

[[nodiscard]] __device__ __forceinline__ std::uint32_t sharedAddress(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory without waiting; zeros, and `from` is not read, when `bytes` is
// 0.
__device__ __forceinline__ void copyAsync(std::uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

// 16 bytes of shared memory.
__device__ __forceinline__ void storeZeros(std::uint32_t to) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

__device__ __forceinline__ void storeShared(std::uint32_t to, std::uint16_t bits) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
}
__device__ __forceinline__ void storeShared(std::uint32_t to, std::uint32_t bits) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
}
[[nodiscard]] __device__ __forceinline__ std::uint16_t loadShared16(std::uint32_t from) {
    std::uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(from) : "memory");
    return bits;
}

// A barrier in shared memory that so many threads arrive at; it can count the bytes of bulk copies.
__device__ __forceinline__ void initBarrier(std::uint32_t barrier, int threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive(std::uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
                 : "memory");
}

// So many times.
__device__ __forceinline__ void arrive(std::uint32_t barrier, int times) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times)
                 : "memory");
#else
    for (int i = 0; i < times; ++i)
        arrive(barrier);
#endif
}

// Arrives when this thread's copyAsync that came before are over.
__device__ __forceinline__ void arriveAfterCopies(std::uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Returns when the phase of this parity has ended.
__device__ __forceinline__ void waitBarrier(std::uint32_t barrier, unsigned parity) {
    unsigned done = 0;
    while (done == 0)
        asm volatile(
            "{\n"
            ".reg .pred complete;\n"
#if __CUDA_ARCH__ >= 900
            "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
#else
            "mbarrier.test_wait.parity.shared.b64 complete, [%1], %2;\n"
#endif
            "selp.u32 %0, 1, 0, complete;\n"
            "}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}

// Of `threads` threads of the block, a multiple of 32, which all come here.
__device__ __forceinline__ void syncThreads(int threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}
// The same where several groups of threads do so, each at a barrier of its own, 1 to 15.
__device__ __forceinline__ void syncThreads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Registers of each thread of the warp group (4 warps) that all come here: more or fewer than the
// launch gave them.
template <int count>
__device__ __forceinline__ void takeRegisters() {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
#endif
}
template <int count>
__device__ __forceinline__ void giveRegisters() {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
#endif
}

#if __CUDA_ARCH__ >= 900

// Arrives; the phase ends when so many bytes have come too.
__device__ __forceinline__ void expectBytes(std::uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// How the L2 cache keeps what a copy reads.
[[nodiscard]] __device__ __forceinline__ std::uint64_t evictFirst() {
    std::uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
[[nodiscard]] __device__ __forceinline__ std::uint64_t evictNormally() {
    std::uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Global to shared memory, 16-byte aligned, a multiple of 16 bytes.
__device__ __forceinline__ void copyBulk(std::uint32_t to, const std::byte* from, int bytes,
                                         std::uint32_t barrier, std::uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// A box of a tensor of three dimensions, the first of which lies together, to shared memory.
__device__ __forceinline__ void copyBox(std::uint32_t to, const CUtensorMap& map, int first,
                                        int second, int third, std::uint32_t barrier,
                                        std::uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
        "L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(first), "r"(second), "r"(third), "r"(barrier), "l"(policy)
        : "memory");
}

// Barriers that were initialised may be used by bulk copies.
__device__ __forceinline__ void fenceBarriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

#endif

// What this thread has written to shared memory, or seen there, comes before its bulk copies and
// products of warp groups that follow.
__device__ __forceinline__ void fenceAsync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Products of a warp group: four warps, the first of them a multiple of four, which all come here.
// Registers of operands and sums belong to the products from the first call to the last; whoever
// reads sums then says so (readSums). sm_90a.
__device__ __forceinline__ void beginGroupProducts() {
#if __CUDA_ARCH__ >= 900
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void endGroupProducts() {
#if __CUDA_ARCH__ >= 900
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void waitForGroupProducts() {
#if __CUDA_ARCH__ >= 900
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}
// The compiler reads them no earlier.
template <int parts>
__device__ __forceinline__ void readSums(float (&sums)[parts][4]) {
#pragma unroll
    for (auto& part : sums)
        asm volatile("" : "+f"(part[0]), "+f"(part[1]), "+f"(part[2]), "+f"(part[3])::"memory");
}

// A matrix in shared memory as products of warp groups read it: rows of 128 bytes, whose 16-byte
// chunk c lies at c ^ (row mod 8), eight rows behind each other. A wider one is in parts of 128
// bytes a row, part_bytes apart. At row 0 it is aligned to 1,024 bytes. The address is the same for
// all threads of a warp, and the compiler is told so.
class GroupMatrix {
public:
    __device__ __forceinline__ GroupMatrix(std::uint32_t address, int part_bytes)
        : low_(__shfl_sync(all_lanes,
                           address >> 4 | static_cast<std::uint32_t>(part_bytes >> 4) << 16, 0)) {}

    // That which begins so many bytes further.
    [[nodiscard]] __device__ __forceinline__ std::uint64_t behind(int bytes) const {
        constexpr std::uint64_t eight_rows = 1024;
        constexpr std::uint64_t chunks_of_128_bytes = 1;
        return (eight_rows >> 4) << 32 | chunks_of_128_bytes << 62 |
               (low_ + static_cast<std::uint32_t>(bytes >> 4));
    }

private:
    std::uint32_t low_;
};

// What this thread has done and seen, and others of its block before they synchronised with it,
// comes before what it does behind this, for all threads of the device that do likewise.
__device__ __forceinline__ void fenceDevice() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// For a launch that overlaps the one before it (launchOverlapping): nothing that came before may be
// read, and nothing written, until this returns.
__device__ __forceinline__ void waitForLaunchBefore() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// An overlapping launch behind this one may start when every block of threads has come here.
__device__ __forceinline__ void letNextLaunchStart() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Four 8 x 8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void loadMatrices(std::uint32_t (&out)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// The same, each transposed.
__device__ __forceinline__ void loadTransposed(std::uint32_t (&out)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// Two of the matrices that the same lanes' addresses give; lanes from 16 on give none.
__device__ __forceinline__ void loadMatrices(std::uint32_t (&out)[2], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void loadTransposed(std::uint32_t (&out)[2], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(address)
                 : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit numbers across the warp.
[[nodiscard]] __device__ __forceinline__ std::uint32_t transposed(std::uint32_t matrix) {
    std::uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}

// 2^x; below the normal numbers 0.
[[nodiscard]] __device__ __forceinline__ float powerOfTwo(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// The logarithm to the base 2 of a normal number.
[[nodiscard]] __device__ __forceinline__ float logOfTwo(float x) {
    float out;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// 1 / x, of a normal number whose reciprocal is one too; not always the nearest.
[[nodiscard]] __device__ __forceinline__ float reciprocalOf(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// Two e4m3 numbers as fp16, exact.
[[nodiscard]] __device__ __forceinline__ std::uint32_t fromE4m3(std::uint16_t bytes) {
#if __CUDA_ARCH__ >= 890
    std::uint32_t out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(bytes));
    return out;
#else
    // Exponent and mantissa in their places of fp16, whose bias is larger by 8. NaN becomes 480: a
    // row that has one has a scale that is not finite.
    const std::uint32_t spread = __byte_perm(bytes, 0, 0x1404);
    const std::uint32_t bits = (spread & 0x80008000U) | (spread & 0x7F007F00U) >> 1;
    const __half2_raw raw{static_cast<unsigned short>(bits & 0xFFFFU),
                          static_cast<unsigned short>(bits >> 16)};
    const __half2 numbers = __hmul2(__half2(raw), __float2half2_rn(256.0F));
    std::uint32_t out;
    __builtin_memcpy(&out, &numbers, sizeof(out));
    return out;
#endif
}

// What differs between 16-bit formats in attend.
template <NumberFormat format>
struct Products;

template <>
struct Products<NumberFormat::bf16> {
    // Softmax weights are multiplied by this before they are rounded.
    static constexpr float weight_scale = 1.0F;
    // Queries are multiplied in two parts: 8 bits are too few.
    static constexpr bool splits_queries = true;

    // Two numbers rounded to nearest even, `low` in the lower half.
    [[nodiscard]] static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
        std::uint32_t out;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
        return out;
    }
    [[nodiscard]] static __device__ __forceinline__ float2 unpack(std::uint32_t bits) {
        return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000U));
    }
    // sums += a (16 x 16) * b (16 x 8), in fp32.
    static __device__ __forceinline__ void multiply(float (&sums)[4], const std::uint32_t (&a)[4],
                                                    std::uint32_t b0, std::uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

template <>
struct Products<NumberFormat::fp16> {
    // fp16 has few exponents: weights down to 2^-24 of the largest stay normal.
    static constexpr float weight_scale = 1024.0F;
    static constexpr bool splits_queries = false;

    [[nodiscard]] static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
        std::uint32_t out;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
        return out;
    }
    [[nodiscard]] static __device__ __forceinline__ float2 unpack(std::uint32_t bits) {
        const __half2_raw raw{static_cast<unsigned short>(bits & 0xFFFFU),
                              static_cast<unsigned short>(bits >> 16)};
        return __half22float2(__half2(raw));
    }
    static __device__ __forceinline__ void multiply(float (&sums)[4], const std::uint32_t (&a)[4],
                                                    std::uint32_t b0, std::uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

}  // namespace kvgrid::cuda
