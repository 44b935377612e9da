// The q, k and v that verify and bench decode: any value is a pure function of the seed and of its
// coordinates, so that every rank, batch order and chunking sees the same data, and a check can
// make it again without reading the cache.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include <kvgrid/types.h>

namespace kvgrid::launch {

enum class Tensor : std::uint8_t { q, k, v, sinks };

// Heads [first, first + count) of the model.
struct Heads {
    int first = 0;
    int count = 0;
};

// One token of one layer. `key` is the sequence's own, whatever else is in the batch.
struct TokenAt {
    std::int64_t key = 0;
    std::int64_t position = 0;
    int layer = 0;
};

// Values have mean 0, standard deviation 1 and lie within 3.46: sums of four uniform numbers
// (Irwin-Hall), rounded to the input format, ties to even.
class Workload {
public:
    // input_format: fp32, fp16 or bf16. head_dim is even.
    Workload(std::uint64_t seed, NumberFormat input_format, int head_dim);

    // One row, [heads.count, head_dim], in the input format.
    void fill(Tensor tensor, const TokenAt& token, Heads heads, void* out) const;
    // The same values of one head as fp32. out [head_dim]
    void fillHead(Tensor tensor, const TokenAt& token, int head, std::span<float> out) const;
    // The sink's logit of a query head, within 3.46 of 8: it weighs as much as some thousand tokens
    // do, whose scores have mean 0 and standard deviation 1, so that losing it shows at any
    // context.
    [[nodiscard]] float sink(int layer, int query_head) const;

    [[nodiscard]] NumberFormat format() const noexcept { return format_; }
    [[nodiscard]] int headDim() const noexcept { return head_dim_; }
    // Of one row.
    [[nodiscard]] std::size_t rowBytes(int heads) const noexcept {
        return static_cast<std::size_t>(heads) * static_cast<std::size_t>(head_dim_) *
               bytesPerElement(format_);
    }

private:
    static constexpr int sums = 4 * 255 + 1;  // values of the sum of four bytes

    template <typename Element>
    void fillRow(Tensor tensor, const TokenAt& token, Heads heads,
                 const std::array<Element, sums>& values, Element* out) const;

    std::uint64_t seed_;
    NumberFormat format_;
    int head_dim_;
    std::array<float, sums> as_float_{};         // of each sum, rounded to the format
    std::array<std::uint16_t, sums> as_bits_{};  // the same as bits of a 16-bit format
};

}  // namespace kvgrid::launch
