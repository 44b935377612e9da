// How the coordinator takes, moves and frees blocks.
#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "shard/ownership.h"
#include "src/coordinator_state.h"

namespace kvgrid {

// ---- Is there room? ----

Coordinator::State::Demand Coordinator::State::demandOf(const Pool& pool, std::int32_t slot,
                                                        std::int64_t length) const {
    const Table& table = tableOf(pool, slot);
    const auto held = static_cast<std::int64_t>(table.entries.size());
    const std::int64_t needed =
        blocksFor(pool, ownedTokens(length, slot, pool.context, limits.contexts));
    Demand demand;
    demand.fresh = std::max<std::int64_t>(0, needed - held);
    demand.restore = table.onHost();
    demand.offload = std::max<std::int64_t>(0, demand.fresh + demand.restore - pool.device.free());
    return demand;
}

// The copies below alternate between the tiers as room comes up. Their blocks in transit need one
// free block in one tier; both tiers must hold what they end up with.
std::optional<std::string> Coordinator::State::shortage(const Pool& pool, std::int32_t slot,
                                                        const Demand& demand) const {
    if (demand.offload == 0) return std::nullopt;
    const std::int64_t used = pool.device.total() - pool.device.free();
    const std::int64_t cold_blocks = used - pool.pinned - tableOf(pool, slot).onDevice();
    const std::int64_t host_room = pool.host.free() + demand.restore;
    const bool stuck = demand.restore > 0 && pool.device.free() + pool.host.free() == 0;
    if (demand.offload <= cold_blocks && demand.offload <= host_room && !stuck) return std::nullopt;
    return fmt::format(
        "sequence {}: needs {} more device blocks (layer group {}, context {}): {} are free and {} "
        "cold, with {} free in the host tier",
        sequenceAt(slot).id, demand.fresh + demand.restore, pool.group, pool.context,
        pool.device.free(), cold_blocks, pool.host.free());
}

std::optional<std::string> Coordinator::State::neverFits(std::int32_t slot,
                                                         std::int64_t length) const {
    const Sequence& sequence = sequenceAt(slot);
    for (const Pool& pool : pools) {
        const std::int64_t blocks =
            blocksFor(pool, ownedTokens(length, slot, pool.context, limits.contexts)) -
            tableOf(pool, slot).freed;
        if (blocks <= pool.device.total()) continue;
        return fmt::format(
            "sequence {}: {} tokens and their window need {} blocks (layer group {}), the device "
            "tier has {}",
            sequence.id, length - sequence.length, blocks, pool.group, pool.device.total());
    }
    return std::nullopt;
}

std::optional<std::string> Coordinator::State::bringIn(std::int32_t slot, std::int64_t length) {
    for (const Pool& pool : pools) {
        Demand& demand = demands[indexOf(pool)];
        demand = demandOf(pool, slot, length);
        if (auto why = shortage(pool, slot, demand)) return why;
    }
    cold.remove(slot);  // it must not be its own victim
    for (Pool& pool : pools)
        fetch(pool, slot, demands[indexOf(pool)]);
    sequenceAt(slot).covered = coveredLength(slot);
    return std::nullopt;
}

std::int64_t Coordinator::State::coveredLength(std::int32_t slot) const {
    std::int64_t covered = limits.max_sequence_length;
    for (const Pool& pool : pools) {
        const auto blocks = static_cast<std::int64_t>(tableOf(pool, slot).entries.size());
        const GlobalPosition first_outside =
            toGlobal(LocalPosition{blocks * pool.block_size}, slot, pool.context, limits.contexts);
        covered = std::min(covered, static_cast<std::int64_t>(first_outside));
    }
    return covered;
}

std::int64_t Coordinator::State::slidingLength(std::int32_t slot) const {
    std::int64_t length = std::numeric_limits<std::int64_t>::max();
    for (const Pool& pool : pools) {
        if (pool.window == 0) continue;
        const std::int64_t tokens = (tableOf(pool, slot).freed + 1) * pool.block_size;
        const GlobalPosition last =
            toGlobal(LocalPosition{tokens - 1}, slot, pool.context, limits.contexts);
        length = std::min(length, static_cast<std::int64_t>(last) + pool.window);
    }
    return length;
}

std::int64_t Coordinator::State::blocksBehind(const Pool& pool, std::int32_t slot,
                                              std::int64_t length) const {
    // The next token, at position `length`, sees those beyond length - window.
    if (pool.window == 0 || length < pool.window) return 0;
    return ownedTokens(length - pool.window + 1, slot, pool.context, limits.contexts) /
           pool.block_size;
}

std::int64_t Coordinator::State::mostBlocksHeld(const Pool& pool, std::int64_t max_length) const {
    const std::int64_t all = blocksFor(pool, mostOwnedTokens(max_length, limits.contexts));
    if (pool.window == 0) return all;
    return std::min(all, mostBlocksOfWindow(pool.window, 1, pool.block_size, limits.contexts));
}

// ---- Moving, after it is known that there is room ----

void Coordinator::State::fetch(Pool& pool, std::int32_t slot, Demand demand) {
    std::int32_t victim = cold.coldest();
    while (demand.offload > 0 || demand.restore > 0) {
        const std::int64_t before = demand.offload + demand.restore;
        while (demand.offload > 0 && pool.host.free() > 0) {
            const std::int32_t next = cold.after(victim);
            if (tableOf(pool, victim).onDevice() > 0) {
                offloadBlock(pool, victim);
                --demand.offload;
            }
            if (tableOf(pool, victim).onDevice() > 0) continue;
            if (sequenceAt(victim).device_blocks == 0) cold.remove(victim);
            victim = next;
        }
        while (demand.restore > 0 && pool.device.free() > 0) {
            restoreBlock(pool, slot);
            --demand.restore;
        }
        if (demand.offload + demand.restore == before) {
            throw Error(ErrorCode::internal, "coordinator: no block can move");
        }
    }
    while (demand.fresh > 0) {
        addBlock(pool, slot);
        --demand.fresh;
    }
}

void Coordinator::State::addBlock(Pool& pool, std::int32_t slot) {
    Table& table = tableOf(pool, slot);
    const auto block = static_cast<std::int32_t>(pool.device.allocate().value());
    table.entries.push_back({.block = block, .ever_offloaded = false});
    ++table.device_end;
    ++sequenceAt(slot).device_blocks;
    recordEntry(pool, slot, table.device_end - 1, {}, {.tier = Tier::device, .block = block});
}

void Coordinator::State::restoreBlock(Pool& pool, std::int32_t slot) {
    Table& table = tableOf(pool, slot);
    Sequence& sequence = sequenceAt(slot);
    const std::int64_t logical = table.device_end;
    Table::Entry& entry = table.entries[static_cast<std::size_t>(logical)];
    const std::int32_t from = entry.block;
    const auto to = static_cast<std::int32_t>(pool.device.allocate().value());
    plan.copies.push_back({.direction = CopyRecord::Direction::restore,
                           .group = static_cast<std::int16_t>(pool.group),
                           .context = static_cast<std::int16_t>(pool.context),
                           .device_block = to,
                           .host_block = from});
    notes.push_back({.first = false});
    (void)pool.host.release(BlockId{from});
    recordEntry(pool, slot, logical, {.tier = Tier::host, .block = from},
                {.tier = Tier::device, .block = to});
    entry.block = to;
    ++table.device_end;
    ++sequence.device_blocks;
    --sequence.host_blocks;
    ++restored;
}

void Coordinator::State::offloadBlock(Pool& pool, std::int32_t slot) {
    Table& table = tableOf(pool, slot);
    Sequence& sequence = sequenceAt(slot);
    const std::int64_t logical = table.device_end - 1;
    Table::Entry& entry = table.entries[static_cast<std::size_t>(logical)];
    const std::int32_t from = entry.block;
    const auto to = static_cast<std::int32_t>(pool.host.allocate().value());
    pool.filled_by[static_cast<std::size_t>(to)] = static_cast<std::int32_t>(plan.copies.size());
    plan.copies.push_back({.direction = CopyRecord::Direction::offload,
                           .group = static_cast<std::int16_t>(pool.group),
                           .context = static_cast<std::int16_t>(pool.context),
                           .device_block = from,
                           .host_block = to});
    notes.push_back({.first = !entry.ever_offloaded});
    if (!entry.ever_offloaded) ++distinct_offloaded;
    entry.ever_offloaded = true;
    recordEntry(pool, slot, logical, {.tier = Tier::device, .block = from},
                {.tier = Tier::host, .block = to});
    (void)pool.device.release(BlockId{from});
    entry.block = to;
    --table.device_end;
    --sequence.device_blocks;
    ++sequence.host_blocks;
    ++offloaded;
}

void Coordinator::State::dropBlocks(std::int32_t slot) {
    for (Pool& pool : pools) {
        Table& table = tableOf(pool, slot);
        const auto end = static_cast<std::int64_t>(table.entries.size());
        for (std::int64_t logical = table.freed; logical < end; ++logical) {
            const std::int32_t block = table.entries[static_cast<std::size_t>(logical)].block;
            const bool on_device = logical < table.device_end;
            const Place place{.tier = on_device ? Tier::device : Tier::host, .block = block};
            recordEntry(pool, slot, logical, place, {});
            if (on_device) {
                (void)pool.device.release(BlockId{block});
                continue;
            }
            (void)pool.host.release(BlockId{block});
            cancelCopy(pool.filled_by[static_cast<std::size_t>(block)]);
        }
        table.entries.clear();
        table.freed = 0;
        table.device_end = 0;
    }
}

void Coordinator::State::slideWindows(std::int32_t slot) {
    Sequence& sequence = sequenceAt(slot);
    for (Pool& pool : pools) {
        Table& table = tableOf(pool, slot);
        const std::int64_t behind = blocksBehind(pool, slot, sequence.length);
        for (; table.freed < behind; ++table.freed) {
            const std::int32_t block = table.entries[static_cast<std::size_t>(table.freed)].block;
            recordEntry(pool, slot, table.freed, {.tier = Tier::device, .block = block}, {});
            (void)pool.device.release(BlockId{block});
            --sequence.device_blocks;
        }
    }
    sequence.slides_at = slidingLength(slot);
}

void Coordinator::State::recordEntry(const Pool& pool, std::int32_t slot, std::int64_t logical,
                                     Place from, Place to) {
    TableRecord record{.slot = slot,
                       .group = static_cast<std::int16_t>(pool.group),
                       .context = static_cast<std::int16_t>(pool.context),
                       .logical = static_cast<std::int32_t>(logical),
                       .tier = from.tier,
                       .block = from.block};
    digest.removeEntry(record);
    record.tier = to.tier;
    record.block = to.block;
    digest.addEntry(record);
    plan.tables.push_back(record);
}

// ---- Copies that came to nothing ----

// The sequence was offloaded and then released in the same step. Its host block may be taken again
// at once, and would be filled twice in one run of copies.
void Coordinator::State::cancelCopy(std::int32_t copy) {
    if (copy == no_copy) return;
    CopyNote& note = notes[static_cast<std::size_t>(copy)];
    note.cancelled = true;
    --offloaded;
    if (note.first) --distinct_offloaded;
}

void Coordinator::State::dropCancelledCopies() {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < plan.copies.size(); ++i) {
        if (notes[i].cancelled) continue;
        plan.copies[kept] = plan.copies[i];
        ++kept;
    }
    plan.copies.resize(kept);
}

}  // namespace kvgrid
