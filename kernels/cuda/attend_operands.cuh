// How stored K and V become the 16-bit operands of matrix products. Products are of bf16 with bf16,
// else of fp16 with fp16: one-byte numbers are exact in fp16.
//
// A matrix load gives a thread 32 bits of a row: two 16-bit numbers, or four of one byte. Of K
// these are neighbours of the head dim: with one byte each, elements 4 c to 4 c + 3 of a chunk of
// 16 in the thread c of four, which are taken as numbers 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of the
// product, for queries too (elementOf). Of V, transposed, they are two tokens' pairs of neighbours:
// products have the even elements of a chunk as rows 0 to 7 and the odd ones as rows 8 to 15
// (outputOf).
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace kvgrid::cuda {

template <NumberFormat format>
struct Operand {
    static constexpr bool is_narrow = false;
    using Product = Products<format>;
    static constexpr float weight_scale = Product::weight_scale;
    static constexpr float offset = 0.0F;

    // The element of a step's 16 that a thread (c of four) has as its pair `half`.
    static __device__ __forceinline__ int elementOf(int c, int half) { return 2 * c + 8 * half; }
    // The element of a step's 16 that row `row` (of 8) of half `half` of the product is.
    static __device__ __forceinline__ int outputOf(int row, int half) { return row + 8 * half; }
};

// Two stored one-byte numbers, and two more, as pairs of fp16, each plus the offset.
template <NumberFormat format>
struct Widened;

template <>
struct Widened<NumberFormat::fp8_e4m3> {
    static constexpr float offset = 0.0F;

    // Bytes 0 and 1, then 2 and 3.
    static __device__ __forceinline__ void inOrder(std::uint32_t bytes, std::uint32_t& low,
                                                   std::uint32_t& high) {
        low = fromE4m3(static_cast<std::uint16_t>(bytes));
        high = fromE4m3(static_cast<std::uint16_t>(bytes >> 16));
    }
    // Bytes 0 and 2, then 1 and 3.
    static __device__ __forceinline__ void alternating(std::uint32_t bytes, std::uint32_t& even,
                                                       std::uint32_t& odd) {
        inOrder(__byte_perm(bytes, 0, 0x3120), even, odd);
    }
};

template <>
struct Widened<NumberFormat::int8> {
    static constexpr float offset = 1024.0F + 128.0F;

    static __device__ __forceinline__ void inOrder(std::uint32_t bytes, std::uint32_t& low,
                                                   std::uint32_t& high) {
        widen<0x4140, 0x4342>(bytes, low, high);
    }
    static __device__ __forceinline__ void alternating(std::uint32_t bytes, std::uint32_t& even,
                                                       std::uint32_t& odd) {
        widen<0x4240, 0x4341>(bytes, even, odd);
    }

private:
    // 0x6400 + n is 1024 + n in fp16; n is the number and 128.
    template <unsigned first_bytes, unsigned second_bytes>
    static __device__ __forceinline__ void widen(std::uint32_t bytes, std::uint32_t& first,
                                                 std::uint32_t& second) {
        constexpr std::uint32_t exponents = 0x64646464U;
        bytes ^= 0x80808080U;
        first = __byte_perm(bytes, exponents, first_bytes);
        second = __byte_perm(bytes, exponents, second_bytes);
    }
};

template <NumberFormat format>
struct NarrowOperand {
    static constexpr bool is_narrow = true;
    using Product = Products<NumberFormat::fp16>;
    // Weights are multiplied with the scale of V, which is 516 at most for numbers of fp16: these
    // must not overflow.
    static constexpr float weight_scale = 64.0F;
    // What operands have too much: taken out of the products' sums.
    static constexpr float offset = Widened<format>::offset;

    static __device__ __forceinline__ int elementOf(int c, int half) { return 4 * c + 2 * half; }
    static __device__ __forceinline__ int outputOf(int row, int half) { return 2 * row + half; }

    // K of 16 tokens and one chunk, of which two matrices of 8 tokens were loaded.
    static __device__ __forceinline__ void keys(std::uint32_t (&operand)[4], std::uint32_t first,
                                                std::uint32_t second) {
        Widened<format>::inOrder(first, operand[0], operand[2]);
        Widened<format>::inOrder(second, operand[1], operand[3]);
    }
    // V of 16 tokens and one chunk, likewise, transposed.
    static __device__ __forceinline__ void values(std::uint32_t (&operand)[4], std::uint32_t first,
                                                  std::uint32_t second) {
        Widened<format>::alternating(first, operand[0], operand[1]);
        Widened<format>::alternating(second, operand[2], operand[3]);
    }
};

template <>
struct Operand<NumberFormat::fp8_e4m3> : NarrowOperand<NumberFormat::fp8_e4m3> {};
template <>
struct Operand<NumberFormat::int8> : NarrowOperand<NumberFormat::int8> {};

}  // namespace kvgrid::cuda
