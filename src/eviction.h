// Which sequence loses its device blocks first. Pure host metadata.
//
// Cold sequences in the order in which their blocks are offloaded: paused ones first, then lower
// priority first, then least recently used first. Putting a sequence in again is a use.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <vector>

namespace kvgrid {

class EvictionOrder {
public:
    static constexpr std::int32_t none = -1;

    // Of sequences in the slots [0, slots).
    explicit EvictionOrder(int slots);
    EvictionOrder(const EvictionOrder&) = delete;
    EvictionOrder& operator=(const EvictionOrder&) = delete;

    // Makes the slot the most recently used of its priority among the paused or the others.
    // Constant time, but for finding its priority among those present.
    void put(std::int32_t slot, bool paused, int priority);
    // Nothing happens when it is not in the order. Constant time.
    void remove(std::int32_t slot);

    [[nodiscard]] bool contains(std::int32_t slot) const;
    [[nodiscard]] std::int32_t coldest() const;  // none when empty
    [[nodiscard]] std::int32_t after(
        std::int32_t slot) const;  // of a slot in the order; none past the end

private:
    struct Class {
        bool running;  // not paused
        int priority;
        auto operator<=>(const Class&) const = default;
    };
    struct List {
        std::int32_t head = none;  // least recently used
        std::int32_t tail = none;
    };
    using Lists = std::map<Class, List>;  // none of them empty
    struct Node {
        std::int32_t before = none;
        std::int32_t after = none;
        Lists::iterator list;  // lists_.end(): not in the order
    };

    Lists lists_;
    std::vector<Node> nodes_;  // [slot]
};

}  // namespace kvgrid
