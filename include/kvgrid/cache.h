// The sharded KV cache. Every rank makes the same calls; rank 0's arguments count where they decide
// something.
//
//   auto step = orThrow(cache.begin(requests));          // rank 0 plans, all ranks apply
//   for (int layer = 0; layer < layers; ++layer) {
//       orThrow(cache.append(step, layer, q, k, v));     // rotates, writes
//       orThrow(cache.attend(step, layer, out, Output::gathered));
//   }
//   orThrow(cache.advance(step));                        // commits the lengths, once
//
// Calls take effect in call order, on whatever streams (null: the one given to begin, and there the
// cache's own, which waits for CUDA's default stream as that waits for it). append and attend only
// enqueue; begin and advance run outside of CUDA graphs. Device and transport failures throw Error;
// the job cannot go on after one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <kvgrid/config.h>
#include <kvgrid/error.h>
#include <kvgrid/process.h>
#include <kvgrid/types.h>

namespace kvgrid {

struct Request {
    enum class Kind : std::uint8_t { allocate, release, pause, resume, run };

    Kind kind = Kind::run;
    SequenceId sequence{};  // all but allocate
    std::int64_t tokens =
        0;             // allocate: the most tokens it will ever hold; run: new tokens of this step
    int priority = 0;  // allocate: among cold sequences the lowest is offloaded first
};

// What rank 0 asks of one step, in call order.
class Requests {
public:
    Requests& allocate(std::int64_t max_length, int priority = 0);
    Requests& release(SequenceId sequence);
    Requests& pause(SequenceId sequence);  // it will not run until resumed: its blocks are cold
    Requests& resume(SequenceId sequence);
    Requests& run(SequenceId sequence, std::int64_t new_tokens = 1);

    [[nodiscard]] std::span<const Request> all() const noexcept { return requests_; }

private:
    std::vector<Request> requests_;
};

// `wait`: it does not fit now, but would with other sequences out of the way; nothing changed.
// `never`: misuse (an unknown sequence, past its max_length), or larger than the tiers; nothing
// changed.
struct Answer {
    enum class Status : std::uint8_t { done, wait, never };

