// Sequences that decode in a Cache with data from a Workload: what verify and bench share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include <kvgrid/cache.h>
#include <kvgrid/device_memory.h>
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
    bool timed = false;         // the parts, by events: see Cache::setTiming
};

// Seconds of this rank. step_s is from before begin until the device is done after advance;
// launch_s, within it, from behind begin until the host has enqueued append, attend and join of all
// layers. Where they are not asynchronous (isAsynchronous), that is until they are done.
struct StepTimes {
    double step_s = 0;
    double launch_s = 0;
    CacheTiming parts;
};

class DecodeRun {
public:
    // Tokens of a step that fills a context: max_step_tokens allows as many.
    static constexpr std::int64_t fill_tokens = 512;

    // Outputs of one layer: [rows, query heads of all ranks, head_dim], rows as in step.rows(); the
    // same values as in the output format.
    using OnOutput = std::function<void(const Step& step, int layer, std::span<const float> out)>;

    // Collective. graph: steps of as many rows are captured once and then launched as a CUDA graph;
    // the first of them runs eagerly. Failures as of Cache::create.
    [[nodiscard]] static Result<DecodeRun> create(Process& process, const CacheConfig& config,
                                                  std::uint64_t seed, bool graph);

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

    // Collective. One step; on_output, if any, sees the gathered outputs layer by layer when all is
    // done. Inputs are on the device and ranks meet before the clock starts. does_not_fit: the
    // cache's answer; nothing changed.
    [[nodiscard]] Result<StepTimes> step(std::span<const RunTokens> runs,
                                         const StepOptions& options, const OnOutput& on_output);

    // Collective. Rank 0's committed lengths reach the other ranks, whose gather needs them. Throws
    // Error when they are not what was committed.
    void settle();

    // K and V as the cache gives them back, 16-bit: [length, KV heads of this rank, head_dim].
    struct KeysValues {
        std::vector<std::uint16_t> k, v;
    };
    [[nodiscard]] KeysValues stored(std::size_t sequence, int layer);

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
    // q, k and v of some layers on the device, each [rows, heads of this rank, head_dim], with room
    // for a number of rows.
    struct Inputs {
        DeviceMemory memory;
        std::int64_t rows = 0;
        std::int64_t q_bytes = 0, kv_bytes = 0;  // of the room of one layer

        [[nodiscard]] std::int64_t layerBytes() const noexcept { return q_bytes + 2 * kv_bytes; }
        [[nodiscard]] std::byte* q(int layer) const { return memory.data() + layer * layerBytes(); }
        [[nodiscard]] std::byte* k(int layer) const { return q(layer) + q_bytes; }
        [[nodiscard]] std::byte* v(int layer) const { return k(layer) + kv_bytes; }
    };
    struct GraphKey {
        std::int64_t rows;
        bool append_twice, timed;
        auto operator<=>(const GraphKey&) const = default;
    };

    DecodeRun(Process& process, Cache cache, std::uint64_t seed, bool graph);

    // Of every layer: what the model has learned, drawn from the seed.
    void setSinks();
    [[nodiscard]] std::vector<RowInput> rowsOf(std::span<const RunTokens> runs) const;
    [[nodiscard]] Inputs makeRoom(int layers, std::int64_t rows, bool with_q) const;
    // Into the room of one layer. `layer` is whose data it is.
    void makeInput(int layer, std::span<const RowInput> rows, Inputs& inputs, int room);
    void reserve(std::int64_t rows);
    void append(const Step& step, int layer, const Inputs& inputs, int room,
                const StepOptions& options, cudaStream_t stream = nullptr);
    // All layers of the step: eagerly, or by a graph.
    void run(const Step& step, const StepOptions& options);
    void runEagerly(const Step& step, const StepOptions& options, cudaStream_t stream);
    [[nodiscard]] std::byte* outputOf(int layer) const;
    void commit(const Step& step, std::span<const RunTokens> runs);

    Process* process_;
    Cache cache_;
    CacheHeads heads_;
    Workload workload_;
    Workload drafts_;  // data of made-up tokens
    bool planted_ = false;
    std::vector<Sequence> sequences_;
    bool graph_;
    std::optional<Inputs> fill_input_;  // of one layer
    std::optional<Inputs> inputs_;      // of all layers of a step
    std::optional<DeviceMemory> out_;   // [layer][rows of inputs_, query heads, head_dim]
    std::map<GraphKey, StepGraph> graphs_;
    std::vector<std::byte> host_;  // on the way to or from the device
};

}  // namespace kvgrid::launch
