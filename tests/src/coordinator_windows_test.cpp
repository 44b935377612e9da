// Layer groups with windows: which blocks are freed, when, and what that makes room for.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shard/ownership.h"
#include "tests/src/coordinator_fixture.h"

namespace kvgrid {
namespace {

using testing::IsEmpty;
using testing::SizeIs;

// Blocks of 4 tokens, sequences of up to 400, one group with a window.
CoordinatorConfig windowConfig(std::int64_t window, std::int64_t device_blocks,
                               std::int64_t host_blocks) {
    CoordinatorConfig config = smallConfig(device_blocks, host_blocks);
    config.limits.max_sequence_length = 400;
    config.limits.groups[0].blocks_per_sequence = 100;
    config.windows = {window};
    return config;
}

class CoordinatorWindowsTest : public CoordinatorTest {
protected:
    // Logical blocks that the last plan freed.
    [[nodiscard]] std::vector<std::int32_t> freed() const {
        std::vector<std::int32_t> blocks;
        for (const TableRecord& record : plan().tables) {
            if (record.tier == Tier::none) blocks.push_back(record.logical);
        }
        return blocks;
    }
    [[nodiscard]] std::int64_t freeOf(int group) const {
        return coordinator().freeBlocks(Tier::device, group, 0);
    }
};

// The next token, at position L, sees those beyond L - 6.
TEST_F(CoordinatorWindowsTest, ABlockIsFreedWhenTheNextTokenSeesNoneOfIt) {
    start(windowConfig(6, 10, 0));
    const SequenceId sequence = allocate(400);
    for (std::int64_t length = 0; length < 40; ++length) {
        grow(sequence, 1);  // of the position `length`
        const bool leaves = length >= 9 && (length - 9) % 4 == 0;
        EXPECT_EQ(freed(), leaves ? std::vector{static_cast<std::int32_t>((length - 9) / 4)}
                                  : std::vector<std::int32_t>())
            << length;
    }
}

TEST_F(CoordinatorWindowsTest, GoesWithThePlanAfterTheCommit) {
    start(windowConfig(4, 10, 0));
    const SequenceId sequence = allocate(400);
    grow(sequence, 20);
    EXPECT_EQ(freeDevice(), 5);
    ask(Requests());
    EXPECT_EQ(freed(), (std::vector{0, 1, 2, 3}));
    EXPECT_EQ(freeDevice(), 9);
    ask(Requests());
    EXPECT_THAT(plan().tables, IsEmpty());
}

// What was run and not accepted may be run again, from further back.
TEST_F(CoordinatorWindowsTest, OnlyCommittedTokensMoveTheWindow) {
    start(windowConfig(4, 10, 0));
    const SequenceId sequence = allocate(400);
    grow(sequence, 6);
    ask(Requests().run(sequence, 14));
    ask(Requests());  // dropped
    EXPECT_THAT(freed(), IsEmpty());
    ask(Requests().run(sequence, 14));
    commit({2});
    ask(Requests().run(sequence, 4));
    EXPECT_EQ(freed(), (std::vector{0}));  // the token at 8 sees 5 and more
    commit({0});
    ask(Requests());
    EXPECT_THAT(freed(), IsEmpty());
    EXPECT_EQ(plan().sequences.at(0).length, 8);
}

// The pool would be full after 24 tokens.
TEST_F(CoordinatorWindowsTest, DecodesForeverInAPoolOfOneWindow) {
    start(windowConfig(18, mostBlocksOfWindow(18, 1, 4, 1), 0));
    const SequenceId sequence = allocate(400);
    std::int64_t least_free = freeDevice();
    for (int token = 0; token < 400; ++token) {
        grow(sequence, 1);
        least_free = std::min(least_free, freeDevice());
    }
    EXPECT_EQ(coordinator().length(sequence), 400);
    EXPECT_EQ(least_free, 0);  // one block fewer would not have done
}

TEST_F(CoordinatorWindowsTest, AllocateSaysWhenTheWindowCouldNeverFit) {
    start(windowConfig(18, mostBlocksOfWindow(18, 1, 4, 1) - 1, 8));
    expectNever(Requests().allocate(400), "max_length 400: needs 6 blocks of 4 tokens");
    allocate(20);  // never slides so far
}

TEST_F(CoordinatorWindowsTest, RunSaysWhenTheStepCouldNeverFit) {
    start(windowConfig(5, 4, 8));
    const SequenceId sequence = allocate(400);
    grow(sequence, 12);
    ask(Requests());
    // Positions 8 to 25.
    expectNever(Requests().run(sequence, 14),
                "14 tokens and their window need 5 blocks (layer group 0), the device tier has 4");
    grow(sequence, 12);
}

// Blocks that a window leaves are there for the runs of the same plan.
TEST_F(CoordinatorWindowsTest, MakesRoomForOthersAtOnce) {
    start(windowConfig(4, 6, 0));
    const SequenceId first = allocate(400);
    const SequenceId second = allocate(400);
    grow(first, 20);
    grow(second, 20);
    EXPECT_EQ(freeDevice(), 0);
    EXPECT_THAT(plan().copies, IsEmpty());
}

TEST_F(CoordinatorWindowsTest, OffloadsAndRestoresOnlyWhatIsInTheWindow) {
    start(windowConfig(6, 4, 8));
    const SequenceId first = allocate(400);
    const SequenceId second = allocate(400);
    for (int token = 0; token < 50; ++token) {
        grow(first, 1);
        grow(second, 4);
        if (token < 20) continue;
        EXPECT_GE(plan().copies.size(), 1);
        EXPECT_LE(plan().copies.size(), 8);
    }
    EXPECT_GT(coordinator().restoredBlocks(), 40);
    ask(Requests().release(first).release(second));
    EXPECT_EQ(freeDevice(), 4);
    EXPECT_EQ(freeHost(), 8);
    EXPECT_EQ(coordinator().digest(), 0);
}

TEST_F(CoordinatorWindowsTest, GroupsSlideEachByItsOwnWindow) {
    CoordinatorConfig config = windowConfig(8, 6, 0);
    config.limits.groups.push_back(
        {.blocks_per_sequence = 100, .device_blocks = 40, .host_blocks = 0});
    config.limits.groups.push_back(
        {.blocks_per_sequence = 200, .device_blocks = 12, .host_blocks = 0});
    config.block_sizes = {4, 4, 2};
    config.windows = {8, 0, 3};
    start(config);
    const SequenceId sequence = allocate(100);
    for (int step = 0; step < 25; ++step)
        grow(sequence, 4);
    ask(Requests());
    EXPECT_EQ(freeOf(0), 6 - 2);  // positions 93 to 99
    EXPECT_EQ(freeOf(1), 40 - 25);
    EXPECT_EQ(freeOf(2), 12 - 1);  // 98 and 99
    EXPECT_THAT(freed(), SizeIs(1 + 2));
}

}  // namespace
}  // namespace kvgrid