    Status status = Status::done;
    SequenceId sequence{};  // allocate: the new one, or -1
    std::string why;        // empty when done
};

// One row of q, k, v and out.
struct TokenRow {
    SequenceId sequence{};
    std::int64_t position = 0;
};

// One forward pass of the running batch. A handle; only the newest one is valid.
class Step {
public:
    [[nodiscard]] std::int64_t number() const noexcept { return number_; }
    // One for each request, in call order, on every rank.
    [[nodiscard]] const std::vector<Answer>& answers() const noexcept { return answers_; }
    // Which sequence and position each token row is: the sequences whose run was answered done, in
    // call order, each with its new tokens in order.
    [[nodiscard]] const std::vector<TokenRow>& rows() const noexcept { return rows_; }
    // Sequences in the step: what `accepted` of advance counts.
    [[nodiscard]] std::int64_t runs() const noexcept { return runs_; }

private:
    friend class Cache;
    std::int64_t number_ = 0;
    std::int64_t runs_ = 0;
    std::vector<Answer> answers_;
    std::vector<TokenRow> rows_;
};

// The pools of one layer group.
struct PoolStats {
    std::int64_t device_blocks = 0;  // of each rank's pool: the least over ranks
    std::int64_t device_blocks_free = 0;
    std::int64_t host_blocks = 0;
    std::int64_t host_blocks_free = 0;
    std::int64_t block_bytes = 0;  // on one rank
};

struct CacheStats {
    std::vector<PoolStats> groups;      // as in the geometry
    std::int64_t offloaded_blocks = 0;  // copies device to host so far, all groups
    std::int64_t restored_blocks = 0;   // copies host to device so far
    std::int64_t distinct_offloaded_blocks =
        0;  // different blocks of sequences that were ever offloaded
};

// This rank's runs of heads of one layer, by their numbers in the model.
struct CacheHeads {
    int first_query_head = 0;
    int query_heads = 0;
    int first_kv_head = 0;
    int kv_heads = 0;
    int head_dim = 0;
};

struct CacheTiming {
    double begin_s = 0;   // of the host: planning, broadcast, enqueuing copies and uploads
    double append_s = 0;  // of the device, as all below
    double attend_s = 0;  // without the join
    double join_s = 0;    // conversion to the output format, and waiting for the slowest rank
};

// The captured work of one step, for later steps to run in one launch.
class StepGraph {
public:
    StepGraph(StepGraph&&) noexcept;
    StepGraph& operator=(StepGraph&&) noexcept;
    ~StepGraph();
    // The most rows that a step it runs may have.
    [[nodiscard]] std::int64_t rows() const noexcept;

private:
    friend class Cache;
    struct State;
    explicit StepGraph(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

// On CUDA work on a stream is in order, and launches overlap only where that changes nothing. A
// caller's own kernel that is launched to overlap the one before it (programmatic dependent launch)
// must wait for it (cudaGridDependencySynchronize) before it touches what these calls read or
// write, and before it ends.
class Cache {
public:
    // Collective. invalid_argument: the configuration, by name. does_not_fit: the pools, and by how
    // much.
    [[nodiscard]] static Result<Cache> create(Process& process, const CacheConfig& config);

    Cache(Cache&&) noexcept;
    Cache& operator=(Cache&&) noexcept;
    ~Cache();

    // The learned attention sinks of one layer (gpt-oss, arXiv 2508.10925): a logit a query head
    // that joins the softmax's denominator and weighs no value, unscaled and uncapped. As with q,
    // a rank gives those of its own query heads. Local; over when it returns; outside of graphs.
    // They count in every attend from now on, those of graphs that were captured before included.
    //   logits  [query heads of this rank], on the host; -inf: the head has none
    // invalid_argument: a configuration without attention_sinks, a layer that is not there, another
    // number of logits, NaN or +inf.
    [[nodiscard]] Result<void> setSinks(int layer, std::span<const float> logits);

    // Collective. Plans the requests on rank 0 and applies the plan on all ranks. A step that was
    // not advanced is dropped: its tokens stay appended but not committed. A stream must live until
    // the next begin, and the last one until the cache ends.
    [[nodiscard]] Result<Step> begin(const Requests& requests, cudaStream_t stream = nullptr);

    // Writes K and V of the step's new tokens into one layer, and keeps q for attend. Local: no
    // communication. The inputs stay as they are; repeating a call changes nothing.
    //   q  [rows, query heads of this rank, head_dim]  input_format; null: K and V only
    //   k  [rows, KV heads of this rank, head_dim]
    //   v  [rows, KV heads of this rank, head_dim]
    // KV heads and head_dim are those of the layer's group. rows = step.rows().size(). Device
    // pointers on CUDA.
    [[nodiscard]] Result<void> append(const Step& step, int layer, const void* q, const void* k,
                                      const void* v, cudaStream_t stream = nullptr);

    // Attention of the step's rows over their sequences, causal, own token included. Collective
    // when the output is gathered. invalid_argument also: sinks are configured, but this layer's
    // were never set.
    //   out  [rows, query heads (all, or of this rank when sharded), head_dim of the layer]
    //        output_format
    [[nodiscard]] Result<void> attend(const Step& step, int layer, void* out, Output output,
                                      cudaStream_t stream = nullptr);

    // Captures what `body` enqueues on the stream that it is given into a CUDA graph: append and
    // attend of every layer, and kernels of the caller's own. The graph runs any step of at most
    // `rows` rows (0: as many as this one has), at the addresses that were captured; rows beyond
    // the step's are left alone by append, and what attend writes there means nothing. Nothing runs
    // now. Every rank captures the same. invalid_argument: rows beyond max_step_tokens, or a
    // transport that is eager; unavailable: the CPU device.
    [[nodiscard]] Result<StepGraph> capture(const Step& step, std::int64_t rows,
                                            const std::function<void(cudaStream_t)>& body);
    // Launches it on the step's stream, in place of append and attend. invalid_argument: the step
    // has more rows than the graph.
    [[nodiscard]] Result<void> replay(const Step& step, const StepGraph& graph);
    // The same for a graph that the caller captured itself, in a step of `captured_rows` rows, and
    // has now launched for this one on the stream given to begin: all layers count as appended.
    [[nodiscard]] Result<void> replayed(const Step& step, std::int64_t captured_rows);

    // Commits the step: each running sequence grows by its new tokens, or by accepted[i] of them
    // (0 <= accepted[i] <= new tokens; i in the order of the runs answered done; rank 0's counts,
    // valid on other ranks from the next begin). invalid_argument: beyond what every layer has
    // appended.
    [[nodiscard]] Result<void> advance(const Step& step);
    [[nodiscard]] Result<void> advance(const Step& step, std::span<const std::int64_t> accepted);

    // Committed tokens. invalid_argument: unknown sequence.
    [[nodiscard]] Result<std::int64_t> length(SequenceId sequence) const;

    // K (rotated) and V of the committed tokens of one layer on this rank:
    //   k, v  [length, KV heads of this rank, head_dim]  kv_format, bit for bit; where that has
    //         scales, input_format: stored x scale, rounded to nearest even
    // In a layer with a window, tokens that the next one would not see are zeros. does_not_fit:
    // some of its blocks are in host memory; run the sequence first.
    [[nodiscard]] Result<void> gather(SequenceId sequence, int layer, void* k, void* v,
                                      cudaStream_t stream = nullptr);

    [[nodiscard]] const CacheConfig& config() const noexcept;  // grid and pool sizes as chosen
    // Of this rank, in one layer; KV heads and head dim are 0 when there is no such layer.
    [[nodiscard]] CacheHeads heads(int layer = 0) const noexcept;
    // Collective: rank 0's numbers on every rank.
    [[nodiscard]] CacheStats stats();
    // From now on append, attend and join are timed by events, also inside what is captured.
    void setTiming(bool on) noexcept;
    // Seconds this rank spent in each part since the last call: the parts of the device while
    // timing is on, of a step graph those of its last launch. Waits for the step's stream.
    [[nodiscard]] CacheTiming takeTiming();

private:
    struct State;
    explicit Cache(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

}  // namespace kvgrid
