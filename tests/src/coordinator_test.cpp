// Each rule of the coordinator, and each misuse, by example.
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/src/coordinator_fixture.h"

namespace kvgrid {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::int64_t least_int64 = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t most_int64 = std::numeric_limits<std::int64_t>::max();

// ---- allocate ----

TEST_F(CoordinatorTest, AllocateNamesALengthThatCannotBe) {
    start(4, 0);
    expectNever(Requests().allocate(0), "max_length 0");
    expectNever(Requests().allocate(-1), "max_length -1");
    expectNever(Requests().allocate(17), "max_length 17: 1 to 16");
    expectNever(Requests().allocate(least_int64), "max_length -9223372036854775808");
    expectNever(Requests().allocate(most_int64), "max_length 9223372036854775807");
    EXPECT_NE(allocate(1), allocate(16));
}

TEST_F(CoordinatorTest, AllocateSaysWhenTheDeviceTierCouldNeverHoldIt) {
    start(3, 100);
    expectNever(Requests().allocate(13), "needs 4 blocks of 4 tokens, the device tier has 3");
    allocate(12);
}

TEST_F(CoordinatorTest, AllocateWaitsForASlot) {
    start(16, 0);
    std::vector<SequenceId> sequences;
    for (int i = 0; i < 4; ++i)
        sequences.push_back(allocate());
    expectWait(Requests().allocate(16), "max_sequences 4");
    ask(Requests().release(sequences[2]));
    EXPECT_NE(allocate(), sequences[2]);
}

TEST_F(CoordinatorTest, ARefusedAllocateNamesNoSequence) {
    start(16, 0);
    EXPECT_EQ(ask(Requests().allocate(0)).at(0).sequence, SequenceId{-1});
}

TEST_F(CoordinatorTest, AStaleIdIsUnknownAfterItsSlotIsInUseAgain) {
    start(16, 0);
    const SequenceId first = allocate();
    ask(Requests().release(first));
    const SequenceId second = allocate();
    ASSERT_EQ(slotOf(first), slotOf(second));
    const std::string why =
        "sequence " + std::to_string(static_cast<std::int32_t>(first)) + ": unknown";
    expectNever(Requests().release(first), why);
    expectNever(Requests().run(first), why);
    expectNever(Requests().pause(first), why);
    expectNever(Requests().resume(first), why);
    EXPECT_FALSE(coordinator().length(first));
    EXPECT_EQ(coordinator().length(second), 0);
}

TEST_F(CoordinatorTest, IdsStayFarFromTheEndOfTheirType) {
    CoordinatorConfig config = smallConfig(4, 0);
    config.limits.max_sequences = 1 << 18;
    Coordinator coordinator(config);
    const auto allocate_one = [&] {
        return coordinator.plan(Requests().allocate(1).all()).answers.at(0).sequence;
    };
    std::set<std::int32_t> seen;
    std::int32_t id = allocate_one();
    const std::int32_t first = id;
    do {
        ASSERT_GE(id, 0);
        ASSERT_LT(id, 1 << 30);
        ASSERT_EQ(id % config.limits.max_sequences, first % config.limits.max_sequences);
        ASSERT_TRUE(seen.insert(id).second);
        (void)coordinator.plan(Requests().release(SequenceId{id}).all());
        id = allocate_one();
    } while (id != first);
    EXPECT_EQ(seen.size(), 4096);  // 2^30 / 2^18 generations
}

// ---- release, pause, resume ----

TEST_F(CoordinatorTest, UnknownSequencesAreNamed) {
    start(16, 4);
    for (const std::int32_t id : {-1, 0, 3, 4, INT32_MAX, INT32_MIN}) {
        const std::string why = "sequence " + std::to_string(id) + ": unknown";
        expectNever(Requests().release(SequenceId{id}), why);
        expectNever(Requests().pause(SequenceId{id}), why);
        expectNever(Requests().resume(SequenceId{id}), why);
        expectNever(Requests().run(SequenceId{id}), why);
        EXPECT_FALSE(coordinator().length(SequenceId{id}));
    }
}

TEST_F(CoordinatorTest, AFreeSlotIsNoSequence) {
    CoordinatorConfig config = smallConfig(16, 4);
    config.limits.max_sequences = 1;
    start(config);
    for (const std::int32_t id : {-1, 0, INT32_MIN, INT32_MAX}) {
        expectNever(Requests().release(SequenceId{id}), "unknown");
        EXPECT_FALSE(coordinator().length(SequenceId{id}));
    }
}

TEST_F(CoordinatorTest, AKindThatIsNoneIsRefused) {
    start(16, 0);
    const SequenceId sequence = allocate();
    Coordinator plain(smallConfig(16, 0));
    (void)plain.plan(Requests().allocate(16).all());
    const Request wild{.kind = Request::Kind{9}, .sequence = sequence};
    const StepPlan refused = plain.plan(std::span(&wild, 1));
    EXPECT_EQ(refused.answers.at(0).status, static_cast<std::int32_t>(Answer::Status::never));
    EXPECT_THAT(refused.text, HasSubstr("kind 9"));
}

TEST_F(CoordinatorTest, ReleaseGivesEveryBlockBackInBothTiers) {
    start(4, 4);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    grow(first, 16);
    grow(second, 8);
    EXPECT_EQ(freeDevice(), 0);
    EXPECT_EQ(freeHost(), 2);
    ask(Requests().release(first));
    EXPECT_EQ(freeDevice(), 2);
    EXPECT_EQ(freeHost(), 4);
    ask(Requests().release(second));
    EXPECT_EQ(freeDevice(), 4);
    EXPECT_EQ(coordinator().digest(), 0);
}

TEST_F(CoordinatorTest, ADoubleReleaseIsRefused) {
    start(4, 0);
    const SequenceId sequence = allocate();
    const auto answers = ask(Requests().release(sequence).release(sequence));
    EXPECT_EQ(answers.at(0).status, Answer::Status::done);
    EXPECT_EQ(answers.at(1).status, Answer::Status::never);
    expectNever(Requests().release(sequence), "unknown, or released");
}

TEST_F(CoordinatorTest, ASequenceThatRunsInThisStepIsNotReleased) {
    start(4, 0);
    const SequenceId sequence = allocate();
    auto answers = ask(Requests().run(sequence).release(sequence));
    EXPECT_EQ(answers.at(1).status, Answer::Status::never);
    EXPECT_THAT(answers.at(1).why, HasSubstr("runs in this step"));
    // The next step is another one, committed or not.
    answers = ask(Requests().release(sequence).run(sequence));
    EXPECT_EQ(answers.at(0).status, Answer::Status::done);
    EXPECT_EQ(answers.at(1).status, Answer::Status::never);
    EXPECT_EQ(freeDevice(), 4);
}

TEST_F(CoordinatorTest, PausingAndResumingAgainIsDoneAlready) {
    start(4, 0);
    const SequenceId sequence = allocate();
    for (const Answer& answer :
         ask(Requests().resume(sequence).pause(sequence).pause(sequence).resume(sequence).resume(
             sequence))) {
        EXPECT_EQ(answer.status, Answer::Status::done) << answer.why;
    }
}

TEST_F(CoordinatorTest, APausedSequenceDoesNotRunUntilResumed) {
    start(4, 0);
    const SequenceId sequence = allocate();
    ask(Requests().pause(sequence));
    expectNever(Requests().run(sequence), "is paused");
    const auto answers = ask(Requests().resume(sequence).run(sequence));
    EXPECT_EQ(answers.at(1).status, Answer::Status::done) << answers.at(1).why;
}

TEST_F(CoordinatorTest, PausingARunningSequenceCountsFromTheNextStep) {
    start(4, 4);
    const SequenceId sequence = allocate();
    const SequenceId other = allocate();
    // Its blocks are needed in this step: they are no victims.
    auto answers = ask(Requests().run(sequence, 12).pause(sequence).run(other, 8));
    EXPECT_EQ(answers.at(1).status, Answer::Status::done);
    EXPECT_EQ(answers.at(2).status, Answer::Status::wait);
    commit();
    answers = ask(Requests().run(other, 8).run(sequence));
    EXPECT_EQ(answers.at(0).status, Answer::Status::done);
    EXPECT_EQ(answers.at(1).status, Answer::Status::never);
    EXPECT_EQ(victims(), (std::vector{slotOf(sequence)}));
}

// ---- run ----

TEST_F(CoordinatorTest, RunNamesCountsThatCannotBe) {
    CoordinatorConfig config = smallConfig(16, 0);
    config.limits.max_step_tokens = 5;
    start(config);
    const SequenceId sequence = allocate(8);
    expectNever(Requests().run(sequence, 0), "0 tokens");
    expectNever(Requests().run(sequence, -1), "-1 tokens");
    expectNever(Requests().run(sequence, least_int64), "-9223372036854775808 tokens");
    expectNever(Requests().run(sequence, 9), "sequence 0: 0 + 9 tokens exceed its max_length 8");
    expectNever(Requests().run(sequence, most_int64), "exceed its max_length 8");
    expectNever(Requests().run(sequence, 6), "6 tokens exceed max_step_tokens 5");
    grow(sequence, 5);
    expectNever(Requests().run(sequence, 4), "sequence 0: 5 + 4 tokens exceed its max_length 8");
    expectNever(Requests().run(sequence, most_int64), "tokens exceed its max_length 8");
    grow(sequence, 3);
    expectNever(Requests().run(sequence, 1), "8 + 1 tokens exceed its max_length 8");
}

TEST_F(CoordinatorTest, ASequenceRunsOnceInAStep) {
    start(16, 0);
    const SequenceId sequence = allocate();
    const auto answers = ask(Requests().run(sequence, 2).run(sequence, 2));
    EXPECT_EQ(answers.at(0).status, Answer::Status::done);
    EXPECT_EQ(answers.at(1).status, Answer::Status::never);
    EXPECT_THAT(answers.at(1).why, HasSubstr("runs twice"));
    commit();
    EXPECT_EQ(coordinator().length(sequence), 2);
}

TEST_F(CoordinatorTest, RunWaitsForTheTokensOfTheStep) {
    start(16, 0);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    const SequenceId third = allocate();
    const auto answers = ask(Requests().run(first, 15).run(second, 6).run(third, 5));
    EXPECT_EQ(answers.at(0).status, Answer::Status::done);
    EXPECT_EQ(answers.at(1).status, Answer::Status::wait);
    EXPECT_THAT(answers.at(1).why, HasSubstr("6 tokens, 5 are left of max_step_tokens 20"));
    EXPECT_EQ(answers.at(2).status, Answer::Status::done);
}

TEST_F(CoordinatorTest, BlocksAreTakenWhenARunFirstNeedsThem) {
    start(16, 0);
    const SequenceId sequence = allocate();
    EXPECT_EQ(freeDevice(), 16);
    grow(sequence, 4);
    EXPECT_EQ(freeDevice(), 15);
    grow(sequence, 1);
    EXPECT_EQ(freeDevice(), 14);
    grow(sequence, 3);
    EXPECT_EQ(freeDevice(), 14);
    grow(sequence, 8);
    EXPECT_EQ(freeDevice(), 12);
}

TEST_F(CoordinatorTest, BlocksOfDroppedTokensStayForTheNextRun) {
    start(16, 0);
    const SequenceId sequence = allocate();
    ask(Requests().run(sequence, 13));
    EXPECT_EQ(freeDevice(), 12);
    ask(Requests().run(sequence, 2));  // the step before is dropped
    EXPECT_THAT(plan().tables, IsEmpty());
    EXPECT_EQ(plan().runs.at(0).first_position, 0);
    commit({1});
    EXPECT_EQ(coordinator().length(sequence), 1);
    ask(Requests().run(sequence, 15));
    EXPECT_THAT(plan().tables, IsEmpty());
    EXPECT_EQ(plan().runs.at(0).first_position, 1);
}

TEST_F(CoordinatorTest, RunWaitsWithoutAHostTier) {
    start(4, 0);
    const SequenceId first = allocate();
    const SequenceId second = allocate();
    grow(first, 12);
    expectWait(Requests().run(second, 5),
               "sequence 1: needs 2 more device blocks (layer group 0, context 0): 1 are free and "
               "3 cold, with 0 free in the host tier");
    ask(Requests().release(first));
    grow(second, 5);
}

// ---- steps and commits ----

TEST_F(CoordinatorTest, NewLengthsTravelInTheNextPlan) {
    start(4, 0);
    const SequenceId sequence = allocate();
    ask(Requests().run(sequence, 5));
    EXPECT_THAT(plan().sequences, IsEmpty());
    commit({3});
    EXPECT_EQ(coordinator().length(sequence), 3);
    ask(Requests().release(sequence));
    ASSERT_EQ(plan().sequences.size(), 2);
    EXPECT_EQ(plan().sequences[0].kind, SequenceRecord::Kind::length);
    EXPECT_EQ(plan().sequences[0].length, 3);
    EXPECT_EQ(plan().sequences[1].kind, SequenceRecord::Kind::release);
    ask(Requests());
    EXPECT_THAT(plan().sequences, IsEmpty());
}

// A rank may have committed all tokens ahead of the counts of rank 0.
TEST_F(CoordinatorTest, ALengthThatDidNotGrowTravelsToo) {
    start(4, 0);
    const SequenceId sequence = allocate();
    ask(Requests().run(sequence, 5));
    commit({0});
    ask(Requests());
    ASSERT_EQ(plan().sequences.size(), 1);
    EXPECT_EQ(plan().sequences[0].length, 0);
}

TEST_F(CoordinatorTest, AStepThatWasNotAdvancedIsDropped) {
    start(4, 0);
    const SequenceId sequence = allocate();
    ask(Requests().run(sequence, 5));
    ask(Requests());
    EXPECT_EQ(coordinator().length(sequence), 0);
    EXPECT_THAT(plan().sequences, IsEmpty());
    commit({});  // of the empty step
    EXPECT_EQ(coordinator().length(sequence), 0);
}

TEST(Coordinator, AdvanceNamesWhatIsWrongAndChangesNothing) {
    Coordinator coordinator(smallConfig(8, 0));
    const auto refused = [&](const std::vector<std::int64_t>& accepted) {
        const std::uint64_t before = coordinator.digest();
        const auto advanced = coordinator.advance(accepted);
        EXPECT_FALSE(advanced);
        EXPECT_EQ(coordinator.digest(), before);
        EXPECT_EQ(coordinator.length(SequenceId{0}).value_or(0), 0);
        if (advanced) return std::string();
        EXPECT_EQ(advanced.error().code, ErrorCode::invalid_argument);
        return advanced.error().message;
    };
    EXPECT_THAT(refused({}), HasSubstr("no step is open"));
    (void)coordinator.plan(Requests().allocate(16).allocate(16).all());
    (void)coordinator.plan(Requests().run(SequenceId{0}, 5).run(SequenceId{1}, 2).all());
    EXPECT_THAT(refused({}), HasSubstr("0 counts for the 2 runs of step 2"));
    EXPECT_THAT(refused({5}), HasSubstr("1 counts for the 2 runs"));
    EXPECT_THAT(refused({5, 2, 0}), HasSubstr("3 counts for the 2 runs"));
    EXPECT_THAT(refused({6, 2}), HasSubstr("accepted[0]: 6 of 5 tokens"));
    EXPECT_THAT(refused({5, -1}), HasSubstr("accepted[1]: -1 of 2 tokens"));
    EXPECT_THAT(refused({most_int64, least_int64}), HasSubstr("accepted[0]"));
    ASSERT_TRUE(coordinator.advance(std::vector<std::int64_t>{5, 2}));
    EXPECT_FALSE(coordinator.advance(std::vector<std::int64_t>{5, 2}));
    EXPECT_EQ(coordinator.length(SequenceId{0}), 5);
    EXPECT_EQ(coordinator.length(SequenceId{1}), 2);
}

TEST(Coordinator, RefusesLimitsThatContradictEachOther) {
    const auto thrown = [](auto change) {
        CoordinatorConfig config = smallConfig(4, 4);
        change(config);
        EXPECT_THROW(Coordinator{config}, Error);
    };
    thrown([](auto& config) { config.limits.max_sequences = 0; });
    thrown([](auto& config) { config.limits.max_sequences = (1 << 30) + 1; });
    thrown([](auto& config) { config.limits.groups.push_back(config.limits.of(0)); });
    thrown([](auto& config) { config.block_sizes.push_back(4); });
    thrown([](auto& config) { config.windows.clear(); });
    thrown([](auto& config) { config.windows = {-1}; });
    thrown([](auto& config) { config.windows = {17}; });
    thrown([](auto& config) { config.limits.contexts = 0; });
    thrown([](auto& config) { config.limits.contexts = 3; });
    thrown([](auto& config) { config.limits.groups[0].device_blocks = -1; });
    thrown([](auto& config) { config.limits.groups[0].host_blocks = -1; });
    thrown([](auto& config) { config.limits.groups[0].blocks_per_sequence = 3; });
    thrown([](auto& config) { config.block_sizes = {0}; });
    EXPECT_NO_THROW(Coordinator{smallConfig(4, 4)});
}

TEST(Coordinator, NobodyHasBlocksOutsideTheGrid) {
    CoordinatorConfig config = smallConfig(4, 3);
    config.limits.groups.push_back(config.limits.of(0));
    config.limits.contexts = 2;
    config.block_sizes = {4, 4};
    config.windows = {0, 0};
    const Coordinator coordinator(config);
    EXPECT_EQ(coordinator.freeBlocks(Tier::device, 1, 1), 4);
    EXPECT_EQ(coordinator.freeBlocks(Tier::host, 1, 1), 3);
    EXPECT_EQ(coordinator.freeBlocks(Tier::none, 1, 1), 0);
    // Each of these would be a pool if only the sum were looked at.
    EXPECT_EQ(coordinator.freeBlocks(Tier::device, 0, 2), 0);
    EXPECT_EQ(coordinator.freeBlocks(Tier::device, 1, -1), 0);
    EXPECT_EQ(coordinator.freeBlocks(Tier::device, 2, -2), 0);
    EXPECT_EQ(coordinator.freeBlocks(Tier::device, -1, 2), 0);
    // And these would be none.
    EXPECT_EQ(coordinator.freeBlocks(Tier::device, 2, 0), 0);
    EXPECT_EQ(coordinator.freeBlocks(Tier::device, -1, 0), 0);
}

TEST(Coordinator, Moves) {
    Coordinator first(smallConfig(4, 3));
    (void)first.plan(Requests().allocate(16).all());
    const std::uint64_t digest = first.digest();
    Coordinator second(std::move(first));
    EXPECT_EQ(second.digest(), digest);
    Coordinator third(smallConfig(1, 1));
    third = std::move(second);
    EXPECT_EQ(third.length(SequenceId{0}), 0);
}

}  // namespace
}  // namespace kvgrid
