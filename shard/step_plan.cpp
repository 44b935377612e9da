#include "shard/step_plan.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

namespace kvgrid {

namespace {

constexpr std::uint32_t plan_magic = 0x4756'4B50;  // "PKVG" in memory order
constexpr std::uint32_t plan_version = 1;

struct Header {
    std::uint32_t magic = plan_magic;
    std::uint32_t version = plan_version;
    std::int64_t number = 0;
    std::uint64_t digest = 0;
    std::uint64_t sequences = 0;  // records that follow, of each kind, in this order
    std::uint64_t tables = 0;
    std::uint64_t copies = 0;
    std::uint64_t runs = 0;
    std::uint64_t answers = 0;
    std::uint64_t text = 0;  // bytes
};
static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) == 72);

tl::unexpected<Failure> broken(const std::string& what) {
    return failure(ErrorCode::internal, "step plan: " + what);
}

// ---- bytes ----

template <typename Records>
std::byte* put(std::byte* to, const Records& records) {
    const std::size_t bytes = records.size() * sizeof(*records.data());
    if (bytes > 0) std::memcpy(to, records.data(), bytes);
    return to + bytes;
}

// Takes `count` records off the front of the message. False when there are not so many.
template <typename Records>
bool take(std::span<const std::byte>& message, std::uint64_t count, Records& records) {
    constexpr std::size_t record_bytes = sizeof(*records.data());
    if (count > message.size() / record_bytes) return false;
    records.resize(count);
    if (count > 0) std::memcpy(records.data(), message.data(), count * record_bytes);
    message = message.subspan(count * record_bytes);
    return true;
}

// ---- limits ----

// Says of each record whether it is within the limits, and of the first that is not, why.
class RecordChecker {
public:
    RecordChecker(const PlanLimits& limits, std::size_t text_bytes)
        : limits_(limits),
          text_bytes_(static_cast<std::int64_t>(text_bytes)) {}

    template <typename Record>
    Result<void> all(const char* what, const std::vector<Record>& records) {
        for (std::size_t i = 0; i < records.size(); ++i) {
            if (check(records[i])) continue;
            return broken(std::string(what) + " " + std::to_string(i) + ": " + field_ + " " +
                          std::to_string(value_) + " is not in [" + std::to_string(least_) + ", " +
                          std::to_string(most_) + "]");
        }
        return {};
    }

private:
    bool check(const SequenceRecord& record) {
        using Kind = SequenceRecord::Kind;
        const bool allocates = record.kind == Kind::allocate;
        const bool grows = record.kind == Kind::length;
        return inside("kind", static_cast<std::int32_t>(record.kind), 0, 2) &&
               index("slot", record.slot, limits_.max_sequences) &&
               index("sequence", record.sequence, std::int64_t{1} << 31) &&
               inside("sequence mod max_sequences", record.sequence % limits_.max_sequences,
                      record.slot, record.slot) &&
               inside("reserved", record.reserved, 0, 0) &&
               inside("max_length", record.max_length, allocates ? 1 : 0,
                      allocates ? limits_.max_sequence_length : 0) &&
               inside("length", record.length, 0, grows ? limits_.max_sequence_length : 0);
    }

    bool check(const TableRecord& record) {
        return inside("tier", static_cast<std::int32_t>(record.tier), 0, 2) &&
               index("slot", record.slot, limits_.max_sequences) &&
               index("group", record.group, groups()) &&
               index("context", record.context, limits_.contexts) &&
               index("logical block", record.logical,
                     limits_.of(record.group).blocks_per_sequence) &&
               index("block", record.block, blocksOf(record.tier, limits_.of(record.group))) &&
               inside("reserved", record.reserved, 0, 0);
    }

    bool check(const CopyRecord& record) {
        return inside("direction", static_cast<std::int32_t>(record.direction), 0, 1) &&
               index("group", record.group, groups()) &&
               index("context", record.context, limits_.contexts) &&
               index("device block", record.device_block, limits_.of(record.group).device_blocks) &&
               index("host block", record.host_block, limits_.of(record.group).host_blocks);
    }

    bool check(const RunRecord& record) {
        return index("slot", record.slot, limits_.max_sequences) &&
               inside("first_position", record.first_position, 0, limits_.max_sequence_length) &&
               inside("rows", record.rows, 1, limits_.max_step_tokens) &&
               inside("rows", record.rows, 1, limits_.max_sequence_length - record.first_position);
    }

