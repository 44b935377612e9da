// Every rank's copy of the coordinator's metadata: which sequences there are, how long they are,
// and where each of their blocks lies. Host memory; changed by plans alone (and by advance, ahead
// of the plan that carries the same lengths).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <kvgrid/error.h>
#include <kvgrid/types.h>

#include "shard/step_plan.h"

namespace kvgrid {

class Replica {
public:
    struct Block {
        Tier tier = Tier::none;
        std::int32_t id = 0;
    };

    explicit Replica(const PlanLimits& limits);

    // internal: the plan does not fit this state, or leads to another digest than the
    // coordinator's.
    [[nodiscard]] Result<void> apply(const StepPlan& plan);
    // The committed length of a slot, ahead of its plan. The slot holds a sequence.
    void setLength(std::int32_t slot, std::int64_t length);

    // Which slot a sequence has; none for an unknown one.
    [[nodiscard]] std::optional<std::int32_t> slotOf(SequenceId sequence) const noexcept;
    [[nodiscard]] SequenceId sequenceOf(std::int32_t slot) const noexcept {
        return SequenceId{slots_[static_cast<std::size_t>(slot)].sequence};
    }
    [[nodiscard]] std::int64_t length(std::int32_t slot) const noexcept {
        return slots_[static_cast<std::size_t>(slot)].length;
    }
    // Of a logical block; tier none past the end and behind the window.
    [[nodiscard]] Block block(std::int32_t slot, int group, int context,
                              std::int32_t logical) const noexcept;
    [[nodiscard]] std::uint64_t digest() const noexcept { return digest_.value(); }

private:
    struct Slot {
        bool used = false;
        std::int32_t sequence = 0;
        std::int64_t max_length = 0;
        std::int64_t length = 0;
        std::vector<std::vector<Block>> tables;  // [group * contexts + context][logical]
    };

    [[nodiscard]] Result<void> applySequence(const SequenceRecord& record);
    void applyTable(const TableRecord& record);

    PlanLimits limits_;
    std::vector<Slot> slots_;
    MetadataDigest digest_;
};

}  // namespace kvgrid
