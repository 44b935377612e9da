// Random requests, delays and failures, in lockstep with everything of coordinator_rig.h.
#include <cstdint>
#include <iostream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "shard/ownership.h"
#include "tests/src/coordinator_rig.h"

namespace kvgrid {
namespace {

using Problem = CoordinatorRig::Problem;

// What to do next, before it is known what there is: an index is taken modulo what there is then.
struct Op {
    std::uint16_t what;
    std::uint16_t which;
    std::uint32_t amount;
};

constexpr std::int64_t wild_counts[] = {0,
                                        -1,
                                        std::numeric_limits<std::int64_t>::min(),
                                        std::numeric_limits<std::int64_t>::max(),
                                        std::int64_t{1} << 31,
                                        std::int64_t{1} << 32};

// Turns ops into requests, steps and commits.
class Driver {
public:
    explicit Driver(const CoordinatorConfig& config) : config_(config), rig_(config) {}

    [[nodiscard]] Problem apply(const Op& op, bool check = true) {
        const int what = op.what % 64;
        if (what < 18) return stepAndCommit(op, check);
        if (what < 24) {
            requests_.allocate(lengthOf(op), static_cast<int>(op.amount >> 24) % 3 - 1);
        } else if (what < 29) {
            requests_.release(sequenceOf(op));
        } else if (what < 31) {
            requests_.pause(sequenceOf(op));
        } else if (what < 35) {
            requests_.resume(sequenceOf(op));
        } else {
            runOrRelease(op);
        }
        return std::nullopt;
    }

    [[nodiscard]] const CoordinatorRig& rig() const { return rig_; }

private:
    Problem stepAndCommit(const Op& op, bool check) {
        const Requests requests = std::exchange(requests_, {});
        if (auto problem = rig_.step(requests.all(), check)) return problem;
        std::vector<std::int64_t> accepted;
        for (const RunRecord& run : rig_.plan().runs)
            accepted.push_back(run.rows);
        switch (op.which % 16) {
        case 0:  // dropped
            return std::nullopt;
        case 1:  // misuse: another count of runs, or a count out of range
            if (accepted.empty() || op.amount % 2 == 0) {
                accepted.push_back(0);
            } else {
                accepted[op.amount % accepted.size()] += op.amount % 3 == 0 ? 1 : -1000000;
            }
            return rig_.advance(accepted, check);
        case 2:  // committed twice
            if (auto problem = rig_.advance(accepted, check)) return problem;
            return rig_.advance(accepted, check);
        case 3:
        case 4:
        case 5:
        case 6: {
            std::minstd_rand random(op.amount);
            for (std::int64_t& count : accepted) {
                count = static_cast<std::int64_t>(random()) % (count + 1);
            }
            return rig_.advance(accepted, check);
        }
        default:
            return rig_.advance(accepted, check);
        }
    }

    // A full one is mostly released: it could only sit there.
    void runOrRelease(const Op& op) {
        const SequenceId sequence = sequenceOf(op);
        const auto found = rig_.model().sequences().find(static_cast<std::int32_t>(sequence));
        const bool full = found != rig_.model().sequences().end() &&
                          found->second.length == found->second.max_length;
        if (full && op.amount % 8 != 0) {
            requests_.release(sequence);
        } else {
            requests_.run(sequence, tokensOf(op));
        }
    }

    [[nodiscard]] SequenceId sequenceOf(const Op& op) const {
        const auto& live = rig_.model().sequences();
        const auto& released = rig_.released();
        if (op.which % 64 == 0 || live.empty()) {
            return SequenceId{static_cast<std::int32_t>(op.amount * 2654435761U)};
        }
        if (op.which % 64 == 1 && !released.empty()) {
            return SequenceId{released[op.amount % released.size()]};
        }
        return SequenceId{std::next(live.begin(), (op.which / 64) % live.size())->first};
    }

    [[nodiscard]] std::int64_t lengthOf(const Op& op) const {
        const std::int64_t most = config_.limits.max_sequence_length;
        if (op.which % 32 == 0) return wild_counts[op.amount % std::size(wild_counts)];
        if (op.which % 32 == 1) return most + 1;
        if (op.which % 32 < 12) return most;
        return 1 + op.amount % most;
    }

