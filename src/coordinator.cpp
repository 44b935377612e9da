#include "src/coordinator.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "kernels/attention_state.h"
#include "shard/ownership.h"
#include "src/coordinator_state.h"

namespace kvgrid {

namespace {

constexpr std::int32_t id_range = 1 << 30;  // ids stay below: far from the end of 32 bits

Answer never(std::string why) {
    return {.status = Answer::Status::never, .why = std::move(why)};
}

Answer wait(std::string why) {
    return {.status = Answer::Status::wait, .why = std::move(why)};
}

void checkConfig(const CoordinatorConfig& config) {
    const PlanLimits& limits = config.limits;
    const std::size_t groups = limits.groups.size();
    const auto outside = [](std::int64_t value, std::int64_t least, std::int64_t most) {
        return value < least || value > most;
    };
    if (outside(limits.max_sequences, 1, id_range) || outside(limits.contexts, 1, lane_count) ||
        lane_count % limits.contexts != 0 || groups != config.block_sizes.size() ||
        groups != config.windows.size()) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("coordinator: {} sequences, {} contexts, {} groups with {} block "
                                "sizes and {} windows",
                                limits.max_sequences, limits.contexts, groups,
                                config.block_sizes.size(), config.windows.size()));
    }
    const std::int64_t owned = mostOwnedTokens(limits.max_sequence_length, limits.contexts);
    for (std::size_t i = 0; i < groups; ++i) {
        const GroupLimits& group = limits.groups[i];
        const std::int64_t block_size = config.block_sizes[i];
        if (outside(group.device_blocks, 0, INT32_MAX) ||
            outside(group.host_blocks, 0, INT32_MAX) ||
            outside(config.windows[i], 0, limits.max_sequence_length)) {
            throw Error(ErrorCode::invalid_argument,
                        fmt::format("coordinator: layer group {} with {} device and {} host "
                                    "blocks, window {}",
                                    i, group.device_blocks, group.host_blocks, config.windows[i]));
        }
        if (block_size < 1 || (owned - 1) / block_size >= group.blocks_per_sequence) {
            throw Error(ErrorCode::invalid_argument,
                        fmt::format("coordinator: {} tokens are not {} blocks of {}", owned,
                                    group.blocks_per_sequence, block_size));
        }
    }
}

}  // namespace

// ---- State: a step ----

Coordinator::State::State(const CoordinatorConfig& config)
    : limits(config.limits),
      generations(id_range / config.limits.max_sequences),
      sequences(static_cast<std::size_t>(limits.max_sequences)),
      cold(limits.max_sequences) {
    for (std::size_t group = 0; group < limits.groups.size(); ++group) {
        const auto [per_sequence, device_blocks, host_blocks] = limits.groups[group];
        for (int context = 0; context < limits.contexts; ++context) {
            pools.push_back({
                .group = static_cast<int>(group),
                .context = context,
                .block_size = config.block_sizes[group],
                .window = config.windows[group],
                .device = BlockAllocator(device_blocks),
                .host = BlockAllocator(host_blocks),
                .filled_by =
                    std::vector<std::int32_t>(static_cast<std::size_t>(host_blocks), no_copy),
            });
        }
    }
    tables.resize(sequences.size() * pools.size());
    demands.resize(pools.size());
    for (std::int32_t slot = limits.max_sequences; slot > 0; --slot)
        free_slots.push_back(slot - 1);
}

void Coordinator::State::beginStep() {
    plan = {};
    plan.number = ++number;
    plan.sequences = std::exchange(grown, {});
    for (const SequenceRecord& record : plan.sequences) {
        if (record.length >= sequenceAt(record.slot).slides_at) slideWindows(record.slot);
    }
    // From the last to the first: when a batch that ran together does not fit any more, the end of
    // it waits. The other way round each run would take its blocks from the next one in line.
    for (std::size_t i = runs.size(); i > 0; --i) {
        const std::int32_t slot = runs[i - 1].slot;
        Sequence& sequence = sequenceAt(slot);
        sequence.in_step = false;
        if (sequence.device_blocks > 0) cold.put(slot, sequence.paused, sequence.priority);
    }
    for (Pool& pool : pools)
        pool.pinned = 0;
    runs.clear();
    notes.clear();
    tokens_left = limits.max_step_tokens;
    open = true;
}

StepPlan Coordinator::State::finishStep() {
    for (const CopyRecord& copy : plan.copies) {
        pools[limits.poolOf(copy.group, copy.context)]
            .filled_by[static_cast<std::size_t>(copy.host_block)] = no_copy;
    }
    dropCancelledCopies();
    plan.runs = runs;
    plan.digest = digest.value();
    return std::exchange(plan, {});
}

// ---- State: requests ----

