#include "shard/ownership.h"

#include <cstdint>

#include "kernels/attention_state.h"

namespace kvgrid {

namespace {

// The first stripe of a sequence that the context rank owns; every contexts-th one follows.
std::int64_t firstOwnedStripe(std::int32_t slot, int context, int contexts) noexcept {
    return (context - slot % contexts + contexts) % contexts;
}

}  // namespace

GridPlace placeOf(int rank, int heads, int contexts) noexcept {
    return {
        .head = rank / contexts, .heads = heads, .context = rank % contexts, .contexts = contexts};
}

HeadRange ownedHeads(int total_heads, const GridPlace& place) noexcept {
    const int count = total_heads / place.heads;
    return {.first = place.head * count, .count = count};
}

int contextOf(GlobalPosition position, std::int32_t slot, int contexts) noexcept {
    const std::int64_t lane = static_cast<std::int64_t>(position) / stripe_tokens % lane_count;
    return static_cast<int>((lane + slot) % contexts);
}

LocalPosition toLocal(GlobalPosition position, int contexts) noexcept {
    const auto global = static_cast<std::int64_t>(position);
    const std::int64_t stripe = global / stripe_tokens / contexts;
    return LocalPosition{stripe * stripe_tokens + global % stripe_tokens};
}

GlobalPosition toGlobal(LocalPosition position, std::int32_t slot, int context,
                        int contexts) noexcept {
    const auto local = static_cast<std::int64_t>(position);
    const std::int64_t stripe =
        local / stripe_tokens * contexts + firstOwnedStripe(slot, context, contexts);
    return GlobalPosition{stripe * stripe_tokens + local % stripe_tokens};
}

std::int64_t ownedTokens(std::int64_t length, std::int32_t slot, int context,
                         int contexts) noexcept {
    const std::int64_t first = firstOwnedStripe(slot, context, contexts);
    const std::int64_t whole = length / stripe_tokens;
    const std::int64_t stripes = whole > first ? (whole - first - 1) / contexts + 1 : 0;
    const std::int64_t tail = whole % contexts == first ? length % stripe_tokens : 0;
    return stripes * stripe_tokens + tail;
}

std::int64_t mostOwnedTokens(std::int64_t length, int contexts) noexcept {
    const std::int64_t whole = length / stripe_tokens;
    const std::int64_t each = whole / contexts * stripe_tokens;
    return each + (whole % contexts > 0 ? stripe_tokens : length % stripe_tokens);
}

std::int64_t mostBlocksOfWindow(std::int64_t window, std::int64_t rows, std::int64_t block_size,
                                int contexts) noexcept {
    // The first token seen may be the last one of its block.
    const std::int64_t tokens = mostOwnedTokens(window - 1 + rows, contexts);
    return (tokens - 1 + block_size - 1) / block_size + 1;
}

}  // namespace kvgrid
