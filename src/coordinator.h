// Rank 0's mind: requests in, plan out. A pure state machine without I/O, MPI or device, so that
// tests drive it with millions of random requests.
//
// A sequence takes blocks when a run first needs them. In a layer group with a window it gives them
// back, at the plan after the step that was committed, when no token to come sees them. A run needs
// all blocks of its sequence in the device tier; when they do not fit, cold blocks (of sequences
// outside the step; paused ones first, then lower priority, then least recently run) are offloaded
// to the host tier, from the sequence's end. A request that cannot be met changes nothing and is
// answered `wait` (others are in the way) or `never` (misuse, or larger than the tiers). The cost
// of a plan grows with the requests and with what changes, not with the pool.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <kvgrid/cache.h>
#include <kvgrid/error.h>

#include "shard/step_plan.h"

namespace kvgrid {

struct CoordinatorConfig {
    PlanLimits limits;
    std::vector<std::int64_t> block_sizes;  // tokens of a block, by layer group
    // Tokens that a query sees, by layer group; 0: all. At most max_sequence_length.
    std::vector<std::int64_t> windows;
};

class Coordinator {
public:
    // Throws invalid_argument when the limits contradict each other.
    explicit Coordinator(const CoordinatorConfig& config);
    Coordinator(Coordinator&&) noexcept;
    Coordinator& operator=(Coordinator&&) noexcept;
    ~Coordinator();

    // Answers every request in call order and says what all ranks must do. Drops a step that was
    // not advanced: the lengths stay.
    [[nodiscard]] StepPlan plan(std::span<const Request> requests);

    // Commits the runs of the last plan, each by accepted[i] of its tokens (0 <= accepted[i] <=
    // rows). The new lengths travel in the next plan. invalid_argument, and nothing changes:
    // another count of runs, a count out of range, no step to commit, or one committed already.
    [[nodiscard]] Result<void> advance(std::span<const std::int64_t> accepted);

    [[nodiscard]] Result<std::int64_t> length(SequenceId sequence) const;
    [[nodiscard]] std::int64_t freeBlocks(Tier tier, int group, int context) const;
    [[nodiscard]] std::int64_t offloadedBlocks() const noexcept;  // copies so far
    [[nodiscard]] std::int64_t restoredBlocks() const noexcept;
    [[nodiscard]] std::int64_t distinctOffloadedBlocks()
        const noexcept;  // (sequence, group, context, logical) ever offloaded
    [[nodiscard]] std::uint64_t digest() const noexcept;

    // Recomputes everything that is kept incrementally and compares: block states sum to the
    // totals, no block owned twice, tables agree with reference counts, LRU holds each cold
    // sequence once, the digest. internal: what broke. For tests; costs as much as the whole state.
    [[nodiscard]] Result<void> checkInvariants() const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace kvgrid
