// The language of the coordinator: what rank 0 tells all ranks to do in one step.
//
// A plan travels as one numbered, fixed binary message: a header, then arrays of fixed-size
// records, then the text of the answers. Every count and index is checked on arrival against the
// limits of the cache. `digest` is that of the metadata state which applying the plan must lead to;
// it is kept incrementally (MetadataDigest) by the coordinator and by every rank's replica.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <kvgrid/error.h>

namespace kvgrid {

enum class Tier : std::int32_t { none = 0, device = 1, host = 2 };

// What a replica needs to know of a sequence slot. `length` counts committed tokens. Here and
// below, fields that a record does not use are 0.
struct SequenceRecord {
    enum class Kind : std::int32_t { allocate, release, length };

    Kind kind = Kind::length;
    std::int32_t slot = 0;
    std::int32_t sequence = 0;  // SequenceId: slot + max_sequences x generation
    std::int32_t reserved = 0;
    std::int64_t max_length = 0;  // allocate
    std::int64_t length = 0;      // length
};

// entry[slot][group][context][logical] = (tier, block). tier none: no block (released, or behind
// the group's window).
struct TableRecord {
    std::int32_t slot = 0;
    std::int16_t group = 0;
    std::int16_t context = 0;
    std::int32_t logical = 0;
    Tier tier = Tier::none;
    std::int32_t block = 0;
    std::int32_t reserved = 0;
};

// Copies of whole blocks, executed in order. Among the copies of one group and context (those of
// the others left out), no block appears twice in a maximal run of one direction, so such a run may
// be executed at once.
struct CopyRecord {
    enum class Direction : std::int32_t { offload, restore };

    Direction direction = Direction::offload;
    std::int16_t group = 0;
    std::int16_t context = 0;
    std::int32_t device_block = 0;
    std::int32_t host_block = 0;
};

// A sequence that runs in this step: `rows` new tokens from first_position (its committed length).
struct RunRecord {
    std::int32_t slot = 0;
    std::int32_t rows = 0;
    std::int64_t first_position = 0;
};

struct AnswerRecord {
    std::int32_t status = 0;  // Answer::Status
    std::int32_t sequence = 0;
    std::uint32_t why_offset = 0;  // into the text
    std::uint32_t why_bytes = 0;
};

static_assert(std::is_trivially_copyable_v<SequenceRecord> && sizeof(SequenceRecord) == 32);
static_assert(std::is_trivially_copyable_v<TableRecord> && sizeof(TableRecord) == 24);
static_assert(std::is_trivially_copyable_v<CopyRecord> && sizeof(CopyRecord) == 16);
static_assert(std::is_trivially_copyable_v<RunRecord> && sizeof(RunRecord) == 16);
static_assert(std::is_trivially_copyable_v<AnswerRecord> && sizeof(AnswerRecord) == 16);

// Of one layer group, on each context coordinate.
struct GroupLimits {
    std::int64_t blocks_per_sequence = 0;  // logical blocks at most
    std::int64_t device_blocks = 0;        // physical
    std::int64_t host_blocks = 0;
};

// What the indices of a plan may be: every rank knows this from the configuration.
struct PlanLimits {
    int max_sequences = 0;
    std::int64_t max_sequence_length = 0;
    std::int64_t max_step_tokens = 0;
    int contexts = 1;  // size of the context axis
    std::vector<GroupLimits> groups;

    [[nodiscard]] const GroupLimits& of(int group) const {
        return groups[static_cast<std::size_t>(group)];
    }
    [[nodiscard]] std::size_t pools() const {
        return groups.size() * static_cast<std::size_t>(contexts);
    }
    // Among the pools of all groups and contexts.
    [[nodiscard]] std::size_t poolOf(int group, int context) const {
        return static_cast<std::size_t>(group) * static_cast<std::size_t>(contexts) +
               static_cast<std::size_t>(context);
    }
};

// Order of application: sequences' release, table entries, copies, sequences' allocate and length
// are independent of each other in the metadata; on the device the copies come first, in order,
// then the new tables, then append and attend of the runs.
struct StepPlan {
    std::int64_t number = 0;
    std::uint64_t digest = 0;
    std::vector<SequenceRecord> sequences;  // in order
    std::vector<TableRecord> tables;        // in order; a later record of the same entry wins
    std::vector<CopyRecord> copies;         // in order
    std::vector<RunRecord> runs;
    std::vector<AnswerRecord> answers;
    std::string text;

    [[nodiscard]] std::vector<std::byte> encode() const;
    // internal: a message that is truncated, too long, of another version, or with any index, count
    // or range outside the limits; the message says which.
    [[nodiscard]] static Result<StepPlan> decode(std::span<const std::byte> message,
                                                 const PlanLimits& limits);
};

// An order-independent sum of hashes of what is known: sequences (slot, id, max_length, length) and
// table entries. Adding and removing an item cost the same, so the digest follows the changes.
class MetadataDigest {
public:
    void addSequence(std::int32_t slot, std::int32_t sequence, std::int64_t max_length,
                     std::int64_t length) noexcept;
    void removeSequence(std::int32_t slot, std::int32_t sequence, std::int64_t max_length,
                        std::int64_t length) noexcept;
    // Entries of tier none are not part of the state: adding or removing one does nothing.
    void addEntry(const TableRecord& entry) noexcept;
    void removeEntry(const TableRecord& entry) noexcept;
    [[nodiscard]] std::uint64_t value() const noexcept { return sum_; }

private:
    std::uint64_t sum_ = 0;
};

}  // namespace kvgrid