    [[nodiscard]] std::int64_t tokensOf(const Op& op) const {
        const std::int64_t most = config_.limits.max_step_tokens;
        if (op.amount % 64 == 0) return wild_counts[op.which % std::size(wild_counts)];
        if (op.amount % 64 == 1) return most + 1;
        if (op.amount % 64 < 40) return 1 + (op.amount / 64) % most;
        return 1 + (op.amount / 64) % std::max<std::int64_t>(1, most / 8);
    }

    CoordinatorConfig config_;
    CoordinatorRig rig_;
    Requests requests_;
};

struct Setting {
    const char* name;
    int sequences;
    std::int64_t length;  // tokens
    std::int64_t step;    // tokens
    int contexts;
    std::vector<std::int64_t> block_sizes;
    std::vector<std::int64_t> windows;
    std::int64_t device_blocks;  // of each layer group
    std::int64_t host_blocks;
    std::int64_t operations;  // plans and commits
};

CoordinatorConfig configOf(const Setting& setting) {
    CoordinatorConfig config;
    config.limits.max_sequences = setting.sequences;
    config.limits.max_sequence_length = setting.length;
    config.limits.max_step_tokens = setting.step;
    config.limits.contexts = setting.contexts;
    for (const std::int64_t size : setting.block_sizes) {
        const std::int64_t owned = mostOwnedTokens(setting.length, setting.contexts);
        config.limits.groups.push_back({.blocks_per_sequence = (owned + size - 1) / size,
                                        .device_blocks = setting.device_blocks,
                                        .host_blocks = setting.host_blocks});
    }
    config.block_sizes = setting.block_sizes;
    config.windows = setting.windows;
    return config;
}

const std::vector<Setting>& settings() {
    static const std::vector<Setting> all{
        {"tiny tiers", 5, 16, 12, 1, {4}, {0}, 6, 3, 400000},
        {"one spare block", 4, 12, 12, 1, {2}, {0}, 6, 6, 100000},
        {"no host tier", 5, 16, 8, 1, {4}, {0}, 7, 0, 100000},
        {"block size 1", 4, 6, 6, 1, {1}, {0}, 8, 6, 100000},
        {"one block a sequence", 6, 64, 64, 1, {64}, {0}, 3, 2, 100000},
        {"two layer groups", 4, 16, 12, 1, {4, 8}, {0, 0}, 5, 3, 100000},
        {"two contexts", 4, 2048, 1024, 2, {128}, {0}, 10, 5, 60000},
        {"four contexts, two groups", 3, 4096, 3000, 4, {256, 64}, {0, 0}, 18, 9, 40000},
        {"longer than the tier", 4, 64, 16, 1, {4}, {0}, 8, 4, 100000},
        {"a window", 5, 64, 8, 1, {4}, {6}, 7, 4, 100000},
        {"a window, steps beyond the tier", 4, 64, 32, 1, {4}, {6}, 5, 4, 40000},
        {"a window of one", 4, 24, 6, 1, {1}, {1}, 9, 5, 60000},
        {"a window as long as the sequence", 4, 16, 12, 1, {4}, {16}, 6, 3, 60000},
        {"two windows and none", 4, 32, 12, 1, {2, 4, 8}, {5, 0, 16}, 9, 5, 100000},
        {"two contexts, a window", 4, 2048, 600, 2, {128, 64}, {0, 300}, 12, 6, 40000},
    };
    return all;
}

std::string describe(const Setting& setting, std::uint64_t seed, std::int64_t op,
                     const std::string& problem) {
    return std::string(setting.name) + ", seed " + std::to_string(seed) + ", op " +
           std::to_string(op) + ": " + problem;
}

void add(CoordinatorRig::Coverage& sum, const CoordinatorRig::Coverage& more) {
    sum.plans += more.plans;
    sum.advances += more.advances;
    sum.requests += more.requests;
    sum.done += more.done;
    sum.wait += more.wait;
    sum.never += more.never;
    sum.offloaded += more.offloaded;
    sum.restored += more.restored;
    sum.left_behind += more.left_behind;
    sum.alternating_plans += more.alternating_plans;
    sum.cancelled_copies += more.cancelled_copies;
    sum.partial_accepts += more.partial_accepts;
    sum.dropped_steps += more.dropped_steps;
}

TEST(CoordinatorProperty, AMillionRandomOperationsKeepEveryInvariant) {
    CoordinatorRig::Coverage sum;
    std::uint64_t seed = 2024;
    for (const Setting& setting : settings()) {
        CoordinatorRig::Coverage of_setting;
        // Restarts now and then: some states are left for good, as when all is full of the paused.
        while (of_setting.plans + of_setting.advances < setting.operations) {
            std::mt19937_64 random(++seed);
            Driver driver(configOf(setting));
            for (int op = 0; op < 20000; ++op) {
                const std::uint64_t bits = random();
                const auto problem = driver.apply({static_cast<std::uint16_t>(bits >> 48),
                                                   static_cast<std::uint16_t>(bits >> 32),
                                                   static_cast<std::uint32_t>(bits)});
                ASSERT_FALSE(problem) << describe(setting, seed, op, *problem);
            }
            add(of_setting, driver.rig().coverage());
        }
        std::cout << setting.name << ": " << of_setting.plans << " plans, " << of_setting.advances
                  << " commits; requests: " << of_setting.done << " done, " << of_setting.wait
                  << " wait, " << of_setting.never << " never; blocks: " << of_setting.offloaded
                  << " offloaded, " << of_setting.restored << " restored, "
                  << of_setting.left_behind << " left behind; " << of_setting.alternating_plans
                  << " alternating plans, " << of_setting.cancelled_copies << " copies cancelled\n";
        add(sum, of_setting);
    }
    EXPECT_GE(sum.plans + sum.advances, 1'000'000);
    EXPECT_GE(sum.requests, 1'000'000);
    // The corners were visited, not just passed by.
    EXPECT_GE(sum.wait, 50'000);
    EXPECT_GE(sum.never, 50'000);
    EXPECT_GE(sum.offloaded, 50'000);
    EXPECT_GE(sum.restored, 20'000);
    EXPECT_GE(sum.left_behind, 20'000);
    EXPECT_GE(sum.alternating_plans, 1'000);
    EXPECT_GE(sum.cancelled_copies, 500);
    EXPECT_GE(sum.partial_accepts, 10'000);
    EXPECT_GE(sum.dropped_steps, 10'000);
}

// Larger tiers; the whole state is gone through once in 64 steps.
TEST(CoordinatorProperty, LargePools) {
    const Setting setting{"large", 256, 1024, 512, 1, {16, 16}, {0, 100}, 3000, 1500, 0};
    std::mt19937_64 random(5);
    Driver driver(configOf(setting));
    for (int op = 0; op < 60000; ++op) {
        const std::uint64_t bits = random();
        const auto problem =
            driver.apply({static_cast<std::uint16_t>(bits >> 48),
                          static_cast<std::uint16_t>(bits >> 32), static_cast<std::uint32_t>(bits)},
                         op % 64 == 0);
        ASSERT_FALSE(problem) << describe(setting, 5, op, *problem);
    }
    EXPECT_GT(driver.rig().coverage().offloaded, 0);
}

// The same, with a short counterexample when there is one.
RC_GTEST_PROP(CoordinatorProperty, NoShortSequenceOfOperationsBreaksIt, ())
{
    const Setting& setting = *rc::gen::elementOf(settings());
    using Bits = std::tuple<std::uint16_t, std::uint16_t, std::uint32_t>;
    const auto ops =
        *rc::gen::scale(20.0, rc::gen::container<std::vector<Bits>>(rc::gen::arbitrary<Bits>()));
    Driver driver(configOf(setting));
    for (const auto& [what, which, amount] : ops) {
        const auto problem = driver.apply({what, which, amount});
        if (problem) RC_FAIL(std::string(setting.name) + ": " + *problem);
    }
}

}  // namespace
}  // namespace kvgrid
