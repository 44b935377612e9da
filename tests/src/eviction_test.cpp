#include "src/eviction.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace kvgrid {
namespace {

std::vector<std::int32_t> walk(const EvictionOrder& order) {
    std::vector<std::int32_t> slots;
    for (auto slot = order.coldest(); slot != EvictionOrder::none; slot = order.after(slot)) {
        slots.push_back(slot);
    }
    return slots;
}

using Slots = std::vector<std::int32_t>;

TEST(EvictionOrder, StartsEmpty) {
    const EvictionOrder order(3);
    EXPECT_EQ(order.coldest(), EvictionOrder::none);
    EXPECT_FALSE(order.contains(0));
}

TEST(EvictionOrder, LeastRecentlyUsedComesFirst) {
    EvictionOrder order(4);
    for (const std::int32_t slot : {2, 0, 3})
        order.put(slot, false, 0);
    EXPECT_EQ(walk(order), (Slots{2, 0, 3}));
    order.put(2, false, 0);
    EXPECT_EQ(walk(order), (Slots{0, 3, 2}));
}

TEST(EvictionOrder, LowerPriorityComesFirst) {
    EvictionOrder order(4);
    order.put(0, false, 5);
    order.put(1, false, -5);
    order.put(2, false, 0);
    EXPECT_EQ(walk(order), (Slots{1, 2, 0}));
    order.put(1, false, 9);
    EXPECT_EQ(walk(order), (Slots{2, 0, 1}));
}

TEST(EvictionOrder, PausedComesFirstWhateverItsPriority) {
    EvictionOrder order(4);
    order.put(0, false, -100);
    order.put(1, true, 100);
    order.put(2, true, 7);
    EXPECT_EQ(walk(order), (Slots{2, 1, 0}));
    order.put(1, false, 100);
    EXPECT_EQ(walk(order), (Slots{2, 0, 1}));
}

TEST(EvictionOrder, RemovesAtBothEndsAndInTheMiddle) {
    EvictionOrder order(5);
    for (std::int32_t slot = 0; slot < 5; ++slot)
        order.put(slot, false, 0);
    order.remove(2);
    EXPECT_EQ(walk(order), (Slots{0, 1, 3, 4}));
    order.remove(0);
    order.remove(4);
    EXPECT_EQ(walk(order), (Slots{1, 3}));
    order.remove(4);  // not in it
    order.remove(1);
    order.remove(3);
    EXPECT_EQ(walk(order), Slots{});
}

TEST(EvictionOrder, TakesTheExtremesOfPriority) {
    EvictionOrder order(3);
    order.put(0, false, INT32_MAX);
    order.put(1, false, INT32_MIN);
    order.put(2, false, 0);
    EXPECT_EQ(walk(order), (Slots{1, 2, 0}));
}

// A vector, sorted whenever somebody looks.
class Model {
public:
    void put(std::int32_t slot, bool paused, int priority) {
        remove(slot);
        items_.emplace_back(!paused, priority, ++clock_, slot);
    }
    void remove(std::int32_t slot) {
        items_.erase(std::remove_if(items_.begin(), items_.end(),
                                    [&](const Item& item) { return std::get<3>(item) == slot; }),
                     items_.end());
    }
    Slots sorted() {
        std::sort(items_.begin(), items_.end());
        Slots slots;
        for (const Item& item : items_)
            slots.push_back(std::get<3>(item));
        return slots;
    }

private:
    using Item = std::tuple<bool, int, std::int64_t, std::int32_t>;
    std::vector<Item> items_;
    std::int64_t clock_ = 0;
};

bool agree(EvictionOrder& order, Model& model, int slots, std::uint32_t bits) {
    const auto slot = static_cast<std::int32_t>(bits % static_cast<std::uint32_t>(slots));
    if (bits >> 30 == 0) {
        order.remove(slot);
        model.remove(slot);
    } else {
        const bool paused = (bits >> 20) % 4 == 0;
        const int priority = static_cast<int>((bits >> 24) % 4) - 2;
        order.put(slot, paused, priority);
        model.put(slot, paused, priority);
    }
    const Slots expected = model.sorted();
    if (walk(order) != expected) return false;
    for (std::int32_t other = 0; other < slots; ++other) {
        const bool in = std::find(expected.begin(), expected.end(), other) != expected.end();
        if (order.contains(other) != in) return false;
    }
    return true;
}

TEST(EvictionOrder, AgreesWithSorting) {
    std::mt19937 random(2);
    std::int64_t operations = 0;
    for (const int slots : {1, 2, 5, 12}) {
        EvictionOrder order(slots);
        Model model;
        for (int i = 0; i < 50000; ++i, ++operations) {
            ASSERT_TRUE(agree(order, model, slots, static_cast<std::uint32_t>(random())))
                << "operation " << i << " on " << slots << " slots";
        }
    }
    EXPECT_GE(operations, 200000);
}

RC_GTEST_PROP(EvictionOrder, NoShortSequenceOfOperationsBreaksIt, ())
{
    const int slots = *rc::gen::inRange(1, 7);
    EvictionOrder order(slots);
    Model model;
    const auto ops = *rc::gen::scale(
        5.0, rc::gen::container<std::vector<std::uint32_t>>(rc::gen::arbitrary<std::uint32_t>()));
    for (const std::uint32_t bits : ops)
        RC_ASSERT(agree(order, model, slots, bits));
}

}  // namespace
}  // namespace kvgrid
