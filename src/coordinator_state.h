// What the coordinator knows. coordinator.cpp answers requests, coordinator_blocks.cpp moves
// blocks, coordinator_check.cpp recomputes what is kept incrementally.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/block_allocator.h"
#include "src/coordinator.h"
#include "src/eviction.h"

namespace kvgrid {

struct Coordinator::State {
    // The blocks of one layer group and context coordinate.
    struct Pool {
        int group;
        int context;
        std::int64_t block_size;  // tokens
        std::int64_t window;      // tokens; 0: none
        BlockAllocator device;
        BlockAllocator host;
        std::int64_t pinned = 0;  // device blocks of the sequences of this step
        // [host block] The copy of this step that fills it, or no_copy.
        std::vector<std::int32_t> filled_by;
    };
    static constexpr std::int32_t no_copy = -1;

    // What one sequence has in one pool: no blocks behind the window, then blocks in the device
    // tier, then blocks in the host tier, as they are offloaded from the end and restored all
    // together.
    struct Table {
        struct Entry {
            std::int32_t block;
            bool ever_offloaded;
        };
        std::vector<Entry> entries;   // [logical]
        std::int64_t freed = 0;       // entries before it have no block
        std::int64_t device_end = 0;  // entries from it on are in the host tier

        [[nodiscard]] std::int64_t onDevice() const { return device_end - freed; }
        [[nodiscard]] std::int64_t onHost() const {
            return static_cast<std::int64_t>(entries.size()) - device_end;
        }
    };

    struct Sequence {
        std::int32_t id = free_slot;
        std::int32_t generation = 0;  // of the next id
        int priority = 0;
        bool paused = false;
        bool in_step = false;
        std::int64_t max_length = 0;
        std::int64_t length = 0;
        std::int64_t covered = 0;        // the length that its blocks are enough for
        std::int64_t slides_at = 0;      // the length at which a window leaves a block
        std::int64_t device_blocks = 0;  // of all pools
        std::int64_t host_blocks = 0;
    };
    static constexpr std::int32_t free_slot = -1;

    // What a run needs of one pool.
    struct Demand {
        std::int64_t fresh = 0;    // new device blocks
        std::int64_t restore = 0;  // host blocks to bring back
        std::int64_t offload = 0;  // cold device blocks that must go first
    };

    struct Place {
        Tier tier = Tier::none;
        std::int32_t block = 0;
    };

    // What is remembered of a copy until the plan is finished.
    struct CopyNote {
        bool first;  // the first offload of this block of its sequence
        bool cancelled = false;
    };

    explicit State(const CoordinatorConfig& config);

    // ---- requests (coordinator.cpp) ----
    void beginStep();
    [[nodiscard]] StepPlan finishStep();
    [[nodiscard]] Answer answer(const Request& request);
    [[nodiscard]] Answer allocate(const Request& request);
    [[nodiscard]] Answer release(std::int32_t slot);
    [[nodiscard]] Answer setPaused(std::int32_t slot, bool paused);
    [[nodiscard]] Answer run(std::int32_t slot, std::int64_t tokens);
    // Why this run can never be met, whatever else is in the caches.
    [[nodiscard]] std::optional<std::string> misuse(const Sequence& sequence,
                                                    std::int64_t tokens) const;
    [[nodiscard]] std::int32_t slotOf(SequenceId sequence) const noexcept;  // or free_slot

