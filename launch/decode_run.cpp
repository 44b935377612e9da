#include "launch/decode_run.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "launch/parallel.h"
#include "launch/planted_fault.h"
#include "launch/ranks.h"
#include "launch/reference.h"

namespace kvgrid::launch {

namespace {

using Clock = std::chrono::steady_clock;

double secondsSince(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// The first answer that is not done, as a failure: on every rank the same.
Result<Step> granted(Result<Step> step) {
    if (!step) return step;
    for (const Answer& answer : step->answers()) {
        if (answer.status == Answer::Status::done) continue;
        return failure(ErrorCode::does_not_fit, answer.why);
    }
    return step;
}

std::int64_t padded(std::int64_t bytes) {
    constexpr std::int64_t alignment = 256;
    return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

DecodeRun::DecodeRun(Process& process, Cache cache, std::uint64_t seed, bool graph)
    : process_(&process),
      cache_(std::move(cache)),
      heads_(cache_.heads()),
      workload_(seed, cache_.config().input_format,
                cache_.config().geometry.groups.front().head_dim),
      drafts_(~seed, workload_.format(), workload_.headDim()),
      planted_(isPlanted("value")),
      graph_(graph) {}

Result<DecodeRun> DecodeRun::create(Process& process, const CacheConfig& config, std::uint64_t seed,
                                    bool graph) {
    auto cache = Cache::create(process, config);
    if (!cache) return tl::unexpected(cache.error());
    DecodeRun run(process, std::move(*cache), seed, graph);
    if (config.attention_sinks) run.setSinks();
    return run;
}

void DecodeRun::setSinks() {
    for (int layer = 0; layer < cache_.config().geometry.layers; ++layer) {
        std::vector<float> logits;
        for (int head = 0; head < heads_.query_heads; ++head)
            logits.push_back(workload_.sink(layer, heads_.first_query_head + head));
        orThrow(cache_.setSinks(layer, logits));
    }
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
    if (!fill_input_) fill_input_ = makeRoom(1, fill_tokens, false);
    Requests requests = options.before;
    while (sequences_[sequence].length < length) {
        const RunTokens run{.sequence = sequence,
                            .tokens = std::min(fill_tokens, length - sequences_[sequence].length)};
        const std::vector<RowInput> rows = rowsOf({&run, 1});
        const auto step = granted(cache_.begin(requests.run(sequences_[sequence].id, run.tokens)));
        if (!step) return tl::unexpected(step.error());
        for (int layer = 0; layer < cache_.config().geometry.layers; ++layer) {
            makeInput(layer, rows, *fill_input_, 0);
            append(*step, layer, *fill_input_, 0, options);
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
    const auto row_count = static_cast<std::int64_t>(rows.size());
    reserve(row_count);
    for (int layer = 0; layer < config.geometry.layers; ++layer)
        makeInput(layer, rows, *inputs_, layer);
    if (options.poison) out_->fill(0xFF);  // NaN in every format
    Requests requests = options.before;
    for (const RunTokens& run : runs)
        requests.run(sequences_[run.sequence].id, run.tokens);

    process_->synchronize();
    cache_.setTiming(options.timed);
    static_cast<void>(cache_.takeTiming());
    process_->barrier();
    const Clock::time_point start = Clock::now();
    const auto step = granted(cache_.begin(requests));
    if (!step) return tl::unexpected(step.error());
    StepTimes times;
    const Clock::time_point begun = Clock::now();
    run(*step, options);
    times.launch_s = secondsSince(begun);
    if (!options.abandon) commit(*step, runs);
    process_->synchronize();
    times.step_s = secondsSince(start);
    times.parts = cache_.takeTiming();
    if (!on_output) return times;
    host_.resize(rows.size() * static_cast<std::size_t>(config.geometry.query_heads) *
                 static_cast<std::size_t>(workload_.headDim()) *
                 bytesPerElement(config.output_format));
    for (int layer = 0; layer < config.geometry.layers; ++layer) {
        orThrow(out_->download(host_, outputOf(layer) - out_->data()));
        on_output(*step, layer, widened(config.output_format, host_));
    }
    return times;
}

void DecodeRun::run(const Step& step, const StepOptions& options) {
    if (!graph_) return runEagerly(step, options, nullptr);
    const GraphKey key{inputs_->rows, options.append_twice, options.timed};
    const auto found = graphs_.find(key);
    if (found != graphs_.end()) return orThrow(cache_.replay(step, found->second));
    // Eagerly first: transports connect at their first call.
    runEagerly(step, options, nullptr);
    graphs_.emplace(key, orThrow(cache_.capture(step, key.rows, [&](cudaStream_t stream) {
                        runEagerly(step, options, stream);
                    })));
}

void DecodeRun::runEagerly(const Step& step, const StepOptions& options, cudaStream_t stream) {
    for (int layer = 0; layer < cache_.config().geometry.layers; ++layer) {
        append(step, layer, *inputs_, layer, options, stream);
        orThrow(cache_.attend(step, layer, outputOf(layer), Output::gathered, stream));
    }
}

std::byte* DecodeRun::outputOf(int layer) const {
    return out_->data() + out_->bytes() / cache_.config().geometry.layers * layer;
}

DecodeRun::KeysValues DecodeRun::stored(std::size_t sequence, int layer) {
    const std::int64_t elements =
        length(sequence) * heads_.kv_heads * std::int64_t{workload_.headDim()};
    KeysValues result;
    for (std::vector<std::uint16_t>* values : {&result.k, &result.v})
        values->resize(static_cast<std::size_t>(elements));
    const std::span<std::byte> k = std::as_writable_bytes(std::span(result.k));
    const auto half = static_cast<std::int64_t>(k.size());
    auto memory = orThrow(DeviceMemory::create(*process_, 2 * half));
    orThrow(cache_.gather(id(sequence), layer, memory.data(), memory.data() + half));
    orThrow(memory.download(k));
    orThrow(memory.download(std::as_writable_bytes(std::span(result.v)), half));
    return result;
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

DecodeRun::Inputs DecodeRun::makeRoom(int layers, std::int64_t rows, bool with_q) const {
    const auto room_of = [&](int heads) {
        return padded(rows * static_cast<std::int64_t>(workload_.rowBytes(heads)));
    };
    const std::int64_t q_bytes = with_q ? room_of(heads_.query_heads) : 0;
    const std::int64_t kv_bytes = room_of(heads_.kv_heads);
    auto memory = DeviceMemory::create(*process_, layers * (q_bytes + 2 * kv_bytes));
    return {.memory = orThrow(std::move(memory)),
            .rows = rows,
            .q_bytes = q_bytes,
            .kv_bytes = kv_bytes};
}

// Room for a step of this many rows, a power of two of them at least: one graph does for all.
void DecodeRun::reserve(std::int64_t rows) {
    const CacheConfig& config = cache_.config();
    const auto bucket =
        std::min(static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows))),
                 config.max_step_tokens);
    if (inputs_ && inputs_->rows >= bucket) return;
    process_->synchronize();
    graphs_.clear();  // they read and write at the old addresses
    out_.reset();
    inputs_.reset();
    inputs_ = makeRoom(config.geometry.layers, bucket, true);
    out_ = orThrow(DeviceMemory::create(
        *process_, config.geometry.layers *
                       padded(bucket * config.geometry.query_heads * workload_.headDim() *
                              static_cast<std::int64_t>(bytesPerElement(config.output_format)))));
    // A graph moves the rows of its bucket whatever the step has: NaN, as they must not matter.
    inputs_->memory.fill(0xFF);
    out_->fill(0xFF);
}

void DecodeRun::makeInput(int layer, std::span<const RowInput> rows, Inputs& inputs, int room) {
    const std::size_t q_bytes = inputs.q_bytes == 0 ? 0 : workload_.rowBytes(heads_.query_heads);
    const std::size_t kv_bytes = workload_.rowBytes(heads_.kv_heads);
    const Heads query_heads{.first = heads_.first_query_head, .count = heads_.query_heads};
    const Heads kv_heads{.first = heads_.first_kv_head, .count = heads_.kv_heads};
    const bool wrong = planted_ && process_->rank() == 0;
    const auto padded_k = static_cast<std::size_t>(inputs.q_bytes);
    const std::size_t padded_v = padded_k + static_cast<std::size_t>(inputs.kv_bytes);
    // NaN where the room has no row of this step.
    host_.assign(padded_v + rows.size() * kv_bytes, std::byte{0xFF});

    const auto make = [&](std::size_t row) {
        const Workload& data = rows[row].drafted ? drafts_ : workload_;
        const TokenAt token{.key = rows[row].key, .position = rows[row].position, .layer = layer};
        if (q_bytes != 0) data.fill(Tensor::q, token, query_heads, host_.data() + row * q_bytes);
        data.fill(Tensor::k, token, kv_heads, host_.data() + padded_k + row * kv_bytes);
        const bool planted = wrong && token.position == 0;
        (planted ? drafts_ : data)
            .fill(Tensor::v, token, kv_heads, host_.data() + padded_v + row * kv_bytes);
    };
    // Threads cost more than a few rows take.
    constexpr std::size_t rows_a_task = 64;
    const std::size_t tasks = (rows.size() + rows_a_task - 1) / rows_a_task;
    parallelFor(process_->threads(), static_cast<std::int64_t>(tasks), [&](std::int64_t task) {
        const std::size_t first = static_cast<std::size_t>(task) * rows_a_task;
        for (std::size_t row = first; row < std::min(first + rows_a_task, rows.size()); ++row)
            make(row);
    });
    orThrow(inputs.memory.upload(host_, room * inputs.layerBytes()));
}

void DecodeRun::append(const Step& step, int layer, const Inputs& inputs, int room,
                       const StepOptions& options, cudaStream_t stream) {
    const void* q = inputs.q_bytes == 0 ? nullptr : inputs.q(room);
    for (int times = options.append_twice ? 2 : 1; times > 0; --times)
        orThrow(cache_.append(step, layer, q, inputs.k(room), inputs.v(room), stream));
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