    bool check(const AnswerRecord& record) {
        return inside("status", record.status, 0, 2) &&
               inside("end of why", std::int64_t{record.why_offset} + record.why_bytes, 0,
                      text_bytes_);
    }

    // No block: its number is 0.
    [[nodiscard]] static std::int64_t blocksOf(Tier tier, const GroupLimits& group) {
        if (tier == Tier::none) return 1;
        return tier == Tier::device ? group.device_blocks : group.host_blocks;
    }

    [[nodiscard]] std::int64_t groups() const {
        return static_cast<std::int64_t>(limits_.groups.size());
    }

    bool index(const char* field, std::int64_t value, std::int64_t count) {
        return inside(field, value, 0, count - 1);
    }

    bool inside(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
        if (value >= least && value <= most) return true;
        field_ = field;
        value_ = value;
        least_ = least;
        most_ = most;
        return false;
    }

    const PlanLimits& limits_;
    std::int64_t text_bytes_;
    const char* field_ = "";
    std::int64_t value_ = 0;
    std::int64_t least_ = 0;
    std::int64_t most_ = 0;
};

// The runs of a step together: no sequence twice, no more tokens than a step may have.
Result<void> checkRuns(const std::vector<RunRecord>& runs, const PlanLimits& limits) {
    std::vector<bool> seen(static_cast<std::size_t>(limits.max_sequences));
    std::int64_t rows = 0;
    for (const RunRecord& run : runs) {
        if (seen[static_cast<std::size_t>(run.slot)]) {
            return broken("slot " + std::to_string(run.slot) + " runs twice");
        }
        seen[static_cast<std::size_t>(run.slot)] = true;
        rows += run.rows;
        if (rows > limits.max_step_tokens) {
            return broken("the runs have more than max_step_tokens " +
                          std::to_string(limits.max_step_tokens) + " rows");
        }
    }
    return {};
}

// Copies that may be executed at once must not share a block.
Result<void> checkCopies(const std::vector<CopyRecord>& copies, const PlanLimits& limits) {
    if (copies.size() < 2) return {};
    struct Batch {
        CopyRecord::Direction direction;
        std::int64_t number;
    };
    std::vector<std::optional<Batch>> current(limits.pools());
    // (batch, 0: device or 1: host, block) of every copy.
    std::vector<std::tuple<std::int64_t, int, std::int32_t>> uses;
    uses.reserve(2 * copies.size());
    std::int64_t batches = 0;
    for (const CopyRecord& copy : copies) {
        auto& batch = current[limits.poolOf(copy.group, copy.context)];
        if (!batch || batch->direction != copy.direction) batch = {copy.direction, batches++};
        uses.emplace_back(batch->number, 0, copy.device_block);
        uses.emplace_back(batch->number, 1, copy.host_block);
    }
    std::sort(uses.begin(), uses.end());
    const auto twice = std::adjacent_find(uses.begin(), uses.end());
    if (twice == uses.end()) return {};
    return broken(std::string(std::get<1>(*twice) == 0 ? "device" : "host") + " block " +
                  std::to_string(std::get<2>(*twice)) + " is twice in one run of copies");
}

// ---- hashes ----

// 64 x 64 -> 128 bits, folded: the mixing step of wyhash (Wang Yi, public domain). Each hash ends
// with a fold by a constant: without it, neighbouring numbers have related hashes, which may cancel
// in a sum.
std::uint64_t fold(std::uint64_t left, std::uint64_t right) noexcept {
    __extension__ using Wide = unsigned __int128;
    const Wide product = Wide{left} * right;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

// Odd constants without structure (wyhash's), one pair for each kind of item, so that a sequence
// and a table entry with the same numbers differ.
constexpr std::uint64_t sequence_keys[] = {0xa0761d6478bd642f, 0xe7037ed1a0b428db,
                                           0x8ebc6af09c88c6e3, 0x589965cc75374cc3};
constexpr std::uint64_t entry_keys[] = {0x1d8e4e27c47d124f, 0xeb44accab455d165, 0x2d358dccaa6c78a5,
                                        0x8bb84b93962eacc9};

std::uint64_t pack(std::int32_t high, std::int32_t low) noexcept {
    return std::uint64_t{static_cast<std::uint32_t>(high)} << 32 | static_cast<std::uint32_t>(low);
}

std::uint64_t hashOf(std::int32_t slot, std::int32_t sequence, std::int64_t max_length,
                     std::int64_t length) noexcept {
    const std::uint64_t first = fold(pack(slot, sequence) ^ sequence_keys[0],
                                     static_cast<std::uint64_t>(max_length) ^ sequence_keys[1]);
    const std::uint64_t second =
        fold(first ^ sequence_keys[2], static_cast<std::uint64_t>(length) ^ sequence_keys[3]);
    return fold(second, sequence_keys[0]);
}

std::uint64_t hashOf(const TableRecord& entry) noexcept {
    if (entry.tier == Tier::none) return 0;
    const std::int32_t shard = static_cast<std::int32_t>(static_cast<std::uint16_t>(entry.group))
                                   << 16 |
                               static_cast<std::uint16_t>(entry.context);
    const std::uint64_t first =
        fold(pack(entry.slot, entry.logical) ^ entry_keys[0],
             pack(shard, static_cast<std::int32_t>(entry.tier)) ^ entry_keys[1]);
    const std::uint64_t second =
        fold(first ^ entry_keys[2], static_cast<std::uint32_t>(entry.block) ^ entry_keys[3]);
    return fold(second, entry_keys[0]);
}

}  // namespace

