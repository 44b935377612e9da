#include "shard/step_plan.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvgrid {
namespace {

using testing::HasSubstr;
using Direction = CopyRecord::Direction;
using Kind = SequenceRecord::Kind;

// The second group is the smaller in everything, as one with a window may be.
const PlanLimits limits{
    .max_sequences = 8,
    .max_sequence_length = 4096,
    .max_step_tokens = 64,
    .contexts = 4,
    .groups = {{.blocks_per_sequence = 16, .device_blocks = 32, .host_blocks = 12},
               {.blocks_per_sequence = 14, .device_blocks = 20, .host_blocks = 6}}};

// At least one record of every kind, all of them at an edge of the limits.
StepPlan samplePlan() {
    StepPlan plan;
    plan.number = 77;
    plan.digest = 0x0123456789abcdef;
    plan.sequences = {
        {.kind = Kind::release, .slot = 7, .sequence = 15},
        {.kind = Kind::allocate, .slot = 7, .sequence = 23, .max_length = 4096},
        {.kind = Kind::length, .slot = 0, .sequence = 0, .length = 4096},
    };
    plan.tables = {
        {.slot = 7, .group = 1, .context = 3, .logical = 13, .tier = Tier::device, .block = 19},
        {.slot = 7, .group = 1, .context = 3, .logical = 13, .tier = Tier::host, .block = 5},
        {.slot = 0, .group = 0, .context = 0, .logical = 0, .tier = Tier::none, .block = 0},
        {.slot = 7, .group = 0, .context = 3, .logical = 15, .tier = Tier::device, .block = 31},
        {.slot = 7, .group = 0, .context = 3, .logical = 15, .tier = Tier::host, .block = 11},
    };
    plan.copies = {
        {.direction = Direction::offload, .device_block = 31, .host_block = 11},
        {.direction = Direction::offload, .device_block = 30, .host_block = 10},
        {.direction = Direction::restore, .device_block = 31, .host_block = 10},
        {.direction = Direction::offload, .device_block = 29, .host_block = 10},
        {.direction = Direction::offload,
         .group = 1,
         .context = 3,
         .device_block = 19,
         .host_block = 5},
    };
    plan.runs = {
        {.slot = 7, .rows = 60, .first_position = 4036},
        {.slot = 0, .rows = 4, .first_position = 0},
    };
    plan.text = "too longno";
    plan.answers = {
        {.status = 0, .sequence = 23},
        {.status = 2, .sequence = -5, .why_offset = 0, .why_bytes = 8},
        {.status = 1, .sequence = 9, .why_offset = 8, .why_bytes = 2},
    };
    return plan;
}

template <typename Record>
bool sameBytes(const std::vector<Record>& left, const std::vector<Record>& right) {
    return left.size() == right.size() &&
           (left.empty() ||
            std::memcmp(left.data(), right.data(), left.size() * sizeof(Record)) == 0);
}

bool same(const StepPlan& left, const StepPlan& right) {
    return left.number == right.number && left.digest == right.digest &&
           sameBytes(left.sequences, right.sequences) && sameBytes(left.tables, right.tables) &&
           sameBytes(left.copies, right.copies) && sameBytes(left.runs, right.runs) &&
           sameBytes(left.answers, right.answers) && left.text == right.text;
}

// An own reading of the contract: what may pass.
template <typename Value>
bool below(Value value, std::int64_t end) {
    return value >= 0 && value < end;
}

bool copiesAreLegal(const StepPlan& plan) {
    std::map<std::pair<int, int>, std::tuple<Direction, std::set<int>, std::set<int>>> batches;
    for (const CopyRecord& copy : plan.copies) {
        if (copy.direction != Direction::offload && copy.direction != Direction::restore)
            return false;
        if (!below(copy.group, 2) || !below(copy.context, limits.contexts)) return false;
        const GroupLimits& group = limits.groups[static_cast<std::size_t>(copy.group)];
        if (!below(copy.device_block, group.device_blocks)) return false;
        if (!below(copy.host_block, group.host_blocks)) return false;
        auto& [direction, device, host] = batches[{copy.group, copy.context}];
        if (direction != copy.direction) {
            device.clear();
            host.clear();
        }
        direction = copy.direction;
        if (!device.insert(copy.device_block).second) return false;
        if (!host.insert(copy.host_block).second) return false;
    }
    return true;
}

bool runsAreLegal(const StepPlan& plan) {
    std::int64_t rows = 0;
    std::set<int> slots;
    for (const RunRecord& run : plan.runs) {
        if (!below(run.slot, limits.max_sequences) || !slots.insert(run.slot).second) return false;
        if (run.rows < 1 || run.first_position < 0) return false;
        if (run.first_position > limits.max_sequence_length - run.rows) return false;
        rows += run.rows;
    }
    return rows <= limits.max_step_tokens;
}

bool recordsAreLegal(const StepPlan& plan) {
    const bool sequences = std::all_of(plan.sequences.begin(), plan.sequences.end(), [](auto& r) {
        const bool grows = r.kind == Kind::length;
        const bool allocates = r.kind == Kind::allocate;
        return (grows || allocates || r.kind == Kind::release) &&
               below(r.slot, limits.max_sequences) && r.sequence >= 0 &&
               r.sequence % limits.max_sequences == r.slot &&
               (allocates ? r.max_length >= 1 && r.max_length <= limits.max_sequence_length
                          : r.max_length == 0) &&
               (grows ? r.length >= 0 && r.length <= limits.max_sequence_length : r.length == 0);
    });
    const bool tables = std::all_of(plan.tables.begin(), plan.tables.end(), [](auto& r) {
        if (!below(r.group, 2)) return false;
        const GroupLimits& group = limits.groups[static_cast<std::size_t>(r.group)];
        const bool block = r.tier == Tier::device ? below(r.block, group.device_blocks)
                           : r.tier == Tier::host ? below(r.block, group.host_blocks)
                                                  : r.tier == Tier::none && r.block == 0;
        return block && below(r.slot, limits.max_sequences) && below(r.context, limits.contexts) &&
               below(r.logical, group.blocks_per_sequence);
    });
    const bool answers = std::all_of(plan.answers.begin(), plan.answers.end(), [&](auto& r) {
        return below(r.status, 3) && std::uint64_t{r.why_offset} + r.why_bytes <= plan.text.size();
    });
    return plan.number >= 1 && sequences && tables && answers;
}

bool isLegal(const StepPlan& plan) {
    return recordsAreLegal(plan) && copiesAreLegal(plan) && runsAreLegal(plan);
}

TEST(StepPlan, RoundTrips) {
    const StepPlan plan = samplePlan();
    ASSERT_TRUE(isLegal(plan));
    const auto decoded = StepPlan::decode(plan.encode(), limits);
    ASSERT_TRUE(decoded) << decoded.error().message;
    EXPECT_TRUE(same(*decoded, plan));
}

TEST(StepPlan, RoundTripsEmpty) {
    StepPlan plan;
    plan.number = 1;
    const auto decoded = StepPlan::decode(plan.encode(), limits);
    ASSERT_TRUE(decoded) << decoded.error().message;
    EXPECT_TRUE(same(*decoded, plan));
}

TEST(StepPlan, ReadsFromAnyAlignment) {
    const auto message = samplePlan().encode();
    for (std::size_t shift = 1; shift < 16; ++shift) {
        std::vector<std::byte> moved(shift);
        moved.insert(moved.end(), message.begin(), message.end());
        const auto decoded = StepPlan::decode(std::span(moved).subspan(shift), limits);
        ASSERT_TRUE(decoded) << decoded.error().message;
        EXPECT_TRUE(same(*decoded, samplePlan()));
    }
}

TEST(StepPlan, RefusesEveryTruncation) {
    const auto message = samplePlan().encode();
    for (std::size_t bytes = 0; bytes < message.size(); ++bytes) {
        // A copy of its own, so that a sanitizer sees a read past the end.
        const std::vector<std::byte> cut(message.begin(),
                                         message.begin() + static_cast<std::ptrdiff_t>(bytes));
        const auto decoded = StepPlan::decode(cut, limits);
        ASSERT_FALSE(decoded) << bytes;
        EXPECT_EQ(decoded.error().code, ErrorCode::internal);
    }
}

TEST(StepPlan, RefusesBytesTooMany) {
    auto message = samplePlan().encode();
    message.push_back(std::byte{0});
    EXPECT_FALSE(StepPlan::decode(message, limits));
    message.resize(message.size() + 4096);
    EXPECT_FALSE(StepPlan::decode(message, limits));
}

// Every value of every byte: what passes is within the limits, and says what the bytes say.
TEST(StepPlan, NoChangedByteLetsAnythingOutOfRangePass) {
    const auto message = samplePlan().encode();
    std::int64_t passed = 0;
    for (std::size_t at = 0; at < message.size(); ++at) {
        for (int value = 0; value < 256; ++value) {
            auto changed = message;
            changed[at] = static_cast<std::byte>(value);
            const auto decoded = StepPlan::decode(changed, limits);
            if (!decoded) continue;
            ++passed;
            ASSERT_TRUE(isLegal(*decoded)) << "byte " << at << " = " << value;
            ASSERT_EQ(decoded->encode(), changed) << "byte " << at << " = " << value;
        }
    }
    EXPECT_GE(passed, static_cast<std::int64_t>(message.size()));
}

TEST(StepPlan, SurvivesNoise) {
    std::mt19937_64 random(20);
    const auto message = samplePlan().encode();
    for (int round = 0; round < 20000; ++round) {
        auto changed = message;
        const auto changes = 1 + random() % 8;
        for (std::uint64_t i = 0; i < changes; ++i) {
            changed[random() % changed.size()] = static_cast<std::byte>(random());
        }
        if (random() % 4 == 0) changed.resize(random() % (2 * changed.size()));
        const auto decoded = StepPlan::decode(changed, limits);
        if (decoded) {
            ASSERT_TRUE(isLegal(*decoded));
        }
    }
    for (int round = 0; round < 2000; ++round) {
        std::vector<std::byte> noise(random() % 512);
        for (std::byte& byte : noise)
            byte = static_cast<std::byte>(random());
        ASSERT_FALSE(StepPlan::decode(noise, limits));
    }
}

// The counts are the six 64-bit words from byte 24.
TEST(StepPlan, RefusesCountsThatOverflow) {
    const auto message = samplePlan().encode();
    for (std::size_t field = 0; field < 6; ++field) {
        for (const std::uint64_t count :
             {~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{1} << 62,
              std::uint64_t{1} << 61, std::uint64_t{1} << 60, std::uint64_t{1} << 59,
              std::uint64_t{1} << 32}) {
            for (const std::uint64_t more : {0, 1, 3}) {
                auto changed = message;
                const std::uint64_t value = count - more;
                std::memcpy(changed.data() + 24 + 8 * field, &value, sizeof(value));
                ASSERT_FALSE(StepPlan::decode(changed, limits)) << field << " " << value;
            }
        }
    }
}

struct Fault {
    const char* what;  // in the message
    std::function<void(StepPlan&)> plant;
};

TEST(StepPlan, NamesWhatIsOutOfRange) {
    const std::vector<Fault> faults{
        {"number 0", [](StepPlan& p) { p.number = 0; }},
        {"number -1", [](StepPlan& p) { p.number = -1; }},
        {"sequence record 1: kind 3", [](StepPlan& p) { p.sequences[1].kind = Kind{3}; }},
        {"sequence record 1: kind -1", [](StepPlan& p) { p.sequences[1].kind = Kind{-1}; }},
        {"slot 8", [](StepPlan& p) { p.sequences[1].slot = 8; }},
        {"slot -1", [](StepPlan& p) { p.sequences[1].slot = -1; }},
        {"sequence -1", [](StepPlan& p) { p.sequences[1].sequence = -1; }},
        {"sequence mod", [](StepPlan& p) { p.sequences[1].sequence = 22; }},
        {"reserved", [](StepPlan& p) { p.sequences[1].reserved = 1; }},
        {"max_length 0", [](StepPlan& p) { p.sequences[1].max_length = 0; }},
        {"max_length 4097", [](StepPlan& p) { p.sequences[1].max_length = 4097; }},
        {"max_length 1", [](StepPlan& p) { p.sequences[2].max_length = 1; }},
        {"length 1", [](StepPlan& p) { p.sequences[1].length = 1; }},
        {"length -1", [](StepPlan& p) { p.sequences[2].length = -1; }},
        {"length 4097", [](StepPlan& p) { p.sequences[2].length = 4097; }},
        {"table record 1: tier 3", [](StepPlan& p) { p.tables[1].tier = Tier{3}; }},
        {"tier -1", [](StepPlan& p) { p.tables[1].tier = Tier{-1}; }},
        {"slot 8", [](StepPlan& p) { p.tables[1].slot = 8; }},
        {"slot -1", [](StepPlan& p) { p.tables[1].slot = -1; }},
        {"group 2", [](StepPlan& p) { p.tables[1].group = 2; }},
        {"group -1", [](StepPlan& p) { p.tables[1].group = -1; }},
        {"context 4", [](StepPlan& p) { p.tables[1].context = 4; }},
        {"context -1", [](StepPlan& p) { p.tables[1].context = -1; }},
        {"logical block 14", [](StepPlan& p) { p.tables[1].logical = 14; }},
        {"logical block 16", [](StepPlan& p) { p.tables[3].logical = 16; }},
        {"logical block -1", [](StepPlan& p) { p.tables[1].logical = -1; }},
        {"block 20", [](StepPlan& p) { p.tables[0].block = 20; }},
        {"block 32", [](StepPlan& p) { p.tables[3].block = 32; }},
        {"block -1", [](StepPlan& p) { p.tables[0].block = -1; }},
        {"block 6", [](StepPlan& p) { p.tables[1].block = 6; }},
        {"block 12", [](StepPlan& p) { p.tables[4].block = 12; }},
        {"block 1", [](StepPlan& p) { p.tables[2].block = 1; }},
        {"reserved", [](StepPlan& p) { p.tables[0].reserved = -1; }},
        {"copy 2: direction 2", [](StepPlan& p) { p.copies[2].direction = Direction{2}; }},
        {"direction -1", [](StepPlan& p) { p.copies[2].direction = Direction{-1}; }},
        {"group 2", [](StepPlan& p) { p.copies[2].group = 2; }},
        {"group -1", [](StepPlan& p) { p.copies[2].group = -1; }},
        {"context 4", [](StepPlan& p) { p.copies[2].context = 4; }},
        {"context -1", [](StepPlan& p) { p.copies[2].context = -1; }},
        {"device block 32", [](StepPlan& p) { p.copies[2].device_block = 32; }},
        {"device block 20", [](StepPlan& p) { p.copies[4].device_block = 20; }},
        {"device block -1", [](StepPlan& p) { p.copies[2].device_block = -1; }},
        {"host block 12", [](StepPlan& p) { p.copies[2].host_block = 12; }},
        {"host block 6", [](StepPlan& p) { p.copies[4].host_block = 6; }},
        {"host block -1", [](StepPlan& p) { p.copies[2].host_block = -1; }},
        {"host block 11 is twice", [](StepPlan& p) { p.copies[1].host_block = 11; }},
        {"device block 31 is twice", [](StepPlan& p) { p.copies[1].device_block = 31; }},
        {"run 1: slot 8", [](StepPlan& p) { p.runs[1].slot = 8; }},
        {"slot -1", [](StepPlan& p) { p.runs[1].slot = -1; }},
        {"slot 7 runs twice", [](StepPlan& p) { p.runs[1].slot = 7; }},
        {"rows 0", [](StepPlan& p) { p.runs[1].rows = 0; }},
        {"rows 65", [](StepPlan& p) { p.runs[1].rows = 65; }},
        {"more than max_step_tokens 64", [](StepPlan& p) { p.runs[1].rows = 5; }},
        {"first_position -1", [](StepPlan& p) { p.runs[1].first_position = -1; }},
        {"first_position 4097", [](StepPlan& p) { p.runs[0].first_position = 4097; }},
        {"rows 60", [](StepPlan& p) { p.runs[0].first_position = 4037; }},
        {"first_position 9223372036854775807",
         [](StepPlan& p) { p.runs[0].first_position = INT64_MAX; }},
        {"answer 1: status 3", [](StepPlan& p) { p.answers[1].status = 3; }},
        {"status -1", [](StepPlan& p) { p.answers[1].status = -1; }},
        {"end of why 11", [](StepPlan& p) { p.answers[1].why_bytes = 11; }},
        {"end of why 4294967303", [](StepPlan& p) { p.answers[1].why_offset = UINT32_MAX; }},
    };
    for (const Fault& fault : faults) {
        StepPlan plan = samplePlan();
        fault.plant(plan);
        ASSERT_FALSE(isLegal(plan) && std::string(fault.what) != "reserved") << fault.what;
        const auto decoded = StepPlan::decode(plan.encode(), limits);
        ASSERT_FALSE(decoded) << fault.what;
        EXPECT_EQ(decoded.error().code, ErrorCode::internal);
        EXPECT_THAT(decoded.error().message, HasSubstr(fault.what));
    }
}

// Copies of other pools in between do not end a run of one pool's copies.
TEST(StepPlan, SeesABlockTwiceAcrossTheCopiesOfOtherPools) {
    StepPlan plan;
    plan.number = 1;
    plan.copies = {
        {.direction = Direction::offload, .device_block = 1, .host_block = 1},
        {.direction = Direction::restore, .context = 1, .device_block = 1, .host_block = 1},
        {.direction = Direction::offload, .device_block = 2, .host_block = 1},
    };
    EXPECT_FALSE(StepPlan::decode(plan.encode(), limits));
    plan.copies[1].context = 0;
    EXPECT_TRUE(StepPlan::decode(plan.encode(), limits));
}

// ---- the digest ----

using SequenceItem = std::tuple<std::int32_t, std::int32_t, std::int64_t, std::int64_t>;

std::vector<TableRecord> someEntries() {
    std::vector<TableRecord> entries;
    for (std::int32_t slot = 0; slot < 8; ++slot) {
        for (std::int16_t group = 0; group < 2; ++group) {
            for (std::int16_t context = 0; context < 4; ++context) {
                for (std::int32_t logical = 0; logical < 8; ++logical) {
                    for (const Tier tier : {Tier::device, Tier::host}) {
                        for (std::int32_t block = 0; block < 8; ++block) {
                            entries.push_back({slot, group, context, logical, tier, block});
                        }
                    }
                }
            }
        }
    }
    return entries;
}

TEST(MetadataDigest, DoesNotDependOnTheOrder) {
    auto entries = someEntries();
    MetadataDigest forward;
    for (const TableRecord& entry : entries)
        forward.addEntry(entry);
    forward.addSequence(1, 9, 100, 50);
    std::shuffle(entries.begin(), entries.end(), std::mt19937(3));
    MetadataDigest shuffled;
    shuffled.addSequence(1, 9, 100, 50);
    for (const TableRecord& entry : entries)
        shuffled.addEntry(entry);
    EXPECT_EQ(forward.value(), shuffled.value());
    EXPECT_NE(forward.value(), 0);
}

TEST(MetadataDigest, IsTakenBackByRemoving) {
    MetadataDigest digest;
    const auto entries = someEntries();
    for (const TableRecord& entry : entries)
        digest.addEntry(entry);
    digest.addSequence(1, 9, 100, 50);
    digest.removeSequence(1, 9, 100, 50);
    for (const TableRecord& entry : entries)
        digest.removeEntry(entry);
    EXPECT_EQ(digest.value(), 0);
}

TEST(MetadataDigest, IgnoresEntriesWithoutABlock) {
    MetadataDigest digest;
    digest.addEntry({.slot = 1, .logical = 2, .tier = Tier::none, .block = 0});
    EXPECT_EQ(digest.value(), 0);
}

TEST(MetadataDigest, SeesEveryField) {
    std::set<std::uint64_t> values;
    const auto of = [](auto... fields) {
        MetadataDigest digest;
        digest.addSequence(fields...);
        return digest.value();
    };
    std::size_t items = 0;
    for (std::int32_t slot = 0; slot < 8; ++slot) {
        for (std::int32_t generation = 0; generation < 8; ++generation) {
            for (std::int64_t max_length = 0; max_length < 12; ++max_length) {
                for (std::int64_t length = 0; length < 12; ++length) {
                    values.insert(of(slot, slot + 8 * generation, max_length, length));
                    ++items;
                }
            }
        }
    }
    for (const TableRecord& entry : someEntries()) {
        MetadataDigest digest;
        digest.addEntry(entry);
        values.insert(digest.value());
        ++items;
    }
    EXPECT_EQ(values.size(), items);
}

// One more token, or one more block id, changes about half of the bits, and the sum by another
// amount each time: such changes do not cancel.
TEST(MetadataDigest, MixesSmallDifferencesWell) {
    const std::vector<std::function<void(MetadataDigest&, int)>> kinds{
        [](MetadataDigest& digest, int i) { digest.addSequence(5, 5, 4096, i); },
        [](MetadataDigest& digest, int i) {
            digest.addEntry({.slot = 1, .logical = 2, .tier = Tier::device, .block = i});
        },
    };
    for (const auto& add : kinds) {
        constexpr int pairs = 4096;
        double flipped = 0;
        std::set<std::uint64_t> differences;
        for (int i = 0; i < pairs; ++i) {
            MetadataDigest one;
            MetadataDigest other;
            add(one, i);
            add(other, i + 1);
            flipped += __builtin_popcountll(one.value() ^ other.value());
            differences.insert(other.value() - one.value());
        }
        EXPECT_NEAR(flipped / pairs, 32.0, 1.0);
        EXPECT_EQ(differences.size(), pairs);
    }
}

// Swapping what two items hold is what a plain sum of fields would miss.
TEST(MetadataDigest, SeesSwaps) {
    MetadataDigest straight;
    straight.addEntry({.slot = 1, .logical = 0, .tier = Tier::device, .block = 7});
    straight.addEntry({.slot = 2, .logical = 0, .tier = Tier::device, .block = 9});
    MetadataDigest crossed;
    crossed.addEntry({.slot = 1, .logical = 0, .tier = Tier::device, .block = 9});
    crossed.addEntry({.slot = 2, .logical = 0, .tier = Tier::device, .block = 7});
    EXPECT_NE(straight.value(), crossed.value());
}

}  // namespace
}  // namespace kvgrid
