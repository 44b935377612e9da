#include "tests/src/coordinator_model.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "shard/ownership.h"

namespace kvgrid {

CoordinatorModel::CoordinatorModel(const CoordinatorConfig& config) : config_(config) {}

void CoordinatorModel::beginStep() {
    // Of one step, the later runs are the colder ones.
    for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
        Sequence& sequence = sequences_.at(run->id);
        sequence.in_step = false;
        sequence.last_use = ++clock_;
        slideWindows(run->id);
    }
    runs_.clear();
}

CoordinatorModel::Status CoordinatorModel::answer(const Request& request, std::int32_t given) {
    using Kind = Request::Kind;
    if (request.kind == Kind::allocate) return allocate(request, given);
    const auto id = static_cast<std::int32_t>(request.sequence);
    const auto found = sequences_.find(id);
    if (found == sequences_.end()) return Status::never;
    Sequence& sequence = found->second;
    switch (request.kind) {
    case Kind::allocate:
        break;
    case Kind::release:
        if (sequence.in_step) return Status::never;
        sequences_.erase(found);
        return Status::done;
    case Kind::pause:
    case Kind::resume: {
        const bool paused = request.kind == Kind::pause;
        if (sequence.paused != paused && !sequence.in_step) sequence.last_use = ++clock_;
        sequence.paused = paused;
        return Status::done;
    }
    case Kind::run:
        return run(id, request.tokens);
    }
    return Status::never;
}

void CoordinatorModel::advance(std::span<const std::int64_t> accepted) {
    for (std::size_t i = 0; i < runs_.size(); ++i)
        sequences_.at(runs_[i].id).length += accepted[i];
}

std::int64_t CoordinatorModel::freeDevice(int pool) const {
    std::int64_t free = limitsOf(pool).device_blocks;
    for (const auto& [id, sequence] : sequences_) {
        free -= sequence.shares[static_cast<std::size_t>(pool)].device;
    }
    return free;
}

std::int64_t CoordinatorModel::freeHost(int pool) const {
    std::int64_t free = limitsOf(pool).host_blocks;
    for (const auto& [id, sequence] : sequences_) {
        free -= sequence.shares[static_cast<std::size_t>(pool)].host;
    }
    return free;
}

std::int64_t CoordinatorModel::blocksOf(std::int32_t id, int pool, std::int64_t tokens) const {
    return (ownedOf(id, pool, tokens) + blockSize(pool) - 1) / blockSize(pool);
}

void CoordinatorModel::slideWindows(std::int32_t id) {
    Sequence& sequence = sequences_.at(id);
    for (int pool = 0; pool < pools(); ++pool) {
        Share& share = sequence.shares[static_cast<std::size_t>(pool)];
        const std::int64_t behind = blocksBehind(id, pool, sequence.length);
        share.device -= behind - share.behind;
        share.behind = behind;
    }
}

std::int64_t CoordinatorModel::ownedOf(std::int32_t id, int pool, std::int64_t tokens) const {
    const PlanLimits& limits = config_.limits;
    return ownedTokens(tokens, id % limits.max_sequences, pool % limits.contexts, limits.contexts);
}

std::int64_t CoordinatorModel::blocksBehind(std::int32_t id, int pool, std::int64_t length) const {
    // The token at position `length` sees as many as the window, its own included.
    const std::int64_t behind =
        window(pool) == 0 ? 0 : std::max<std::int64_t>(0, length + 1 - window(pool));
    return ownedOf(id, pool, behind) / blockSize(pool);
}

// Grows it token by token.
bool CoordinatorModel::couldEverFit(std::int64_t max_length) {
    const auto [known, is_new] = fits_.try_emplace(max_length, true);
    for (std::int32_t slot = 0; is_new && slot < config_.limits.contexts; ++slot) {
        for (int pool = 0; pool < pools(); ++pool) {
            for (std::int64_t length = 0; length < max_length; ++length) {
                const std::int64_t held =
                    blocksOf(slot, pool, length + 1) - blocksBehind(slot, pool, length);
                if (held > limitsOf(pool).device_blocks) known->second = false;
            }
        }
    }
    return known->second;
}

CoordinatorModel::Status CoordinatorModel::allocate(const Request& request, std::int32_t given) {
    const PlanLimits& limits = config_.limits;
    if (request.tokens <= 0 || request.tokens > limits.max_sequence_length) return Status::never;
    if (!couldEverFit(request.tokens)) return Status::never;
    if (static_cast<int>(sequences_.size()) == limits.max_sequences) return Status::wait;
    sequences_[given] = {.max_length = request.tokens,
                         .priority = request.priority,
                         .shares = std::vector<Share>(static_cast<std::size_t>(pools()))};
    return Status::done;
}

CoordinatorModel::Status CoordinatorModel::run(std::int32_t id, std::int64_t tokens) {
    const PlanLimits& limits = config_.limits;
    Sequence& sequence = sequences_.at(id);
    std::int64_t taken = 0;
    for (const Run& other : runs_)
        taken += other.tokens;
    if (tokens <= 0 || tokens > limits.max_step_tokens || tokens > limits.max_sequence_length ||
        sequence.length + tokens > sequence.max_length || sequence.paused || sequence.in_step) {
        return Status::never;
    }
    for (int pool = 0; pool < pools(); ++pool) {
        const std::int64_t behind = sequence.shares[static_cast<std::size_t>(pool)].behind;
        if (blocksOf(id, pool, sequence.length + tokens) - behind > limitsOf(pool).device_blocks)
            return Status::never;
    }
    if (taken + tokens > limits.max_step_tokens) return Status::wait;
    const auto before = sequences_;
    sequence.in_step = true;
    for (int pool = 0; pool < pools(); ++pool) {
        if (bringIn(id, pool, sequence.length + tokens)) continue;
        sequences_ = before;
        return Status::wait;
    }
    runs_.push_back({.id = id, .tokens = tokens});
    return Status::done;
}

// Moves one block at a time for as long as one can move.
bool CoordinatorModel::bringIn(std::int32_t id, int pool, std::int64_t length) {
    Share& share = sequences_.at(id).shares[static_cast<std::size_t>(pool)];
    const std::int64_t held = share.behind + share.device + share.host;
    std::int64_t fresh = std::max<std::int64_t>(0, blocksOf(id, pool, length) - held);
    std::int64_t offload = fresh + share.host - freeDevice(pool);
    while (share.host > 0 || fresh > 0) {
        if (share.host > 0 && freeDevice(pool) > 0) {
            --share.host;
            ++share.device;
        } else if (offload > 0) {
            if (freeHost(pool) == 0 || !offloadColdest(pool)) return false;
            --offload;
        } else if (share.host == 0 && freeDevice(pool) > 0) {
            --fresh;
            ++share.device;
        } else {
            return false;
        }
    }
    return true;
}

bool CoordinatorModel::offloadColdest(int pool) {
    const auto rank = [](const Sequence& sequence) {
        return std::tuple(!sequence.paused, sequence.priority, sequence.last_use);
    };
    Sequence* coldest = nullptr;
    for (auto& [id, sequence] : sequences_) {
        if (sequence.in_step || sequence.shares[static_cast<std::size_t>(pool)].device == 0)
            continue;
        if (coldest == nullptr || rank(sequence) < rank(*coldest)) coldest = &sequence;
    }
    if (coldest == nullptr) return false;
    Share& share = coldest->shares[static_cast<std::size_t>(pool)];
    --share.device;
    ++share.host;
    return true;
}

}  // namespace kvgrid
