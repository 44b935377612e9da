#include "tests/src/coordinator_rig.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "shard/ownership.h"

namespace kvgrid {

namespace {

template <typename Record>
bool sameBytes(const std::vector<Record>& left, const std::vector<Record>& right) {
    return left.size() == right.size() &&
           (left.empty() ||
            std::memcmp(left.data(), right.data(), left.size() * sizeof(Record)) == 0);
}

}  // namespace

// ---- BlockMemory ----

BlockMemory::BlockMemory(const CoordinatorConfig& config)
    : contexts_(config.limits.contexts),
      device_(config.limits.pools()),
      host_(device_.size()) {
    for (std::size_t pool = 0; pool < device_.size(); ++pool) {
        const GroupLimits& group = config.limits.of(static_cast<int>(pool) / contexts_);
        device_[pool].resize(static_cast<std::size_t>(group.device_blocks));
        host_[pool].resize(static_cast<std::size_t>(group.host_blocks));
    }
}

void BlockMemory::execute(std::span<const CopyRecord> copies) {
    for (std::size_t pool = 0; pool < device_.size(); ++pool) {
        std::vector<CopyRecord> own;
        std::copy_if(copies.begin(), copies.end(), std::back_inserter(own), [&](auto& copy) {
            return copy.group * contexts_ + copy.context == static_cast<int>(pool);
        });
        for (auto first = own.begin(); first != own.end();) {
            const auto end = std::find_if(first, own.end(), [&](const CopyRecord& copy) {
                return copy.direction != first->direction;
            });
            const bool offload = first->direction == CopyRecord::Direction::offload;
            std::vector<Tag> read;
            for (auto copy = first; copy != end; ++copy) {
                read.push_back(offload ? device_[pool][static_cast<std::size_t>(copy->device_block)]
                                       : host_[pool][static_cast<std::size_t>(copy->host_block)]);
            }
            // From the last to the first: where two copies write one block, the order would show.
            for (auto copy = end; copy != first;) {
                --copy;
                auto& to = offload ? host_[pool][static_cast<std::size_t>(copy->host_block)]
                                   : device_[pool][static_cast<std::size_t>(copy->device_block)];
                to = read[static_cast<std::size_t>(copy - first)];
            }
            first = end;
        }
    }
}

bool BlockMemory::write(int pool, std::int32_t block, std::int32_t id, std::int64_t logical,
                        std::int64_t first, std::int64_t end) {
    const bool legal = first == 0 || holds(pool, Tier::device, block, id, logical, first);
    device_[static_cast<std::size_t>(pool)][static_cast<std::size_t>(block)] = {id, logical, end};
    return legal;
}

bool BlockMemory::holds(int pool, Tier tier, std::int32_t block, std::int32_t id,
                        std::int64_t logical, std::int64_t end) const {
    if (tier == Tier::none) return false;
    const auto& blocks = (tier == Tier::device ? device_ : host_)[static_cast<std::size_t>(pool)];
    const Tag& tag = blocks[static_cast<std::size_t>(block)];
    return tag.id == id && tag.logical == logical && tag.tokens >= end;
}

// ---- CoordinatorRig ----

CoordinatorRig::CoordinatorRig(const CoordinatorConfig& config)
    : config_(config),
      coordinator_(config),
      twin_(config),
      model_(config),
      replica_(config.limits),
      memory_(config),
      most_logical_(std::max_element(config.limits.groups.begin(), config.limits.groups.end(),
                                     [](auto& a, auto& b) {
                                         return a.blocks_per_sequence < b.blocks_per_sequence;
                                     })
                        ->blocks_per_sequence),
      places_(
          static_cast<std::size_t>(config.limits.max_sequences * model_.pools() * most_logical_)) {}

CoordinatorRig::Problem CoordinatorRig::step(std::span<const Request> requests, bool check) {
    if (open_) ++coverage_.dropped_steps;
    const auto ids_before = idsBySlot();
    plan_ = coordinator_.plan(requests);
    open_ = true;
    ++coverage_.plans;
    coverage_.requests += static_cast<std::int64_t>(requests.size());
    if (plan_.number != coverage_.plans) return "the plans are not numbered from 1";
    if (auto problem = compareAnswers(requests)) return problem;
    if (auto problem = compareTwin(requests)) return problem;
    if (auto problem = applyToReplica()) return problem;
    countCopies();
    noteOffloads(ids_before);
    if (auto problem = runInMemory()) return problem;
    return check ? checkAll() : std::nullopt;
}

CoordinatorRig::Problem CoordinatorRig::advance(std::span<const std::int64_t> accepted,
                                                bool check) {
    const bool legal = open_ && accepted.size() == plan_.runs.size() &&
                       std::equal(accepted.begin(), accepted.end(), plan_.runs.begin(),
                                  [](std::int64_t count, const RunRecord& run) {
                                      return count >= 0 && count <= run.rows;
                                  });
    const std::uint64_t before = coordinator_.digest();
    const auto advanced = coordinator_.advance(accepted);
    ++coverage_.advances;
    if (advanced.has_value() != legal) return "advance: should it have been refused?";
    if (!legal) {
        if (advanced.error().code != ErrorCode::invalid_argument) return "advance: another code";
        if (coordinator_.digest() != before) return "a refused advance changed the state";
        return check ? checkAll() : std::nullopt;
    }
    open_ = false;
    for (std::size_t i = 0; i < accepted.size(); ++i) {
        if (accepted[i] < plan_.runs[i].rows) ++coverage_.partial_accepts;
    }
    if (!twin_.advance(accepted)) return "the twin refused to advance";
    model_.advance(accepted);
    return check ? checkAll() : std::nullopt;
}

CoordinatorRig::Problem CoordinatorRig::compareAnswers(std::span<const Request> requests) {
    if (plan_.answers.size() != requests.size()) return "not one answer for each request";
    model_.beginStep();
    for (std::size_t i = 0; i < requests.size(); ++i) {
        const AnswerRecord& answer = plan_.answers[i];
        const auto expected = model_.answer(requests[i], answer.sequence);
        const std::string why = plan_.text.substr(answer.why_offset, answer.why_bytes);
        if (static_cast<std::int32_t>(expected) != answer.status) {
            return fmt::format("request {} of step {}: status {} ({}), expected {}", i,
                               plan_.number, answer.status, why, static_cast<int>(expected));
        }
        const bool done = expected == Answer::Status::done;
        if (done != why.empty()) return "why is not empty exactly when done: " + why;
        ++(done                               ? coverage_.done
           : expected == Answer::Status::wait ? coverage_.wait
                                              : coverage_.never);
        if (requests[i].kind == Request::Kind::allocate) {
            if (!done && answer.sequence != -1) return "a refused allocate names a sequence";
            continue;
        }
        const auto id = static_cast<std::int32_t>(requests[i].sequence);
        if (answer.sequence != id) return "the answer names another sequence";
        if (done && requests[i].kind == Request::Kind::release) released_.push_back(id);
    }
    return std::nullopt;
}

CoordinatorRig::Problem CoordinatorRig::compareTwin(std::span<const Request> requests) {
    std::vector<Request> met;
    for (std::size_t i = 0; i < requests.size(); ++i) {
        if (plan_.answers[i].status == 0) met.push_back(requests[i]);
    }
    const StepPlan other = twin_.plan(met);
    const bool same = other.number == plan_.number && other.digest == plan_.digest &&
                      sameBytes(other.sequences, plan_.sequences) &&
                      sameBytes(other.tables, plan_.tables) &&
                      sameBytes(other.copies, plan_.copies) && sameBytes(other.runs, plan_.runs);
    if (same) return std::nullopt;
    return fmt::format("step {}: without the requests that failed, the plan is another",
                       plan_.number);
}

CoordinatorRig::Problem CoordinatorRig::applyToReplica() {
    const auto decoded = StepPlan::decode(plan_.encode(), config_.limits);
    if (!decoded) return decoded.error().message;
    if (const auto applied = replica_.apply(*decoded); !applied) return applied.error().message;
    const auto contexts = config_.limits.contexts;
    for (const TableRecord& record : decoded->tables) {
        places_[placeIndex(record.slot, record.group * contexts + record.context, record.logical)] =
            {record.tier, record.block};
    }
    return std::nullopt;
}

// The copies, then what append reads and writes for the runs.
CoordinatorRig::Problem CoordinatorRig::runInMemory() {
    memory_.execute(plan_.copies);
    for (std::size_t i = 0; i < plan_.runs.size(); ++i) {
        const RunRecord& run = plan_.runs[i];
        const auto& [id, tokens] = model_.runs()[i];
        const std::int64_t length = model_.sequences().at(id).length;
        if (run.slot != id % config_.limits.max_sequences || run.rows != tokens ||
            run.first_position != length) {
            return fmt::format("run {} of step {} is not what was asked", i, plan_.number);
        }
        if (auto problem = checkMemory(id)) return problem;
        for (int pool = 0; pool < model_.pools(); ++pool) {
            const int context = pool % config_.limits.contexts;
            const std::int64_t size = model_.blockSize(pool);
            std::int64_t first = ownedTokens(length, run.slot, context, config_.limits.contexts);
            const std::int64_t end =
                ownedTokens(length + tokens, run.slot, context, config_.limits.contexts);
            while (first < end) {
                const std::int64_t logical = first / size;
                const std::int64_t stop = std::min(end, (logical + 1) * size);
                const Place& place = places_[placeIndex(run.slot, pool, logical)];
                if (place.tier != Tier::device ||
                    !memory_.write(pool, place.block, id, logical, first % size,
                                   stop - logical * size)) {
                    return fmt::format("sequence {} cannot write block {}", id, logical);
                }
                first = stop;
            }
        }
    }
    return std::nullopt;
}

CoordinatorRig::Problem CoordinatorRig::checkAll() const {
    if (const auto broken = coordinator_.checkInvariants(); !broken) return broken.error().message;
    if (coordinator_.offloadedBlocks() != coverage_.offloaded ||
        coordinator_.restoredBlocks() != coverage_.restored ||
        coordinator_.distinctOffloadedBlocks() !=
            static_cast<std::int64_t>(ever_offloaded_.size())) {
        return "the copies are counted wrong";
    }
    if (coordinator_.digest() != digestFromScratch()) {
        return "the digest is not that of the tables";
    }
    if (auto problem = checkTables()) return problem;
    for (int pool = 0; pool < model_.pools(); ++pool) {
        const int group = pool / config_.limits.contexts;
        const int context = pool % config_.limits.contexts;
        if (coordinator_.freeBlocks(Tier::device, group, context) != model_.freeDevice(pool) ||
            coordinator_.freeBlocks(Tier::host, group, context) != model_.freeHost(pool)) {
            return fmt::format("pool {}: the free blocks are counted wrong", pool);
        }
    }
    for (const auto& [id, sequence] : model_.sequences()) {
        const auto length = coordinator_.length(SequenceId{id});
        if (!length || *length != sequence.length) {
            return fmt::format("sequence {}: another length", id);
        }
        if (auto problem = checkMemory(id)) return problem;
    }
    return std::nullopt;
}

// Each sequence has its blocks, device ones first, as many in each tier as the model says; nobody
// else has them; and nothing else is in the tables.
CoordinatorRig::Problem CoordinatorRig::checkTables() const {
    std::set<std::tuple<int, Tier, std::int32_t>> owned;
    std::int64_t expected = 0;
    for (const auto& [id, sequence] : model_.sequences()) {
        const std::int32_t slot = id % config_.limits.max_sequences;
        for (int pool = 0; pool < model_.pools(); ++pool) {
            const auto& share = sequence.shares[static_cast<std::size_t>(pool)];
            expected += share.device + share.host;
            for (std::int64_t logical = 0; logical < most_logical_; ++logical) {
                const Place& place = places_[placeIndex(slot, pool, logical)];
                const std::int64_t held = logical - share.behind;
                const Tier tier = held < 0                           ? Tier::none
                                  : held < share.device              ? Tier::device
                                  : held < share.device + share.host ? Tier::host
                                                                     : Tier::none;
                if (place.tier != tier) {
                    return fmt::format("sequence {}, pool {}: block {} is in another tier", id,
                                       pool, logical);
                }
                if (tier != Tier::none && !owned.insert({pool, tier, place.block}).second) {
                    return fmt::format("pool {}: block {} is owned twice", pool, place.block);
                }
            }
        }
    }
    const auto used = std::count_if(places_.begin(), places_.end(),
                                    [](const Place& place) { return place.tier != Tier::none; });
    if (used != expected) return "a released sequence has blocks";
    return std::nullopt;
}

CoordinatorRig::Problem CoordinatorRig::checkMemory(std::int32_t id) const {
    const std::int32_t slot = id % config_.limits.max_sequences;
    const std::int64_t length = model_.sequences().at(id).length;
    for (int pool = 0; pool < model_.pools(); ++pool) {
        const std::int64_t size = model_.blockSize(pool);
        const std::int64_t tokens =
            ownedTokens(length, slot, pool % config_.limits.contexts, config_.limits.contexts);
        for (std::int64_t logical = firstSeenBlock(slot, pool, length); logical * size < tokens;
             ++logical) {
            const Place& place = places_[placeIndex(slot, pool, logical)];
            if (!memory_.holds(pool, place.tier, place.block, id, logical,
                               std::min(size, tokens - logical * size))) {
                return fmt::format("step {}: block {} of sequence {} holds something else",
                                   plan_.number, logical, id);
            }
        }
    }
    return std::nullopt;
}

// The block of the first owned token that the token at position `length` sees, or past the end.
std::int64_t CoordinatorRig::firstSeenBlock(std::int32_t slot, int pool,
                                            std::int64_t length) const {
    const int contexts = config_.limits.contexts;
    const std::int64_t window = model_.window(pool);
    const std::int64_t first = window == 0 || length < window ? 0 : length - (window - 1);
    return ownedTokens(first, slot, pool % contexts, contexts) / model_.blockSize(pool);
}

std::uint64_t CoordinatorRig::digestFromScratch() const {
    MetadataDigest digest;
    const int contexts = config_.limits.contexts;
    for (const auto& [id, sequence] : model_.sequences()) {
        const std::int32_t slot = id % config_.limits.max_sequences;
        digest.addSequence(slot, id, sequence.max_length, sequence.length);
        for (int pool = 0; pool < model_.pools(); ++pool) {
            for (std::int64_t logical = 0; logical < most_logical_; ++logical) {
                const Place& place = places_[placeIndex(slot, pool, logical)];
                digest.addEntry({.slot = slot,
                                 .group = static_cast<std::int16_t>(pool / contexts),
                                 .context = static_cast<std::int16_t>(pool % contexts),
                                 .logical = static_cast<std::int32_t>(logical),
                                 .tier = place.tier,
                                 .block = place.block});
            }
        }
    }
    return digest.value();
}

std::size_t CoordinatorRig::placeIndex(std::int32_t slot, int pool, std::int64_t logical) const {
    return static_cast<std::size_t>((std::int64_t{slot} * model_.pools() + pool) * most_logical_ +
                                    logical);
}

std::vector<std::int32_t> CoordinatorRig::idsBySlot() const {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(config_.limits.max_sequences), -1);
    for (const auto& [id, sequence] : model_.sequences()) {
        ids[static_cast<std::size_t>(id % config_.limits.max_sequences)] = id;
    }
    return ids;
}

