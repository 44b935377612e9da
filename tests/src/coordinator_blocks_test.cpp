// Where the coordinator puts blocks: several groups and contexts, offload and restore.
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/src/coordinator_fixture.h"

namespace kvgrid {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using Direction = CopyRecord::Direction;

class CoordinatorBlocksTest : public CoordinatorTest {};

TEST_F(CoordinatorBlocksTest, OffloadsFromTheEndOfTheSequence) {
    start(4, 4);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    grow(first, 16);
    ask(Requests().run(second, 8));
    std::vector<std::int32_t> logical;
    for (const TableRecord& record : plan().tables) {
        if (record.tier == Tier::host) logical.push_back(record.logical);
    }
    EXPECT_EQ(logical, (std::vector{3, 2}));
    EXPECT_EQ(coordinator().offloadedBlocks(), 2);
    EXPECT_EQ(coordinator().distinctOffloadedBlocks(), 2);
}

TEST_F(CoordinatorBlocksTest, RestoresAllThatARunNeeds) {
    start(4, 4);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    grow(first, 13);
    grow(second, 8);
    EXPECT_EQ(freeHost(), 2);
    ask(Requests().run(first, 1));
    EXPECT_EQ(coordinator().restoredBlocks(), 2);
    EXPECT_EQ(coordinator().offloadedBlocks(), 4);
    EXPECT_EQ(victims(), (std::vector{slotOf(second), slotOf(second)}));
    commit();
    // The same blocks again are not different ones.
    grow(second, 1);
    grow(first, 1);
    EXPECT_GT(coordinator().offloadedBlocks(), 6);
    EXPECT_LE(coordinator().distinctOffloadedBlocks(), 7);
}

TEST_F(CoordinatorBlocksTest, TakesVictimsInTheOrderOfTheHeader) {
    CoordinatorConfig config = smallConfig(4, 4);
    config.limits.max_sequences = 5;
    start(config);
    const SequenceId important = allocate(4, 1);
    const SequenceId later = allocate(4, 0);
    const SequenceId earlier = allocate(4, 0);
    const SequenceId paused = allocate(4, 9);
    const SequenceId needy = allocate(16, 0);
    for (const SequenceId sequence : {important, earlier, later, paused})
        grow(sequence, 4);
    ask(Requests().pause(paused));
    ask(Requests().run(needy, 16));
    std::vector<std::int32_t> expected;
    for (const SequenceId sequence : {paused, earlier, later, important}) {
        expected.push_back(static_cast<std::int32_t>(sequence));
    }
    EXPECT_EQ(victims(), expected);
}

// Instead of each run taking a block from the next one in line, which would have to come back.
TEST_F(CoordinatorBlocksTest, ABatchThatDoesNotFitAnyMoreLosesItsEnd) {
    start(4, 4);
    Requests all;
    for (int i = 0; i < 4; ++i)
        all.run(allocate());
    Requests fill;
    for (const Request& run : all.all())
        fill.run(run.sequence, 4);
    ask(fill);
    commit();
    const auto answers = ask(all);
    EXPECT_EQ(answers.at(0).status, Answer::Status::done);
    EXPECT_EQ(answers.at(1).status, Answer::Status::done);
    EXPECT_EQ(answers.at(2).status, Answer::Status::wait);
    EXPECT_EQ(answers.at(3).status, Answer::Status::wait);
    EXPECT_EQ(victims(), (std::vector{3, 2}));
    EXPECT_EQ(coordinator().restoredBlocks(), 0);
}

TEST_F(CoordinatorBlocksTest, SequencesOfTheStepAreNoVictims) {
    start(4, 4);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    grow(first, 12);
    const auto answers = ask(Requests().run(first, 1).run(second, 4));
    EXPECT_EQ(answers.at(0).status, Answer::Status::done);
    EXPECT_EQ(answers.at(1).status, Answer::Status::wait);
    EXPECT_THAT(answers.at(1).why, HasSubstr("0 are free and 0 cold"));
}

// Both tiers full but for one block: blocks change places one by one, through that one, and a host
// block is used again in the step in which its restore frees it.
TEST_F(CoordinatorBlocksTest, SwapsThroughOneSpareBlock) {
    start(4, 5);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    grow(first, 13);
    grow(second, 13);
    ASSERT_EQ(freeDevice(), 0);
    ASSERT_EQ(freeHost(), 1);
    grow(first, 1);
    ASSERT_THAT(plan().copies, SizeIs(8));
    std::set<std::int32_t> filled;
    for (std::size_t i = 0; i < plan().copies.size(); ++i) {
        const CopyRecord& copy = plan().copies[i];
        EXPECT_EQ(copy.direction, i % 2 == 0 ? Direction::offload : Direction::restore);
        if (i % 2 == 0) filled.insert(copy.host_block);
        if (i > 0 && i % 2 == 0) {
            EXPECT_EQ(copy.host_block, plan().copies[i - 1].host_block);
        }
    }
    EXPECT_THAT(filled, SizeIs(4));
    EXPECT_EQ(freeDevice(), 0);
    EXPECT_EQ(freeHost(), 1);
}

TEST_F(CoordinatorBlocksTest, WaitsWhenNoBlockIsLeftToSwapThrough) {
    start(4, 4);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    grow(first, 13);
    grow(second, 13);
    expectWait(Requests().run(first, 1), "0 are free and 4 cold, with 0 free in the host tier");
    ask(Requests().release(second));
    grow(first, 1);
}

// The victim is released in the step that offloads it: its host block is free again, is taken by
// the next victim, and only that one is copied there.
TEST_F(CoordinatorBlocksTest, TwoBlocksNeverGoToOneHostBlock) {
    start(2, 1);
    const SequenceId first = allocate(8);
    const SequenceId second = allocate(8);
    const SequenceId third = allocate(8);
    const SequenceId fourth = allocate(8);
    grow(first, 4);
    grow(second, 4);
    const auto answers = ask(Requests().run(third, 1).release(first).run(fourth, 1));
    for (const Answer& answer : answers)
        EXPECT_EQ(answer.status, Answer::Status::done);
    ASSERT_THAT(plan().copies, SizeIs(1));
    EXPECT_EQ(victims(), (std::vector{slotOf(first), slotOf(second)}));
    EXPECT_EQ(coordinator().offloadedBlocks(), 1);
    EXPECT_EQ(coordinator().distinctOffloadedBlocks(), 1);
    commit();
    ask(Requests().release(third));
    grow(second, 1);  // finds its own tokens
}

TEST_F(CoordinatorBlocksTest, AVictimMayStillRunInTheSameStep) {
    start(3, 3);
    const SequenceId first = allocate(8);
    const SequenceId second = allocate(8);
    const SequenceId third = allocate(8);
    grow(first, 4);
    grow(second, 8);
    const auto answers = ask(Requests().run(third, 4).run(first, 4));
    EXPECT_EQ(answers.at(0).status, Answer::Status::done);
    EXPECT_EQ(answers.at(1).status, Answer::Status::done) << answers.at(1).why;
    EXPECT_EQ(victims(), (std::vector{slotOf(first), slotOf(second), slotOf(second)}));
    EXPECT_EQ(coordinator().restoredBlocks(), 1);
}

TEST_F(CoordinatorBlocksTest, PausedAndOffloadedSequencesComeBackInOrder) {
    start(4, 8);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    const SequenceId third = allocate();
    grow(first, 13);
    ask(Requests().pause(first));
    grow(second, 13);
    grow(third, 13);
    EXPECT_EQ(freeHost(), 0);
    ask(Requests().release(third));
    ask(Requests().resume(first));
    grow(first, 1);
    EXPECT_EQ(freeHost(), 4);
    EXPECT_THAT(victims(), IsEmpty());
}

// ---- several pools ----

CoordinatorConfig contextsConfig(int contexts, std::int64_t device_blocks) {
    CoordinatorConfig config;
    config.limits = {.max_sequences = 4,
                     .max_sequence_length = 4096,
                     .max_step_tokens = 4096,
                     .contexts = contexts,
                     .groups = {{.blocks_per_sequence = 4096 / contexts / 64,
                                 .device_blocks = device_blocks,
                                 .host_blocks = 0}}};
    config.block_sizes = {64};
    config.windows = {0};
    return config;
}

TEST_F(CoordinatorBlocksTest, EachContextTakesBlocksForWhatItOwns) {
    start(contextsConfig(4, 16));
    for (int slot = 0; slot < 4; ++slot) {
        const SequenceId sequence = allocate(1024);
        const auto used = [&](int stripe) {
            return 16 - coordinator().freeBlocks(Tier::device, 0, (stripe + slot) % 4);
        };
        grow(sequence, 256);
        EXPECT_EQ(used(0), 4);
        EXPECT_EQ(used(1), 0);
        grow(sequence, 1);
        EXPECT_EQ(used(1), 1);
        EXPECT_EQ(used(2), 0);
        grow(sequence, 767);
        for (int stripe = 0; stripe < 4; ++stripe)
            EXPECT_EQ(used(stripe), 4);
        ask(Requests().release(sequence));
        for (int stripe = 0; stripe < 4; ++stripe)
            EXPECT_EQ(used(stripe), 0);
        ASSERT_EQ(slotOf(allocate(1)), slot);  // from now on taken
    }
}

TEST_F(CoordinatorBlocksTest, AllocateCountsTheLargestShare) {
    start(contextsConfig(4, 5));
    allocate(1024 + 64);
    expectNever(Requests().allocate(1024 + 65), "needs 6 blocks of 64 tokens");
}

TEST_F(CoordinatorBlocksTest, OneShortPoolFailsTheRunAndTouchesNoOther) {
    CoordinatorConfig config = smallConfig(8, 2);
    config.limits.groups.push_back(config.limits.of(0));
    config.limits.groups[1].blocks_per_sequence = 8;
    config.block_sizes = {4, 2};
    config.windows = {0, 0};
    start(config);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    grow(first, 10);  // 3 blocks of the first group, 5 of the second
    expectWait(Requests().run(second, 11), "(layer group 1, context 0): 3 are free and 5 cold");
    grow(second, 10);
    EXPECT_EQ(coordinator().freeBlocks(Tier::device, 0, 0), 2);
    EXPECT_EQ(coordinator().freeBlocks(Tier::host, 0, 0), 2);
    EXPECT_EQ(coordinator().freeBlocks(Tier::device, 1, 0), 0);
    EXPECT_EQ(coordinator().freeBlocks(Tier::host, 1, 0), 0);
}

TEST_F(CoordinatorBlocksTest, AContiguousCacheIsOneBlockASequence) {
    CoordinatorConfig config = smallConfig(2, 1);
    config.block_sizes = {256};
    config.limits.groups[0].blocks_per_sequence = 1;
    start(config);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    const SequenceId third = allocate();
    grow(first, 1);
    grow(first, 15);
    grow(second, 16);
    grow(third, 1);
    EXPECT_EQ(victims(), (std::vector{slotOf(first)}));
}

}  // namespace
}  // namespace kvgrid
