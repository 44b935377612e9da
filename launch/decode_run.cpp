#include "launch/decode_run.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "launch/parallel.h"
#include "launch/planted_fault.h"
#include "launch/ranks.h"

namespace kvgrid::launch {

namespace {

// The first answer that is not done, as a failure: on every rank the same.
Result<Step> granted(Result<Step> step) {
    if (!step) return step;
    for (const Answer& answer : step->answers()) {
        if (answer.status == Answer::Status::done) continue;
        return failure(ErrorCode::does_not_fit, answer.why);
    }
    return step;
}

}  // namespace

DecodeRun::DecodeRun(Process& process, Cache cache, std::uint64_t seed)
    : process_(&process),
      cache_(std::move(cache)),
      heads_(cache_.heads()),
      workload_(seed, cache_.config().input_format,
                cache_.config().geometry.groups.front().head_dim),
      drafts_(~seed, workload_.format(), workload_.headDim()),
      planted_(isPlanted("value")) {}

Result<DecodeRun> DecodeRun::create(Process& process, const CacheConfig& config,
                                    std::uint64_t seed) {
    auto cache = Cache::create(process, config);
    if (!cache) return tl::unexpected(cache.error());
    return DecodeRun(process, std::move(*cache), seed);
}

Result<void> DecodeRun::addSequence(std::int64_t key, std::int64_t max_length) {
    const auto step = granted(cache_.begin(Requests().allocate(max_length)));
    if (!step) return tl::unexpected(step.error());
    orThrow(cache_.advance(*step));
    sequences_.push_back({.id = step->answers().front().sequence, .key = key, .length = 0});
    return {};
}

void DecodeRun::releaseSequences() {
    Requests requests;
    for (const Sequence& sequence : sequences_)
        requests.release(sequence.id);
    orThrow(cache_.advance(orThrow(granted(cache_.begin(requests)))));
    sequences_.clear();
}

Result<void> DecodeRun::fill(std::size_t sequence, std::int64_t length, const StepOptions& options,
                             const std::function<void(std::int64_t)>& filled) {
    LayerInput input;
    Requests requests = options.before;
    while (sequences_[sequence].length < length) {
        const RunTokens run{.sequence = sequence,
                            .tokens = std::min(fill_tokens, length - sequences_[sequence].length)};
        const std::vector<RowInput> rows = rowsOf({&run, 1});
        const auto step = granted(cache_.begin(requests.run(sequences_[sequence].id, run.tokens)));
        if (!step) return tl::unexpected(step.error());
        for (int layer = 0; layer < cache_.config().geometry.layers; ++layer) {
            makeInput(layer, rows, false, input);
            append(*step, layer, input, options);
        }
        commit(*step, {&run, 1});
        requests = {};
        if (filled) filled(sequences_[sequence].length);
    }
    return {};
}

Result<StepTimes> DecodeRun::step(std::span<const RunTokens> runs, const StepOptions& options,
                                  const OnOutput& on_output) {
    const CacheConfig& config = cache_.config();
    const std::vector<RowInput> rows = rowsOf(runs);
    inputs_.resize(static_cast<std::size_t>(config.geometry.layers));
    for (int layer = 0; layer < config.geometry.layers; ++layer)
        makeInput(layer, rows, true, inputs_[static_cast<std::size_t>(layer)]);
    out_.resize(rows.size() * static_cast<std::size_t>(config.geometry.query_heads) *
                static_cast<std::size_t>(workload_.headDim()));
    Requests requests = options.before;
    for (const RunTokens& run : runs)
        requests.run(sequences_[run.sequence].id, run.tokens);

    process_->barrier();
    static_cast<void>(cache_.takeTiming());
    const auto start = std::chrono::steady_clock::now();
    const auto step = granted(cache_.begin(requests));
    if (!step) return tl::unexpected(step.error());
    for (int layer = 0; layer < config.geometry.layers; ++layer) {
        if (options.poison)
            std::fill(out_.begin(), out_.end(), std::numeric_limits<float>::quiet_NaN());
        append(*step, layer, inputs_[static_cast<std::size_t>(layer)], options);
        orThrow(cache_.attend(*step, layer, out_.data(), Output::gathered));
        on_output(*step, layer, out_);
    }
    if (!options.abandon) commit(*step, runs);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    return StepTimes{.step_s = elapsed.count(), .parts = cache_.takeTiming()};
}

void DecodeRun::settle() {
    orThrow(cache_.advance(orThrow(cache_.begin({}))));
    for (const Sequence& sequence : sequences_) {
        const std::int64_t length = orThrow(cache_.length(sequence.id));
        if (length == sequence.length) continue;
        throw Error(ErrorCode::internal,
                    fmt::format("sequence {} has {} tokens in the cache, {} were committed",
                                sequence.key, length, sequence.length));
    }
}

std::vector<DecodeRun::RowInput> DecodeRun::rowsOf(std::span<const RunTokens> runs) const {
    std::vector<RowInput> rows;
    for (const RunTokens& run : runs) {
        const Sequence& sequence = sequences_[run.sequence];
        for (std::int64_t token = 0; token < run.tokens; ++token) {
            rows.push_back({.key = sequence.key,
                            .position = sequence.length + token,
                            .drafted = token >= run.tokens - run.drafted});
        }
    }
    return rows;
}

void DecodeRun::makeInput(int layer, std::span<const RowInput> rows, bool with_q,
                          LayerInput& input) const {
    const std::size_t q_bytes = workload_.rowBytes(heads_.query_heads);
    const std::size_t kv_bytes = workload_.rowBytes(heads_.kv_heads);
    input.q.resize(with_q ? rows.size() * q_bytes : 0);
    input.k.resize(rows.size() * kv_bytes);
    input.v.resize(rows.size() * kv_bytes);
    const Heads query_heads{.first = heads_.first_query_head, .count = heads_.query_heads};
    const Heads kv_heads{.first = heads_.first_kv_head, .count = heads_.kv_heads};
    const bool wrong = planted_ && process_->rank() == 0;

    const auto make = [&](std::size_t row) {
        const Workload& data = rows[row].drafted ? drafts_ : workload_;
        const TokenAt token{.key = rows[row].key, .position = rows[row].position, .layer = layer};
        if (with_q) data.fill(Tensor::q, token, query_heads, input.q.data() + row * q_bytes);
        data.fill(Tensor::k, token, kv_heads, input.k.data() + row * kv_bytes);
        const bool planted = wrong && token.position == 0;
        (planted ? drafts_ : data)
            .fill(Tensor::v, token, kv_heads, input.v.data() + row * kv_bytes);
    };
    // Threads cost more than a few rows take.
    constexpr std::size_t rows_a_task = 64;
    const std::size_t tasks = (rows.size() + rows_a_task - 1) / rows_a_task;
    parallelFor(process_->threads(), static_cast<std::int64_t>(tasks), [&](std::int64_t task) {
        const std::size_t first = static_cast<std::size_t>(task) * rows_a_task;
        for (std::size_t row = first; row < std::min(first + rows_a_task, rows.size()); ++row)
            make(row);
    });
}

void DecodeRun::append(const Step& step, int layer, const LayerInput& input,
                       const StepOptions& options) {
    const void* q = input.q.empty() ? nullptr : input.q.data();
    for (int times = options.append_twice ? 2 : 1; times > 0; --times)
        orThrow(cache_.append(step, layer, q, input.k.data(), input.v.data()));
}

void DecodeRun::commit(const Step& step, std::span<const RunTokens> runs) {
    std::vector<std::int64_t> accepted;
    for (const RunTokens& run : runs) {
        accepted.push_back(run.tokens - run.drafted);
        sequences_[run.sequence].length += accepted.back();
    }
    orThrow(cache_.advance(step, accepted));
}

}  // namespace kvgrid::launch
