#include "src/block_allocator.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace kvgrid {
namespace {

// All that can be seen from outside.
std::vector<std::int64_t> stateOf(const BlockAllocator& blocks) {
    std::vector<std::int64_t> state{blocks.total(), blocks.free()};
    for (std::int64_t block = 0; block < blocks.total(); ++block) {
        state.push_back(blocks.references(BlockId{static_cast<std::int32_t>(block)}));
    }
    return state;
}

TEST(BlockAllocator, HandsOutEveryBlockOnce) {
    BlockAllocator blocks(100);
    std::set<std::int32_t> taken;
    for (int i = 0; i < 100; ++i) {
        const auto block = blocks.allocate();
        ASSERT_TRUE(block);
        EXPECT_TRUE(taken.insert(static_cast<std::int32_t>(*block)).second);
        EXPECT_EQ(blocks.references(*block), 1);
    }
    EXPECT_EQ(*taken.begin(), 0);
    EXPECT_EQ(*taken.rbegin(), 99);
    EXPECT_FALSE(blocks.allocate());
    EXPECT_EQ(blocks.free(), 0);
}

TEST(BlockAllocator, AnEmptyPoolHasNothing) {
    BlockAllocator blocks(0);
    EXPECT_FALSE(blocks.allocate());
    EXPECT_FALSE(blocks.retain(BlockId{0}));
    EXPECT_FALSE(blocks.release(BlockId{0}));
    EXPECT_EQ(blocks.total(), 0);
    EXPECT_EQ(blocks.free(), 0);
}

TEST(BlockAllocator, IsFreeWithTheLastHolder) {
    BlockAllocator blocks(1);
    const BlockId block = blocks.allocate().value();
    ASSERT_TRUE(blocks.retain(block));
    ASSERT_TRUE(blocks.release(block));
    EXPECT_EQ(blocks.free(), 0);
    EXPECT_FALSE(blocks.allocate());
    ASSERT_TRUE(blocks.release(block));
    EXPECT_EQ(blocks.free(), 1);
    EXPECT_EQ(blocks.allocate(), block);
}

TEST(BlockAllocator, RefusesIdsThatNobodyHolds) {
    BlockAllocator blocks(4);
    (void)blocks.allocate();
    const auto before = stateOf(blocks);
    for (const std::int32_t wild : {-1, 4, 5, 1 << 30, INT32_MAX, INT32_MIN}) {
        EXPECT_FALSE(blocks.retain(BlockId{wild}));
        EXPECT_FALSE(blocks.release(BlockId{wild}));
        EXPECT_EQ(blocks.references(BlockId{wild}), 0);
    }
    for (const std::int32_t unheld : {1, 2, 3}) {
        EXPECT_FALSE(blocks.retain(BlockId{unheld}));
        EXPECT_FALSE(blocks.release(BlockId{unheld}));
    }
    EXPECT_EQ(stateOf(blocks), before);
}

TEST(BlockAllocator, RefusesADoubleRelease) {
    BlockAllocator blocks(2);
    const BlockId block = blocks.allocate().value();
    ASSERT_TRUE(blocks.release(block));
    const auto before = stateOf(blocks);
    EXPECT_FALSE(blocks.release(block));
    EXPECT_EQ(stateOf(blocks), before);
}

// Holders by block, and nothing else.
class Model {
public:
    explicit Model(std::int64_t total) : total_(total) {}

    // What goes wrong when `blocks` does the same, if anything.
    std::string apply(BlockAllocator& blocks, std::uint32_t what, std::int32_t which) {
        const auto index = BlockId{which % static_cast<std::int32_t>(total_ + 2) - 1};
        const auto id = static_cast<std::int32_t>(index);
        const bool held = holders_.count(id) > 0;
        if (what % 3 == 0) {
            const bool full = static_cast<std::int64_t>(holders_.size()) == total_;
            const auto block = blocks.allocate();
            if (block.has_value() == full) return "allocate: full or not?";
            if (!block) return check(blocks);
            const auto taken = static_cast<std::int32_t>(*block);
            if (taken < 0 || taken >= total_) return "allocate: out of range";
            if (!holders_.emplace(taken, 1).second) return "allocate: owned twice";
        } else if (what % 3 == 1) {
            if (blocks.retain(index) != held) return "retain: held or not?";
            if (held) ++holders_[id];
        } else {
            if (blocks.release(index) != held) return "release: held or not?";
            if (held && --holders_[id] == 0) holders_.erase(id);
        }
        return check(blocks);
    }

private:
    [[nodiscard]] std::string check(const BlockAllocator& blocks) const {
        if (blocks.total() != total_) return "total";
        if (blocks.free() + static_cast<std::int64_t>(holders_.size()) != total_) {
            return "the states do not sum to the total";
        }
        for (std::int32_t block = -1; block <= total_; ++block) {
            const auto found = holders_.find(block);
            const std::int32_t expected = found == holders_.end() ? 0 : found->second;
            if (blocks.references(BlockId{block}) != expected) return "references";
        }
        return {};
    }

    std::int64_t total_;
    std::map<std::int32_t, std::int32_t> holders_;
};

TEST(BlockAllocator, AgreesWithCountingHolders) {
    std::mt19937 random(1);
    std::int64_t operations = 0;
    for (const std::int64_t total : {1, 2, 7, 16}) {
        BlockAllocator blocks(total);
        Model model(total);
        for (int i = 0; i < 100000; ++i, ++operations) {
            const std::string problem =
                model.apply(blocks, random(), static_cast<std::int32_t>(random() >> 8));
            ASSERT_EQ(problem, "") << "operation " << i << " on " << total << " blocks";
        }
    }
    EXPECT_GE(operations, 400000);
}

RC_GTEST_PROP(BlockAllocator, NoShortSequenceOfOperationsBreaksIt, ())
{
    const auto total = *rc::gen::inRange<std::int64_t>(1, 9);
    using Op = std::pair<std::uint8_t, std::uint16_t>;
    const auto ops =
        *rc::gen::scale(5.0, rc::gen::container<std::vector<Op>>(rc::gen::arbitrary<Op>()));
    BlockAllocator blocks(total);
    Model model(total);
    for (const auto& [what, which] : ops)
        RC_ASSERT(model.apply(blocks, what, which) == "");
}

}  // namespace
}  // namespace kvgrid
