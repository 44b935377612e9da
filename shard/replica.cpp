#include "shard/replica.h"

#include <string>

namespace kvgrid {

Replica::Replica(const PlanLimits& limits)
    : limits_(limits),
      slots_(static_cast<std::size_t>(limits.max_sequences)) {
    for (Slot& slot : slots_)
        slot.tables.resize(limits.pools());
}

Result<void> Replica::apply(const StepPlan& plan) {
    for (const SequenceRecord& record : plan.sequences) {
        if (Result<void> applied = applySequence(record); !applied) return applied;
    }
    for (const TableRecord& record : plan.tables)
        applyTable(record);
    for (const RunRecord& run : plan.runs) {
        const Slot& slot = slots_[static_cast<std::size_t>(run.slot)];
        if (!slot.used || slot.length != run.first_position) {
            return failure(ErrorCode::internal,
                           "step " + std::to_string(plan.number) + " runs slot " +
                               std::to_string(run.slot) + " from position " +
                               std::to_string(run.first_position) + ", here it is at " +
                               std::to_string(slot.length));
        }
    }
    if (digest() != plan.digest) {
        return failure(ErrorCode::internal,
                       "step " + std::to_string(plan.number) +
                           " leads to metadata that differs from the coordinator's");
    }
    return {};
}

Result<void> Replica::applySequence(const SequenceRecord& record) {
    Slot& slot = slots_[static_cast<std::size_t>(record.slot)];
    if (slot.used == (record.kind == SequenceRecord::Kind::allocate)) {
        return failure(ErrorCode::internal,
                       "slot " + std::to_string(record.slot) +
                           (slot.used ? " is allocated twice" : " is used but not allocated"));
    }
    switch (record.kind) {
    case SequenceRecord::Kind::allocate:
        slot.used = true;
        slot.sequence = record.sequence;
        slot.max_length = record.max_length;
        slot.length = 0;
        digest_.addSequence(record.slot, slot.sequence, slot.max_length, slot.length);
        break;
    case SequenceRecord::Kind::release:
        digest_.removeSequence(record.slot, slot.sequence, slot.max_length, slot.length);
        slot.used = false;
        break;
    case SequenceRecord::Kind::length:
        setLength(record.slot, record.length);
        break;
    }
    return {};
}

void Replica::applyTable(const TableRecord& record) {
    Slot& slot = slots_[static_cast<std::size_t>(record.slot)];
    std::vector<Block>& table = slot.tables[limits_.poolOf(record.group, record.context)];
    const auto logical = static_cast<std::size_t>(record.logical);
    if (logical >= table.size()) table.resize(logical + 1);
    TableRecord old = record;
    old.tier = table[logical].tier;
    old.block = table[logical].id;
    digest_.removeEntry(old);
    digest_.addEntry(record);
    table[logical] = {record.tier, record.block};
}

void Replica::setLength(std::int32_t slot_index, std::int64_t length) {
    Slot& slot = slots_[static_cast<std::size_t>(slot_index)];
    digest_.removeSequence(slot_index, slot.sequence, slot.max_length, slot.length);
    slot.length = length;
    digest_.addSequence(slot_index, slot.sequence, slot.max_length, slot.length);
}

std::optional<std::int32_t> Replica::slotOf(SequenceId sequence) const noexcept {
    const auto id = static_cast<std::int32_t>(sequence);
    if (id < 0 || slots_.empty()) return std::nullopt;
    const std::int32_t slot = id % limits_.max_sequences;
    const Slot& found = slots_[static_cast<std::size_t>(slot)];
    if (!found.used || found.sequence != id) return std::nullopt;
    return slot;
}

Replica::Block Replica::block(std::int32_t slot, int group, int context,
                              std::int32_t logical) const noexcept {
    const auto& tables = slots_[static_cast<std::size_t>(slot)].tables;
    const std::vector<Block>& table = tables[limits_.poolOf(group, context)];
    return static_cast<std::size_t>(logical) < table.size()
               ? table[static_cast<std::size_t>(logical)]
               : Block{};
}

}  // namespace kvgrid
