// Which heads, stripes and positions belong to whom. Pure arithmetic.
#pragma once

#include <cstdint>

namespace kvgrid {

// Positions of a sequence, and positions among those that one context rank owns: never mixed up,
// because they are different types.
enum class GlobalPosition : std::int64_t {};
enum class LocalPosition : std::int64_t {};

// A rank's place in the grid: world rank = head * contexts + context.
struct GridPlace {
    int head = 0;  // [0, heads)
    int heads = 1;
    int context = 0;   // [0, contexts)
    int contexts = 1;  // divides 64
};

[[nodiscard]] GridPlace placeOf(int rank, int heads, int contexts) noexcept;

// Heads of a coordinate of the head axis: [first, first + count). The axis divides the KV heads.
struct HeadRange {
    int first = 0;
    int count = 0;
};

[[nodiscard]] HeadRange ownedHeads(int total_heads, const GridPlace& place) noexcept;

// Lane l of the sequence in slot s lies on context rank (l + s) mod contexts. Stripe i has lane
// i mod 64, and contexts divides 64, so the stripes of a context rank are every contexts-th one.
[[nodiscard]] int contextOf(GlobalPosition position, std::int32_t slot, int contexts) noexcept;

// Only of a position that `context` owns: contextOf(position) == context.
[[nodiscard]] LocalPosition toLocal(GlobalPosition position, int contexts) noexcept;
[[nodiscard]] GlobalPosition toGlobal(LocalPosition position, std::int32_t slot, int context,
                                      int contexts) noexcept;

// How many of the positions [0, length) the context rank owns.
[[nodiscard]] std::int64_t ownedTokens(std::int64_t length, std::int32_t slot, int context,
                                       int contexts) noexcept;

// The most that any slot and context rank own of `length` positions that follow each other.
[[nodiscard]] std::int64_t mostOwnedTokens(std::int64_t length, int contexts) noexcept;

// The most blocks of a sequence that a context rank must hold so that `rows` new tokens see a
// window each, their own included: wherever in a block the first of them lies.
[[nodiscard]] std::int64_t mostBlocksOfWindow(std::int64_t window, std::int64_t rows,
                                              std::int64_t block_size, int contexts) noexcept;

}  // namespace kvgrid
