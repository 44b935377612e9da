#include "src/eviction.h"

#include <iterator>

namespace kvgrid {

EvictionOrder::EvictionOrder(int slots) : nodes_(static_cast<std::size_t>(slots)) {
    for (Node& node : nodes_)
        node.list = lists_.end();
}

void EvictionOrder::put(std::int32_t slot, bool paused, int priority) {
    remove(slot);
    const auto list = lists_.try_emplace(Class{.running = !paused, .priority = priority}).first;
    std::int32_t& tail = list->second.tail;
    nodes_[static_cast<std::size_t>(slot)] = {.before = tail, .after = none, .list = list};
    if (tail == none) {
        list->second.head = slot;
    } else {
        nodes_[static_cast<std::size_t>(tail)].after = slot;
    }
    tail = slot;
}

void EvictionOrder::remove(std::int32_t slot) {
    Node& node = nodes_[static_cast<std::size_t>(slot)];
    if (node.list == lists_.end()) return;
    List& list = node.list->second;
    (node.before == none ? list.head : nodes_[static_cast<std::size_t>(node.before)].after) =
        node.after;
    (node.after == none ? list.tail : nodes_[static_cast<std::size_t>(node.after)].before) =
        node.before;
    if (list.head == none) lists_.erase(node.list);
    node.list = lists_.end();
}

bool EvictionOrder::contains(std::int32_t slot) const {
    return nodes_[static_cast<std::size_t>(slot)].list != lists_.end();
}

std::int32_t EvictionOrder::coldest() const {
    return lists_.empty() ? none : lists_.begin()->second.head;
}

std::int32_t EvictionOrder::after(std::int32_t slot) const {
    const Node& node = nodes_[static_cast<std::size_t>(slot)];
    if (node.after != none) return node.after;
    const auto next = std::next(node.list);
    return next == lists_.end() ? none : next->second.head;
}

}  // namespace kvgrid