std::int32_t Coordinator::State::slotOf(SequenceId sequence) const noexcept {
    const auto id = static_cast<std::int32_t>(sequence);
    if (id < 0) return free_slot;
    const std::int32_t slot = id % limits.max_sequences;
    return sequenceAt(slot).id == id ? slot : free_slot;
}

Answer Coordinator::State::answer(const Request& request) {
    using Kind = Request::Kind;
    if (request.kind == Kind::allocate) return allocate(request);
    Answer result;
    const std::int32_t slot = slotOf(request.sequence);
    if (slot == free_slot) {
        result = never(fmt::format("sequence {}: unknown, or released",
                                   static_cast<std::int32_t>(request.sequence)));
    } else if (request.kind == Kind::release) {
        result = release(slot);
    } else if (request.kind == Kind::pause || request.kind == Kind::resume) {
        result = setPaused(slot, request.kind == Kind::pause);
    } else if (request.kind == Kind::run) {
        result = run(slot, request.tokens);
    } else {
        result = never(fmt::format("kind {}: unknown", static_cast<int>(request.kind)));
    }
    result.sequence = request.sequence;
    return result;
}

Answer Coordinator::State::allocate(const Request& request) {
    constexpr SequenceId nobody{-1};
    const auto refuse = [](Answer refused) {
        refused.sequence = nobody;
        return refused;
    };
    const std::int64_t max_length = request.tokens;
    if (max_length < 1 || max_length > limits.max_sequence_length) {
        return refuse(never(fmt::format("max_length {}: 1 to {}, the max_sequence_length",
                                        max_length, limits.max_sequence_length)));
    }
    for (const Pool& pool : pools) {
        const std::int64_t blocks = mostBlocksHeld(pool, max_length);
        if (blocks > pool.device.total()) {
            return refuse(never(
                fmt::format("max_length {}: needs {} blocks of {} tokens, the device tier has {}",
                            max_length, blocks, pool.block_size, pool.device.total())));
        }
    }
    if (free_slots.empty()) {
        return refuse(
            wait(fmt::format("max_sequences {}: all are allocated", limits.max_sequences)));
    }

    const std::int32_t slot = free_slots.back();
    free_slots.pop_back();
    Sequence& sequence = sequenceAt(slot);
    const std::int32_t id = slot + limits.max_sequences * sequence.generation;
    sequence = {.id = id,
                .generation = (sequence.generation + 1) % generations,
                .priority = request.priority,
                .max_length = max_length};
    sequence.covered = coveredLength(slot);
    sequence.slides_at = slidingLength(slot);
    digest.addSequence(slot, id, max_length, 0);
    plan.sequences.push_back({.kind = SequenceRecord::Kind::allocate,
                              .slot = slot,
                              .sequence = id,
                              .max_length = max_length});
    return {.status = Answer::Status::done, .sequence = SequenceId{id}, .why = {}};
}

Answer Coordinator::State::release(std::int32_t slot) {
    Sequence& sequence = sequenceAt(slot);
    if (sequence.in_step) {
        return never(
            fmt::format("sequence {}: runs in this step; release it in a later one", sequence.id));
    }
    dropBlocks(slot);
    cold.remove(slot);
    digest.removeSequence(slot, sequence.id, sequence.max_length, sequence.length);
    plan.sequences.push_back(
        {.kind = SequenceRecord::Kind::release, .slot = slot, .sequence = sequence.id});
    sequence.id = free_slot;
    free_slots.push_back(slot);
    return {};
}

Answer Coordinator::State::setPaused(std::int32_t slot, bool paused) {
    Sequence& sequence = sequenceAt(slot);
    if (sequence.paused == paused) return {};
    sequence.paused = paused;
    if (cold.contains(slot)) cold.put(slot, paused, sequence.priority);
    return {};
}

std::optional<std::string> Coordinator::State::misuse(const Sequence& sequence,
                                                      std::int64_t tokens) const {
    if (tokens < 1) return fmt::format("sequence {}: {} tokens, at least 1", sequence.id, tokens);
    if (tokens > sequence.max_length - sequence.length) {
        return fmt::format("sequence {}: {} + {} tokens exceed its max_length {}", sequence.id,
                           sequence.length, tokens, sequence.max_length);
    }
    if (tokens > limits.max_step_tokens) {
        return fmt::format("sequence {}: {} tokens exceed max_step_tokens {}", sequence.id, tokens,
                           limits.max_step_tokens);
    }
    if (sequence.paused) return fmt::format("sequence {}: is paused", sequence.id);
    if (sequence.in_step) return fmt::format("sequence {}: runs twice in a step", sequence.id);
    return std::nullopt;
}

