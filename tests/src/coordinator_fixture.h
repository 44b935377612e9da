// A coordinator with the checks of the rig around it, for tests by example.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/coordinator.h"
#include "tests/src/coordinator_rig.h"

namespace kvgrid {

// Blocks of 4 tokens, sequences of up to 16, 4 of them.
inline CoordinatorConfig smallConfig(std::int64_t device_blocks, std::int64_t host_blocks) {
    CoordinatorConfig config;
    config.limits = {.max_sequences = 4,
                     .max_sequence_length = 16,
                     .max_step_tokens = 20,
                     .contexts = 1,
                     .groups = {{.blocks_per_sequence = 4,
                                 .device_blocks = device_blocks,
                                 .host_blocks = host_blocks}}};
    config.block_sizes = {4};
    config.windows = {0};
    return config;
}

class CoordinatorTest : public testing::Test {
protected:
    void start(const CoordinatorConfig& config) { rig_.emplace(config); }
    void start(std::int64_t device_blocks, std::int64_t host_blocks) {
        start(smallConfig(device_blocks, host_blocks));
    }

    // Answers come with all the checks of the rig.
    std::vector<Answer> ask(const Requests& requests) {
        const auto problem = rig_->step(requests.all());
        EXPECT_FALSE(problem) << *problem;
        std::vector<Answer> answers;
        for (const AnswerRecord& record : plan().answers) {
            answers.push_back({static_cast<Answer::Status>(record.status),
                               SequenceId{record.sequence},
                               plan().text.substr(record.why_offset, record.why_bytes)});
        }
        return answers;
    }

    SequenceId allocate(std::int64_t max_length = 16, int priority = 0) {
        const Answer answer = ask(Requests().allocate(max_length, priority)).at(0);
        EXPECT_EQ(answer.status, Answer::Status::done) << answer.why;
        return answer.sequence;
    }

    void commit() {
        std::vector<std::int64_t> all;
        for (const RunRecord& run : plan().runs)
            all.push_back(run.rows);
        commit(all);
    }
    void commit(const std::vector<std::int64_t>& accepted) {
        const auto problem = rig_->advance(accepted);
        EXPECT_FALSE(problem) << *problem;
    }

    // Runs and commits.
    void grow(SequenceId sequence, std::int64_t tokens) {
        const Answer answer = ask(Requests().run(sequence, tokens)).at(0);
        ASSERT_EQ(answer.status, Answer::Status::done) << answer.why;
        commit();
    }

    void expectOnly(const Requests& requests, Answer::Status status, const std::string& why) {
        const std::uint64_t before = coordinator().digest();
        const Answer answer = ask(requests).at(0);
        EXPECT_EQ(answer.status, status) << answer.why;
        EXPECT_THAT(answer.why, testing::HasSubstr(why));
        EXPECT_EQ(coordinator().digest(), before);
        EXPECT_THAT(plan().tables, testing::IsEmpty());
        EXPECT_THAT(plan().copies, testing::IsEmpty());
        EXPECT_THAT(plan().runs, testing::IsEmpty());
    }
    void expectNever(const Requests& requests, const std::string& why) {
        expectOnly(requests, Answer::Status::never, why);
    }
    void expectWait(const Requests& requests, const std::string& why) {
        expectOnly(requests, Answer::Status::wait, why);
    }

    [[nodiscard]] const Coordinator& coordinator() const { return rig_->coordinator(); }
    [[nodiscard]] const StepPlan& plan() const { return rig_->plan(); }
    [[nodiscard]] std::int64_t freeDevice() const {
        return coordinator().freeBlocks(Tier::device, 0, 0);
    }
    [[nodiscard]] std::int64_t freeHost() const {
        return coordinator().freeBlocks(Tier::host, 0, 0);
    }
    // Sequences whose blocks went to the host in the last plan, in order.
    [[nodiscard]] std::vector<std::int32_t> victims() const {
        std::vector<std::int32_t> slots;
        for (const TableRecord& record : plan().tables) {
            if (record.tier == Tier::host) slots.push_back(record.slot);
        }
        return slots;
    }

    std::optional<CoordinatorRig> rig_;
};

inline std::int32_t slotOf(SequenceId sequence) {
    return static_cast<std::int32_t>(sequence) % 4;
}

}  // namespace kvgrid