// Victims were there before the step. Those that the step released were not copied.
void CoordinatorRig::noteOffloads(const std::vector<std::int32_t>& ids_before) {
    for (const TableRecord& record : plan_.tables) {
        const std::int32_t id = ids_before[static_cast<std::size_t>(record.slot)];
        if (model_.sequences().count(id) == 0) continue;
        if (record.tier == Tier::none) ++coverage_.left_behind;
        if (record.tier != Tier::host) continue;
        ever_offloaded_.insert(
            {id, record.group * config_.limits.contexts + record.context, record.logical});
    }
}

void CoordinatorRig::countCopies() {
    std::vector<CopyRecord::Direction> turns;
    std::int64_t to_host = 0;
    for (const CopyRecord& copy : plan_.copies) {
        ++(copy.direction == CopyRecord::Direction::offload ? coverage_.offloaded
                                                            : coverage_.restored);
        to_host += copy.direction == CopyRecord::Direction::offload ? 1 : 0;
        if (copy.group != 0 || copy.context != 0) continue;
        if (turns.empty() || turns.back() != copy.direction) turns.push_back(copy.direction);
    }
    if (turns.size() > 2) ++coverage_.alternating_plans;
    const auto entered_host = std::count_if(plan_.tables.begin(), plan_.tables.end(),
                                            [](auto& entry) { return entry.tier == Tier::host; });
    coverage_.cancelled_copies += entered_host - to_host;
}

}  // namespace kvgrid
