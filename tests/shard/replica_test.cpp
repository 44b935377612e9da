#include "shard/replica.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvgrid {
namespace {

const PlanLimits limits{
    .max_sequences = 2,
    .max_sequence_length = 64,
    .max_step_tokens = 64,
    .groups = {{.blocks_per_sequence = 4, .device_blocks = 8, .host_blocks = 8}}};

// A plan that allocates slot 1 and gives it device block 5, with the digest that leads to.
StepPlan allocation() {
    StepPlan plan;
    plan.number = 1;
    plan.sequences = {
        {.kind = SequenceRecord::Kind::allocate, .slot = 1, .sequence = 3, .max_length = 40}};
    plan.tables = {{.slot = 1, .logical = 0, .tier = Tier::device, .block = 5}};
    MetadataDigest digest;
    digest.addSequence(1, 3, 40, 0);
    digest.addEntry(plan.tables.front());
    plan.digest = digest.value();
    return plan;
}

TEST(Replica, FollowsAPlan) {
    Replica replica(limits);
    ASSERT_TRUE(replica.apply(allocation()));
    EXPECT_EQ(replica.slotOf(SequenceId{3}), 1);
    EXPECT_EQ(replica.slotOf(SequenceId{1}), std::nullopt);  // same slot, another generation
    EXPECT_EQ(replica.slotOf(SequenceId{-1}), std::nullopt);
    EXPECT_EQ(replica.length(1), 0);
    EXPECT_EQ(replica.block(1, 0, 0, 0).tier, Tier::device);
    EXPECT_EQ(replica.block(1, 0, 0, 0).id, 5);
    EXPECT_EQ(replica.block(1, 0, 0, 3).tier, Tier::none);
}

TEST(Replica, SaysWhenItDisagrees) {
    StepPlan plan = allocation();
    plan.digest ^= 1;
    Replica replica(limits);
    const Result<void> applied = replica.apply(plan);
    ASSERT_FALSE(applied);
    EXPECT_EQ(applied.error().code, ErrorCode::internal);
    EXPECT_THAT(applied.error().message, testing::HasSubstr("step 1"));
}

TEST(Replica, RefusesToAllocateAUsedSlotOrToUseAFreeOne) {
    Replica replica(limits);
    ASSERT_TRUE(replica.apply(allocation()));
    EXPECT_FALSE(replica.apply(allocation()));

    StepPlan plan;
    plan.sequences = {{.kind = SequenceRecord::Kind::length, .slot = 0, .length = 1}};
    EXPECT_FALSE(replica.apply(plan));
}

TEST(Replica, RefusesARunFromAnotherLength) {
    StepPlan plan = allocation();
    plan.runs = {{.slot = 1, .rows = 1, .first_position = 1}};
    EXPECT_FALSE(Replica(limits).apply(plan));
    plan.runs.front().first_position = 0;
    EXPECT_TRUE(Replica(limits).apply(plan));
}

TEST(Replica, ALengthSetAheadOfItsPlanLeadsToTheSameDigest) {
    Replica replica(limits);
    ASSERT_TRUE(replica.apply(allocation()));
    replica.setLength(1, 7);
    StepPlan plan;
    plan.number = 2;
    plan.sequences = {{.kind = SequenceRecord::Kind::length, .slot = 1, .length = 7}};
    MetadataDigest digest;
    digest.addSequence(1, 3, 40, 7);
    digest.addEntry({.slot = 1, .logical = 0, .tier = Tier::device, .block = 5});
    plan.digest = digest.value();
    EXPECT_TRUE(replica.apply(plan));
    EXPECT_EQ(replica.length(1), 7);
}

}  // namespace
}  // namespace kvgrid
