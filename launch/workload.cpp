#include "launch/workload.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <vector>

namespace kvgrid::launch {

namespace {

constexpr std::uint64_t golden = 0x9e3779b97f4a7c15U;

// The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", OOPSLA 2014, variant 13 of Stafford's constants).
std::uint64_t mix(std::uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
    return bits ^ (bits >> 31);
}

std::uint64_t absorb(std::uint64_t state, std::int64_t coordinate) {
    return mix((state ^ static_cast<std::uint64_t>(coordinate)) * golden + golden);
}

// Sign, `exponent_bits` and `mantissa_bits` of |value| in the format's normal range, or 0.
struct Rounded {
    float value;
    std::uint16_t bits;
};

Rounded roundNormal(float value, int exponent_bits, int mantissa_bits) {
    if (value == 0.0F) return {0.0F, 0};
    // The dropped bits are rounded away by adding half a unit, less one when the kept part is even.
    const auto source = std::bit_cast<std::uint32_t>(value);
    const int dropped = 23 - mantissa_bits;
    const std::uint32_t odd = (source >> dropped) & 1U;
    const std::uint32_t kept = (source + (1U << (dropped - 1)) - 1U + odd) >> dropped;
    const int bias_difference = 127 - ((1 << (exponent_bits - 1)) - 1);
    const std::uint32_t magnitude = (kept & (0x7fffffffU >> dropped)) -
                                    (static_cast<std::uint32_t>(bias_difference) << mantissa_bits);
    const std::uint32_t sign = (source >> 31) << 15;
    return {std::bit_cast<float>(kept << dropped), static_cast<std::uint16_t>(sign | magnitude)};
}

Rounded roundTo(NumberFormat format, float value) {
    if (format == NumberFormat::bf16) return roundNormal(value, 8, 7);
    if (format == NumberFormat::fp16) return roundNormal(value, 5, 10);
    return {value, 0};
}

}  // namespace

Workload::Workload(std::uint64_t seed, NumberFormat input_format, int head_dim)
    : seed_(mix(seed + golden)),
      format_(input_format),
      head_dim_(head_dim) {
    // A byte has variance (256^2 - 1) / 12.
    const double deviation = std::sqrt(4.0 * (256.0 * 256.0 - 1.0) / 12.0);
    for (int sum = 0; sum < sums; ++sum) {
        const int centred = sum - sums / 2;
        const auto value = static_cast<float>(centred / deviation);
        const Rounded rounded = roundTo(format_, value);
        as_float_[static_cast<std::size_t>(sum)] = rounded.value;
        as_bits_[static_cast<std::size_t>(sum)] = rounded.bits;
    }
}

template <typename Element>
void Workload::fillRow(Tensor tensor, const TokenAt& token, Heads heads,
                       const std::array<Element, sums>& values, Element* out) const {
    std::uint64_t row = absorb(seed_, token.layer * 4 + static_cast<int>(tensor));
    row = absorb(absorb(row, token.key), token.position);
    for (int head = heads.first; head < heads.first + heads.count; ++head) {
        std::uint64_t counter = absorb(row, head);
        for (int element = 0; element < head_dim_; element += 2, out += 2) {
            // Eight random bytes make two sums of four.
            const std::uint64_t bytes = mix(counter += golden);
            constexpr std::uint64_t every_other = 0x00ff00ff00ff00ffU;
            const std::uint64_t pairs = (bytes & every_other) + ((bytes >> 8) & every_other);
            const std::uint64_t fours = pairs + (pairs >> 16);
            out[0] = values[fours & 0xffffU];
            out[1] = values[(fours >> 32) & 0xffffU];
        }
    }
}

void Workload::fill(Tensor tensor, const TokenAt& token, Heads heads, void* out) const {
    if (format_ == NumberFormat::fp32) {
        fillRow(tensor, token, heads, as_float_, static_cast<float*>(out));
    } else {
        fillRow(tensor, token, heads, as_bits_, static_cast<std::uint16_t*>(out));
    }
}

void Workload::fillHead(Tensor tensor, const TokenAt& token, int head, std::span<float> out) const {
    fillRow(tensor, token, {.first = head, .count = 1}, as_float_, out.data());
}

float Workload::sink(int layer, int query_head) const {
    std::vector<float> values(static_cast<std::size_t>(head_dim_));
    fillHead(Tensor::sinks, {.layer = layer}, query_head, values);
    return 8.0F + values.front();
}

}  // namespace kvgrid::launch