Answer Coordinator::State::run(std::int32_t slot, std::int64_t tokens) {
    Sequence& sequence = sequenceAt(slot);
    if (auto why = misuse(sequence, tokens)) return never(*std::move(why));
    const std::int64_t length = sequence.length + tokens;
    const bool moves = sequence.host_blocks > 0 || length > sequence.covered;
    if (moves) {
        if (auto why = neverFits(slot, length)) return never(*std::move(why));
    }
    if (tokens > tokens_left) {
        return wait(fmt::format("sequence {}: {} tokens, {} are left of max_step_tokens {}",
                                sequence.id, tokens, tokens_left, limits.max_step_tokens));
    }
    if (moves) {
        if (auto why = bringIn(slot, length)) return wait(*std::move(why));
    }
    cold.remove(slot);
    for (Pool& pool : pools)
        pool.pinned += tableOf(pool, slot).onDevice();
    sequence.in_step = true;
    tokens_left -= tokens;
    runs.push_back({.slot = slot,
                    .rows = static_cast<std::int32_t>(tokens),
                    .first_position = sequence.length});
    return {};
}

// ---- Coordinator ----

Coordinator::Coordinator(const CoordinatorConfig& config) {
    checkConfig(config);
    state_ = std::make_unique<State>(config);
}

Coordinator::Coordinator(Coordinator&&) noexcept = default;
Coordinator& Coordinator::operator=(Coordinator&&) noexcept = default;
Coordinator::~Coordinator() = default;

StepPlan Coordinator::plan(std::span<const Request> requests) {
    State& state = *state_;
    state.beginStep();
    state.runs.reserve(requests.size());
    state.plan.answers.reserve(requests.size());
    for (const Request& request : requests) {
        const Answer answer = state.answer(request);
        std::string& text = state.plan.text;
        state.plan.answers.push_back({.status = static_cast<std::int32_t>(answer.status),
                                      .sequence = static_cast<std::int32_t>(answer.sequence),
                                      .why_offset = static_cast<std::uint32_t>(text.size()),
                                      .why_bytes = static_cast<std::uint32_t>(answer.why.size())});
        text += answer.why;
    }
    return state.finishStep();
}

Result<void> Coordinator::advance(std::span<const std::int64_t> accepted) {
    State& state = *state_;
    if (!state.open) {
        return failure(ErrorCode::invalid_argument, "advance: no step is open to commit");
    }
    if (accepted.size() != state.runs.size()) {
        return failure(ErrorCode::invalid_argument,
                       fmt::format("accepted: {} counts for the {} runs of step {}",
                                   accepted.size(), state.runs.size(), state.number));
    }
    for (std::size_t i = 0; i < accepted.size(); ++i) {
        if (accepted[i] < 0 || accepted[i] > state.runs[i].rows) {
            return failure(
                ErrorCode::invalid_argument,
                fmt::format("accepted[{}]: {} of {} tokens", i, accepted[i], state.runs[i].rows));
        }
    }
    state.open = false;
    state.grown.reserve(accepted.size());
    for (std::size_t i = 0; i < accepted.size(); ++i) {
        const std::int32_t slot = state.runs[i].slot;
        State::Sequence& sequence = state.sequenceAt(slot);
        state.digest.removeSequence(slot, sequence.id, sequence.max_length, sequence.length);
        sequence.length += accepted[i];
        state.digest.addSequence(slot, sequence.id, sequence.max_length, sequence.length);
        // Of every run, also one that did not grow: a rank may have committed it ahead of this.
        state.grown.push_back({.kind = SequenceRecord::Kind::length,
                               .slot = slot,
                               .sequence = sequence.id,
                               .length = sequence.length});
    }
    return {};
}

Result<std::int64_t> Coordinator::length(SequenceId sequence) const {
    const std::int32_t slot = state_->slotOf(sequence);
    if (slot == State::free_slot) {
        return failure(
            ErrorCode::invalid_argument,
            fmt::format("sequence {}: unknown, or released", static_cast<std::int32_t>(sequence)));
    }
    return state_->sequenceAt(slot).length;
}

std::int64_t Coordinator::freeBlocks(Tier tier, int group, int context) const {
    const PlanLimits& limits = state_->limits;
    const auto groups = static_cast<int>(limits.groups.size());
    if (group < 0 || group >= groups || context < 0 || context >= limits.contexts) return 0;
    const State::Pool& pool = state_->pools[limits.poolOf(group, context)];
    if (tier == Tier::none) return 0;
    return tier == Tier::device ? pool.device.free() : pool.host.free();
}

std::int64_t Coordinator::offloadedBlocks() const noexcept {
    return state_->offloaded;
}

std::int64_t Coordinator::restoredBlocks() const noexcept {
    return state_->restored;
}

std::int64_t Coordinator::distinctOffloadedBlocks() const noexcept {
    return state_->distinct_offloaded;
}

std::uint64_t Coordinator::digest() const noexcept {
    return state_->digest.value();
}

}  // namespace kvgrid
