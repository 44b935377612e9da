// Arithmetic on counts and bytes that says when a result leaves 64 bits.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace kvgrid {

[[nodiscard]] inline std::optional<std::int64_t> checkedProduct(
    std::initializer_list<std::int64_t> factors) noexcept {
    std::int64_t product = 1;
    for (const std::int64_t factor : factors) {
        if (__builtin_mul_overflow(product, factor, &product)) return std::nullopt;
    }
    return product;
}

[[nodiscard]] inline std::optional<std::int64_t> checkedSum(
    std::initializer_list<std::int64_t> terms) noexcept {
    std::int64_t sum = 0;
    for (const std::int64_t term : terms) {
        if (__builtin_add_overflow(sum, term, &sum)) return std::nullopt;
    }
    return sum;
}

}  // namespace kvgrid
