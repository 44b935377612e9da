// What the coordinator must do, written down a second time without any of its cleverness: no free
// lists, no linked order, no incremental sums. It knows how many blocks each sequence has in each
// tier, but not which.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <kvgrid/cache.h>

#include "src/coordinator.h"

namespace kvgrid {

class CoordinatorModel {
public:
    using Status = Answer::Status;

    struct Share {                // of one sequence in one pool, in blocks
        std::int64_t behind = 0;  // freed: the window has left them
        std::int64_t device = 0;
        std::int64_t host = 0;
    };
    struct Sequence {
        std::int64_t max_length = 0;
        std::int64_t length = 0;
        int priority = 0;
        bool paused = false;
        bool in_step = false;
        std::int64_t last_use = 0;
        std::vector<Share> shares;  // [pool]
    };
    struct Run {
        std::int32_t id = 0;
        std::int64_t tokens = 0;
    };

    explicit CoordinatorModel(const CoordinatorConfig& config);

    void beginStep();
    // `given` is the id that the coordinator answered to an allocate.
    [[nodiscard]] Status answer(const Request& request, std::int32_t given);
    void advance(std::span<const std::int64_t> accepted);

    [[nodiscard]] const std::map<std::int32_t, Sequence>& sequences() const { return sequences_; }
    [[nodiscard]] const std::vector<Run>& runs() const { return runs_; }
    [[nodiscard]] std::int64_t freeDevice(int pool) const;
    [[nodiscard]] std::int64_t freeHost(int pool) const;
    [[nodiscard]] int pools() const { return static_cast<int>(config_.limits.pools()); }
    [[nodiscard]] std::int64_t blockSize(int pool) const {
        return config_.block_sizes[static_cast<std::size_t>(pool / config_.limits.contexts)];
    }
    [[nodiscard]] std::int64_t window(int pool) const {
        return config_.windows[static_cast<std::size_t>(pool / config_.limits.contexts)];
    }
    [[nodiscard]] const GroupLimits& limitsOf(int pool) const {
        return config_.limits.of(pool / config_.limits.contexts);
    }
    // Blocks that the first `tokens` of a sequence need in a pool.
    [[nodiscard]] std::int64_t blocksOf(std::int32_t id, int pool, std::int64_t tokens) const;
    // How many of them no token from position `length` on sees.
    [[nodiscard]] std::int64_t blocksBehind(std::int32_t id, int pool, std::int64_t length) const;

private:
    [[nodiscard]] std::int64_t ownedOf(std::int32_t id, int pool, std::int64_t tokens) const;
    [[nodiscard]] bool couldEverFit(std::int64_t max_length);
    [[nodiscard]] Status allocate(const Request& request, std::int32_t given);
    [[nodiscard]] Status run(std::int32_t id, std::int64_t tokens);
    void slideWindows(std::int32_t id);
    [[nodiscard]] bool bringIn(std::int32_t id, int pool, std::int64_t length);
    [[nodiscard]] bool offloadColdest(int pool);

    CoordinatorConfig config_;
    std::map<std::int32_t, Sequence> sequences_;  // by id
    std::vector<Run> runs_;
    std::map<std::int64_t, bool> fits_;  // by max_length
    std::int64_t clock_ = 0;
};

}  // namespace kvgrid
