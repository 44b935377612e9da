// Everything that a coordinator's plans are held against, driven in lockstep:
//   the model          says what each request must be answered, and how many blocks lie where
//   a twin coordinator gets the requests that were met alone, and must make the same plans: so the
//                      others changed nothing
//   a replica          gets each plan as bytes, as a rank does, and must reach its digest
//   tables             follow the records one by one: no block owned twice, digest from scratch
//   a memory           executes the copies, and must hold the right tokens whenever they are read
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <kvgrid/cache.h>

#include "shard/replica.h"
#include "shard/step_plan.h"
#include "src/coordinator.h"
#include "tests/src/coordinator_model.h"

namespace kvgrid {

// One tag a block. What a block's tokens are is said by whose they are and how many were written.
class BlockMemory {
public:
    explicit BlockMemory(const CoordinatorConfig& config);

    // Copies that may be executed at once are: all are read, then all are written.
    void execute(std::span<const CopyRecord> copies);
    // Writes tokens [first, end) of a block of a sequence. False when those before `first` are not
    // there.
    [[nodiscard]] bool write(int pool, std::int32_t block, std::int32_t id, std::int64_t logical,
                             std::int64_t first, std::int64_t end);
    // Does the block hold tokens [0, end) of this logical block?
    [[nodiscard]] bool holds(int pool, Tier tier, std::int32_t block, std::int32_t id,
                             std::int64_t logical, std::int64_t end) const;

private:
    struct Tag {
        std::int32_t id = -1;
        std::int64_t logical = -1;
        std::int64_t tokens = 0;
    };
    int contexts_;
    std::vector<std::vector<Tag>> device_;  // [pool][block]
    std::vector<std::vector<Tag>> host_;
};

class CoordinatorRig {
public:
    using Problem = std::optional<std::string>;

    struct Coverage {
        std::int64_t plans = 0, advances = 0, requests = 0;
        std::int64_t done = 0, wait = 0, never = 0;
        std::int64_t offloaded = 0, restored = 0;
        std::int64_t left_behind = 0;        // blocks that a window has left
        std::int64_t alternating_plans = 0;  // more than two runs of copies in one pool
        std::int64_t cancelled_copies = 0;  // offloads that a release in the same step made useless
        std::int64_t partial_accepts = 0, dropped_steps = 0;
    };

    explicit CoordinatorRig(const CoordinatorConfig& config);

    // Both: what went wrong, if anything. `check` goes through the whole state.
    [[nodiscard]] Problem step(std::span<const Request> requests, bool check = true);
    [[nodiscard]] Problem advance(std::span<const std::int64_t> accepted, bool check = true);

    [[nodiscard]] const CoordinatorModel& model() const { return model_; }
    [[nodiscard]] const Coordinator& coordinator() const { return coordinator_; }
    [[nodiscard]] const StepPlan& plan() const { return plan_; }
    [[nodiscard]] const Coverage& coverage() const { return coverage_; }
    [[nodiscard]] const std::vector<std::int32_t>& released() const { return released_; }

private:
    struct Place {
        Tier tier = Tier::none;
        std::int32_t block = 0;
    };

    [[nodiscard]] Problem compareAnswers(std::span<const Request> requests);
    [[nodiscard]] Problem compareTwin(std::span<const Request> requests);
    [[nodiscard]] Problem applyToReplica();
    [[nodiscard]] Problem runInMemory();
    [[nodiscard]] Problem checkAll() const;
    [[nodiscard]] Problem checkTables() const;
    [[nodiscard]] Problem checkMemory(std::int32_t id) const;
    [[nodiscard]] std::int64_t firstSeenBlock(std::int32_t slot, int pool,
                                              std::int64_t length) const;
    [[nodiscard]] std::uint64_t digestFromScratch() const;
    [[nodiscard]] std::size_t placeIndex(std::int32_t slot, int pool, std::int64_t logical) const;
    void countCopies();
    void noteOffloads(const std::vector<std::int32_t>& ids_before);
    [[nodiscard]] std::vector<std::int32_t> idsBySlot() const;  // -1: free

    CoordinatorConfig config_;
    Coordinator coordinator_;
    Coordinator twin_;
    CoordinatorModel model_;
    Replica replica_;
    BlockMemory memory_;
    std::int64_t most_logical_;  // blocks a sequence and pool
    std::vector<Place> places_;  // [slot][pool][logical]
    std::vector<std::int32_t> released_;
    std::set<std::tuple<std::int32_t, int, std::int32_t>> ever_offloaded_;  // (id, pool, logical)
    StepPlan plan_;
    Coverage coverage_;
    bool open_ = false;
};

}  // namespace kvgrid