std::vector<std::byte> StepPlan::encode() const {
    Header header;
    header.number = number;
    header.digest = digest;
    header.sequences = sequences.size();
    header.tables = tables.size();
    header.copies = copies.size();
    header.runs = runs.size();
    header.answers = answers.size();
    header.text = text.size();

    std::vector<std::byte> message(
        sizeof(Header) + sequences.size() * sizeof(SequenceRecord) +
        tables.size() * sizeof(TableRecord) + copies.size() * sizeof(CopyRecord) +
        runs.size() * sizeof(RunRecord) + answers.size() * sizeof(AnswerRecord) + text.size());
    std::memcpy(message.data(), &header, sizeof(Header));
    std::byte* to = message.data() + sizeof(Header);
    to = put(to, sequences);
    to = put(to, tables);
    to = put(to, copies);
    to = put(to, runs);
    to = put(to, answers);
    put(to, text);
    return message;
}

Result<StepPlan> StepPlan::decode(std::span<const std::byte> message, const PlanLimits& limits) {
    Header header;
    if (message.size() < sizeof(Header)) {
        return broken(std::to_string(message.size()) + " bytes are less than a header");
    }
    std::memcpy(&header, message.data(), sizeof(Header));
    if (header.magic != plan_magic) return broken("the message is not one");
    if (header.version != plan_version) {
        return broken("version " + std::to_string(header.version) + ", not " +
                      std::to_string(plan_version));
    }
    if (header.number < 1) return broken("number " + std::to_string(header.number));

    StepPlan plan;
    plan.number = header.number;
    plan.digest = header.digest;
    std::span<const std::byte> rest = message.subspan(sizeof(Header));
    const bool whole =
        take(rest, header.sequences, plan.sequences) && take(rest, header.tables, plan.tables) &&
        take(rest, header.copies, plan.copies) && take(rest, header.runs, plan.runs) &&
        take(rest, header.answers, plan.answers) && take(rest, header.text, plan.text);
    if (!whole) return broken("truncated, or a count is too large");
    if (!rest.empty()) return broken(std::to_string(rest.size()) + " bytes too many");

    RecordChecker records(limits, plan.text.size());
    Result<void> checked = records.all("sequence record", plan.sequences);
    if (checked) checked = records.all("table record", plan.tables);
    if (checked) checked = records.all("copy", plan.copies);
    if (checked) checked = records.all("run", plan.runs);
    if (checked) checked = records.all("answer", plan.answers);
    if (checked) checked = checkRuns(plan.runs, limits);
    if (checked) checked = checkCopies(plan.copies, limits);
    if (!checked) return tl::unexpected(checked.error());
    return plan;
}

void MetadataDigest::addSequence(std::int32_t slot, std::int32_t sequence, std::int64_t max_length,
                                 std::int64_t length) noexcept {
    sum_ += hashOf(slot, sequence, max_length, length);
}

void MetadataDigest::removeSequence(std::int32_t slot, std::int32_t sequence,
                                    std::int64_t max_length, std::int64_t length) noexcept {
    sum_ -= hashOf(slot, sequence, max_length, length);
}

void MetadataDigest::addEntry(const TableRecord& entry) noexcept {
    sum_ += hashOf(entry);
}

void MetadataDigest::removeEntry(const TableRecord& entry) noexcept {
    sum_ -= hashOf(entry);
}

}  // namespace kvgrid