    // ---- blocks (coordinator_blocks.cpp) ----
    // All blocks of the sequence in the device tier, and enough of them for `length` tokens. When
    // there is no room, says why, and nothing changes.
    [[nodiscard]] std::optional<std::string> bringIn(std::int32_t slot, std::int64_t length);
    // Why a pool could not hold what the run needs at once, though nobody else had a block of it.
    [[nodiscard]] std::optional<std::string> neverFits(std::int32_t slot,
                                                       std::int64_t length) const;
    [[nodiscard]] Demand demandOf(const Pool& pool, std::int32_t slot, std::int64_t length) const;
    [[nodiscard]] std::optional<std::string> shortage(const Pool& pool, std::int32_t slot,
                                                      const Demand& demand) const;
    void fetch(Pool& pool, std::int32_t slot, Demand demand);
    void addBlock(Pool& pool, std::int32_t slot);
    void restoreBlock(Pool& pool, std::int32_t slot);
    void offloadBlock(Pool& pool, std::int32_t slot);
    void dropBlocks(std::int32_t slot);
    // Frees what the windows have left. All blocks of the sequence are in the device tier.
    void slideWindows(std::int32_t slot);
    void recordEntry(const Pool& pool, std::int32_t slot, std::int64_t logical, Place from,
                     Place to);
    void cancelCopy(std::int32_t copy);
    void dropCancelledCopies();
    [[nodiscard]] std::int64_t coveredLength(std::int32_t slot) const;
    [[nodiscard]] std::int64_t slidingLength(std::int32_t slot) const;
    // Blocks of a sequence that no token from `length` on sees: its first ones.
    [[nodiscard]] std::int64_t blocksBehind(const Pool& pool, std::int32_t slot,
                                            std::int64_t length) const;
    // The most blocks that a sequence of max_length, decoded one by one, holds at a time.
    [[nodiscard]] std::int64_t mostBlocksHeld(const Pool& pool, std::int64_t max_length) const;

    [[nodiscard]] std::int64_t blocksFor(const Pool& pool, std::int64_t owned_tokens) const {
        return owned_tokens / pool.block_size + (owned_tokens % pool.block_size != 0 ? 1 : 0);
    }
    [[nodiscard]] std::size_t indexOf(const Pool& pool) const {
        return limits.poolOf(pool.group, pool.context);
    }
    [[nodiscard]] Table& tableOf(const Pool& pool, std::int32_t slot) {
        return tables[static_cast<std::size_t>(slot) * pools.size() + indexOf(pool)];
    }
    [[nodiscard]] const Table& tableOf(const Pool& pool, std::int32_t slot) const {
        return tables[static_cast<std::size_t>(slot) * pools.size() + indexOf(pool)];
    }
    [[nodiscard]] Sequence& sequenceAt(std::int32_t slot) {
        return sequences[static_cast<std::size_t>(slot)];
    }
    [[nodiscard]] const Sequence& sequenceAt(std::int32_t slot) const {
        return sequences[static_cast<std::size_t>(slot)];
    }

    // ---- invariants (coordinator_check.cpp) ----
    [[nodiscard]] std::optional<std::string> brokenPool(const Pool& pool) const;
    [[nodiscard]] std::optional<std::string> brokenSequence(std::int32_t slot) const;
    [[nodiscard]] std::optional<std::string> brokenWindows(std::int32_t slot) const;
    [[nodiscard]] std::optional<std::string> brokenSlots() const;
    [[nodiscard]] std::optional<std::string> brokenOrder() const;
    [[nodiscard]] std::uint64_t digestFromScratch() const;

    const PlanLimits limits;
    const std::int32_t generations;   // ids of a slot before they come round again
    std::vector<Pool> pools;          // [group * contexts + context]
    std::vector<Sequence> sequences;  // [slot]
    std::vector<Table> tables;        // [slot * pools + pool]
    std::vector<std::int32_t> free_slots;
    EvictionOrder cold;  // sequences outside the step with blocks in the device tier
    MetadataDigest digest;

    StepPlan plan;                      // being made
    std::vector<CopyNote> notes;        // [copy of the plan]
    std::vector<RunRecord> runs;        // of the last plan
    std::vector<Demand> demands;        // [pool] of the run being answered
    std::vector<SequenceRecord> grown;  // lengths committed since the last plan
    std::int64_t number = 0;
    std::int64_t tokens_left = 0;  // of the step
    bool open = false;             // the last plan can be advanced

    std::int64_t offloaded = 0;
    std::int64_t restored = 0;
    std::int64_t distinct_offloaded = 0;
};

}  // namespace kvgrid
