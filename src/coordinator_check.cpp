// Recomputes what the coordinator keeps incrementally.
#include <algorithm>
#include <tuple>

#include <fmt/format.h>

#include "shard/ownership.h"
#include "src/coordinator_state.h"

namespace kvgrid {

namespace {

using Problem = std::optional<std::string>;

// Every block has as many holders as the tables say: none or one.
Problem brokenTier(const BlockAllocator& blocks, const std::vector<std::int32_t>& holders) {
    std::int64_t used = 0;
    for (std::size_t block = 0; block < holders.size(); ++block) {
        if (holders[block] > 1) return fmt::format("block {} is owned twice", block);
        if (blocks.references(BlockId{static_cast<std::int32_t>(block)}) != holders[block]) {
            return fmt::format("block {}: not as many references as holders", block);
        }
        used += holders[block];
    }
    if (used + blocks.free() == blocks.total()) return std::nullopt;
    return fmt::format("{} used and {} free blocks of {}", used, blocks.free(), blocks.total());
}

}  // namespace

Problem Coordinator::State::brokenPool(const Pool& pool) const {
    std::vector<std::int32_t> device(static_cast<std::size_t>(pool.device.total()));
    std::vector<std::int32_t> host(static_cast<std::size_t>(pool.host.total()));
    std::int64_t pinned = 0;
    for (std::int32_t slot = 0; slot < limits.max_sequences; ++slot) {
        const Table& table = tableOf(pool, slot);
        for (auto logical = static_cast<std::size_t>(table.freed); logical < table.entries.size();
             ++logical) {
            const bool on_device = static_cast<std::int64_t>(logical) < table.device_end;
            const auto block = static_cast<std::size_t>(table.entries[logical].block);
            auto& holders = on_device ? device : host;
            if (block >= holders.size()) return fmt::format("block {} is out of range", block);
            ++holders[block];
        }
        if (sequenceAt(slot).in_step) pinned += table.onDevice();
    }
    if (auto problem = brokenTier(pool.device, device)) return "device tier: " + *problem;
    if (auto problem = brokenTier(pool.host, host)) return "host tier: " + *problem;
    if (pinned != pool.pinned) return fmt::format("{} blocks pinned, not {}", pinned, pool.pinned);
    if (std::any_of(pool.filled_by.begin(), pool.filled_by.end(),
                    [](std::int32_t copy) { return copy != no_copy; })) {
        return "a copy of an earlier step is remembered";
    }
    return std::nullopt;
}

Problem Coordinator::State::brokenWindows(std::int32_t slot) const {
    if (sequenceAt(slot).slides_at != slidingLength(slot)) return "the sliding length is stale";
    // What a committed step leaves behind goes with the next plan.
    const bool grew = std::any_of(grown.begin(), grown.end(),
                                  [slot](const SequenceRecord& r) { return r.slot == slot; });
    for (const Pool& pool : pools) {
        const std::int64_t behind = blocksBehind(pool, slot, sequenceAt(slot).length);
        const std::int64_t freed = tableOf(pool, slot).freed;
        if (freed > behind) return "a block that the window sees is freed";
        if (freed < behind && !grew) return "a block behind the window is held";
    }
    return std::nullopt;
}

Problem Coordinator::State::brokenSequence(std::int32_t slot) const {
    const Sequence& sequence = sequenceAt(slot);
    std::int64_t on_device = 0;
    std::int64_t on_host = 0;
    for (const Pool& pool : pools) {
        const Table& table = tableOf(pool, slot);
        if (table.freed < 0 || table.onDevice() < 0 || table.onHost() < 0) {
            return "freed, device and host blocks are not in order";
        }
        on_device += table.onDevice();
        on_host += table.onHost();
    }
    if (sequence.id == free_slot) {
        return on_device + on_host == 0 && !cold.contains(slot)
                   ? std::nullopt
                   : Problem("a free slot holds blocks");
    }
    if (sequence.id % limits.max_sequences != slot) return "the id belongs to another slot";
    if (auto problem = brokenWindows(slot)) return problem;
    if (on_device != sequence.device_blocks || on_host != sequence.host_blocks) {
        return fmt::format("{} device and {} host blocks are counted as {} and {}", on_device,
                           on_host, sequence.device_blocks, sequence.host_blocks);
    }
    if (sequence.length < 0 || sequence.length > sequence.max_length) return "length out of range";
    if (sequence.covered != coveredLength(slot)) return "covered length is stale";
    if (sequence.length > sequence.covered) return "committed tokens without blocks";
    if (sequence.in_step && on_host > 0) return "runs with blocks in the host tier";
    if (cold.contains(slot) != (on_device > 0 && !sequence.in_step)) {
        return "cold, or not, against the eviction order";
    }
    return std::nullopt;
}

Problem Coordinator::State::brokenSlots() const {
    std::vector<bool> seen(sequences.size());
    for (const std::int32_t slot : free_slots) {
        if (slot < 0 || slot >= limits.max_sequences) return "a free slot is out of range";
        if (seen[static_cast<std::size_t>(slot)]) return "a slot is free twice";
        if (sequenceAt(slot).id != free_slot) return "a used slot is free";
        seen[static_cast<std::size_t>(slot)] = true;
    }
    const auto used = std::count_if(sequences.begin(), sequences.end(),
                                    [](const Sequence& s) { return s.id != free_slot; });
    if (static_cast<std::size_t>(used) + free_slots.size() != sequences.size()) {
        return fmt::format("{} used and {} free slots of {}", used, free_slots.size(),
                           sequences.size());
    }
    const auto in_step = std::count_if(sequences.begin(), sequences.end(), [](const Sequence& s) {
        return s.id != free_slot && s.in_step;
    });
    if (static_cast<std::size_t>(in_step) != runs.size())
        return "runs and sequences in step differ";
    return std::nullopt;
}

Problem Coordinator::State::brokenOrder() const {
    std::vector<bool> seen(sequences.size());
    std::optional<std::tuple<bool, int>> last;
    for (std::int32_t slot = cold.coldest(); slot != EvictionOrder::none; slot = cold.after(slot)) {
        if (seen[static_cast<std::size_t>(slot)]) return "a sequence is cold twice";
        seen[static_cast<std::size_t>(slot)] = true;
        const Sequence& sequence = sequenceAt(slot);
        const std::tuple rank{!sequence.paused, sequence.priority};
        if (last && rank < *last) return "the eviction order is not sorted";
        last = rank;
    }
    for (std::int32_t slot = 0; slot < limits.max_sequences; ++slot) {
        if (cold.contains(slot) != seen[static_cast<std::size_t>(slot)]) {
            return "a cold sequence is not reached";
        }
    }
    return std::nullopt;
}

std::uint64_t Coordinator::State::digestFromScratch() const {
    MetadataDigest fresh;
    for (std::int32_t slot = 0; slot < limits.max_sequences; ++slot) {
        const Sequence& sequence = sequenceAt(slot);
        if (sequence.id == free_slot) continue;
        fresh.addSequence(slot, sequence.id, sequence.max_length, sequence.length);
        for (const Pool& pool : pools) {
            const Table& table = tableOf(pool, slot);
            for (auto logical = static_cast<std::size_t>(table.freed);
                 logical < table.entries.size(); ++logical) {
                const bool on_device = static_cast<std::int64_t>(logical) < table.device_end;
                fresh.addEntry({.slot = slot,
                                .group = static_cast<std::int16_t>(pool.group),
                                .context = static_cast<std::int16_t>(pool.context),
                                .logical = static_cast<std::int32_t>(logical),
                                .tier = on_device ? Tier::device : Tier::host,
                                .block = table.entries[logical].block});
            }
        }
    }
    return fresh.value();
}

Result<void> Coordinator::checkInvariants() const {
    const State& state = *state_;
    const auto broken = [](const std::string& what) {
        return failure(ErrorCode::internal, "coordinator: " + what);
    };
    for (const State::Pool& pool : state.pools) {
        if (auto problem = state.brokenPool(pool)) {
            return broken(
                fmt::format("layer group {}, context {}: {}", pool.group, pool.context, *problem));
        }
    }
    for (std::int32_t slot = 0; slot < state.limits.max_sequences; ++slot) {
        if (auto problem = state.brokenSequence(slot)) {
            return broken(fmt::format("slot {}: {}", slot, *problem));
        }
    }
    if (auto problem = state.brokenSlots()) return broken(*problem);
    if (auto problem = state.brokenOrder()) return broken(*problem);
    if (state.digest.value() != state.digestFromScratch()) return broken("the digest drifted");
    return {};
}

}  // namespace kvgrid
