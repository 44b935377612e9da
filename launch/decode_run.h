// Sequences that decode in a Cache with data from a Workload: what verify and bench share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <kvgrid/cache.h>
#include <kvgrid/error.h>
#include <kvgrid/process.h>

#include "launch/workload.h"

namespace kvgrid::launch {

// New tokens of one sequence in a step.
struct RunTokens {
    std::size_t sequence = 0;  // its number in the DecodeRun
    std::int64_t tokens = 1;
    std::int64_t drafted = 0;  // the last so many are made up, attended over and then dropped
};

struct StepOptions {
    Requests before = {};       // pause and resume, ahead of the runs
    bool append_twice = false;  // every append is repeated
    bool abandon = false;       // not advanced: all of it is dropped
    bool poison = false;        // outputs are NaN before attend writes them
};

// Seconds of this rank. step_s is from before begin until after advance.
struct StepTimes {
    double step_s = 0;
    CacheTiming parts;
};

class DecodeRun {
public:
    // Tokens of a step that fills a context: max_step_tokens allows as many.
    static constexpr std::int64_t fill_tokens = 512;

    // Outputs of one layer: [rows, query heads of all ranks, head_dim], rows as in step.rows().
    using OnOutput = std::function<void(const Step& step, int layer, std::span<const float> out)>;

    // Collective; config.output_format is fp32. Failures as of Cache::create.
    [[nodiscard]] static Result<DecodeRun> create(Process& process, const CacheConfig& config,
                                                  std::uint64_t seed);

    // Collective. Room for a sequence of at most max_length tokens whose data has this key. Its
    // number counts from 0. does_not_fit: the cache's answer.
    [[nodiscard]] Result<void> addSequence(std::int64_t key, std::int64_t max_length);
    // Collective. Ends all sequences.
    void releaseSequences();

    // Collective. Appends without attending until the sequence has `length` tokens. `filled` is
    // told the tokens so far. does_not_fit: the cache's answer.
    [[nodiscard]] Result<void> fill(std::size_t sequence, std::int64_t length,
                                    const StepOptions& options = {},
                                    const std::function<void(std::int64_t)>& filled = {});

    // Collective. One step; on_output sees the gathered outputs layer by layer. Inputs are made
    // and ranks meet before the clock starts. does_not_fit: the cache's answer; nothing changed.
    [[nodiscard]] Result<StepTimes> step(std::span<const RunTokens> runs,
                                         const StepOptions& options, const OnOutput& on_output);

    // Collective. Rank 0's committed lengths reach the other ranks, whose gather needs them. Throws
    // Error when they are not what was committed.
    void settle();

    // From now on rank 0 appends wrong values: see planted_fault.h.
    void plantFault() { planted_ = true; }

    [[nodiscard]] Cache& cache() noexcept { return cache_; }
    [[nodiscard]] const CacheHeads& heads() const noexcept { return heads_; }
    [[nodiscard]] SequenceId id(std::size_t sequence) const { return sequences_[sequence].id; }
    [[nodiscard]] std::int64_t length(std::size_t sequence) const {
        return sequences_[sequence].length;
    }

private:
    struct Sequence {
        SequenceId id{};
        std::int64_t key = 0;
        std::int64_t length = 0;  // committed tokens
    };
    struct RowInput {
        std::int64_t key = 0;
        std::int64_t position = 0;
        bool drafted = false;
    };
    // Of one layer: [rows, heads of this rank, head_dim].
    struct LayerInput {
        std::vector<std::byte> q, k, v;
    };

    DecodeRun(Process& process, Cache cache, std::uint64_t seed);

    [[nodiscard]] std::vector<RowInput> rowsOf(std::span<const RunTokens> runs) const;
    void makeInput(int layer, std::span<const RowInput> rows, bool with_q, LayerInput& input) const;
    void append(const Step& step, int layer, const LayerInput& input, const StepOptions& options);
    void commit(const Step& step, std::span<const RunTokens> runs);

    Process* process_;
    Cache cache_;
    CacheHeads heads_;
    Workload workload_;
    Workload drafts_;  // data of made-up tokens
    bool planted_ = false;
    std::vector<Sequence> sequences_;
    std::vector<LayerInput> inputs_;  // of the step's layers
    std::vector<float> out_;
};

}  // namespace kvgrid::launch
