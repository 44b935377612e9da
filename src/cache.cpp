// The façade: the one file that sees coordinator, shard and comm.
//
// A step: rank 0's coordinator makes a plan -> control hands it to every rank -> the shard applies
// it
// -> for each layer append, attend, join -> advance commits the lengths.
#include <kvgrid/cache.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <variant>

#include <xxhash.h>

#include "comm/fault_injection.h"
#include "comm/join.h"
#include "comm/process.h"
#include "kernels/attention_state.h"
#include "kernels/number_formats.h"
#include "kernels/profile_range.h"
#include "shard/shard.h"
#include "shard/sinks.h"
#include "src/coordinator.h"
#include "src/part_timer.h"

namespace kvgrid {

namespace {

using Clock = std::chrono::steady_clock;

// Adds the time it lives to `seconds`.
class Stopwatch {
public:
    explicit Stopwatch(double& seconds) : seconds_(&seconds), start_(Clock::now()) {}
    ~Stopwatch() { *seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

private:
    double* seconds_;
    Clock::time_point start_;
};

// Of a group's layers: 0 where every query sees all.
std::int64_t windowOf(const CacheConfig& config, const LayerGroup& group) {
    return group.window < config.max_sequence_length ? group.window : 0;
}

// The most blocks of a window that all sequences hold together in a step.
std::int64_t blocksOfWindows(const CacheConfig& config, std::int64_t window) {
    const std::int64_t each = mostBlocksOfWindow(window, 1, config.block_size, config.grid.context);
    // Tokens of the step beyond the first fill blocks, and may begin one more in each other
    // sequence.
    const std::int64_t more = config.max_step_tokens - 1;
    const std::int64_t filled = (more + config.block_size - 1) / config.block_size;
    return config.max_sequences * each + std::min(more, filled + config.max_sequences - 1);
}

GroupLimits limitsOf(const CacheConfig& config, const LayerGroup& group) {
    const std::int64_t share = mostOwnedTokens(config.max_sequence_length, config.grid.context);
    const std::int64_t blocks = (share + config.block_size - 1) / config.block_size;
    GroupLimits limits{.blocks_per_sequence = blocks,
                       .device_blocks = config.device_blocks,
                       .host_blocks = config.host_blocks};
    if (const std::int64_t window = windowOf(config, group); window != 0) {
        const std::int64_t in_use =
            std::min(blocksOfWindows(config, window), config.max_sequences * blocks);
        limits.device_blocks = std::min(limits.device_blocks, in_use);
        limits.host_blocks = std::min(limits.host_blocks, in_use);
    }
    return limits;
}

PlanLimits limitsOf(const CacheConfig& config) {
    PlanLimits limits;
    limits.max_sequences = config.max_sequences;
    limits.max_sequence_length = config.max_sequence_length;
    limits.max_step_tokens = config.max_step_tokens;
    limits.contexts = config.grid.context;
    for (const LayerGroup& group : config.geometry.groups)
        limits.groups.push_back(limitsOf(config, group));
    return limits;
}

CoordinatorConfig coordinatorConfigOf(const CacheConfig& config) {
    CoordinatorConfig coordinator;
    coordinator.limits = limitsOf(config);
    for (const LayerGroup& group : config.geometry.groups) {
        coordinator.block_sizes.push_back(config.block_size);
        coordinator.windows.push_back(windowOf(config, group));
    }
    return coordinator;
}

// This rank's part of the group's fixed scales, as append reads them; empty: there are none.
std::vector<std::uint16_t> fixedScalesOf(const CacheConfig& config, const LayerGroup& group,
                                         const HeadRange& heads) {
    std::vector<std::uint16_t> bits;
    if (config.kv_scales.empty()) return bits;
    for (const int layer : group.layers) {
        const KvScales& scales = config.kv_scales[static_cast<std::size_t>(layer)];
        for (const std::vector<float>* all : {&scales.k, &scales.v}) {
            for (int head = heads.first; head < heads.first + heads.count; ++head)
                bits.push_back(fp16FromFloat((*all)[static_cast<std::size_t>(head)]));
        }
    }
    return bits;
}

ShardConfig shardConfigOf(const CacheConfig& config, int rank) {
    ShardConfig shard;
    shard.place = placeOf(rank, config.grid.heads, config.grid.context);
    for (const LayerGroup& group : config.geometry.groups) {
        const double scale =
            config.softmax_scale > 0 ? config.softmax_scale : 1.0 / std::sqrt(group.head_dim);
        shard.groups.push_back({.layers = group.layers,
                                .block = {.layers = static_cast<int>(group.layers.size()),
                                          .kv_heads = ownedHeads(group.kv_heads, shard.place).count,
                                          .head_dim = group.head_dim,
                                          .block_size = config.block_size,
                                          .format = config.kv_format},
                                .window = windowOf(config, group),
                                .rotary = group.rotary.value_or(config.rotary),
                                .softmax_scale = static_cast<float>(scale),
                                .fixed_scales = fixedScalesOf(
                                    config, group, ownedHeads(group.kv_heads, shard.place))});
    }
    shard.query_heads = ownedHeads(config.geometry.query_heads, shard.place).count;
    shard.layout = config.layout;
    shard.input_format = config.input_format;
    shard.logit_softcap = static_cast<float>(config.logit_softcap);
    shard.limits = limitsOf(config);
    return shard;
}

int largestHeadDim(const Geometry& geometry) {
    int largest = 0;
    for (const LayerGroup& group : geometry.groups)
        largest = std::max(largest, group.head_dim);
    return largest;
}

// Everything that must be alike on all ranks; the pools' sizes may differ.
std::int64_t configDigest(const CacheConfig& config) {
    std::string bytes;
    const auto add = [&bytes](const auto& value) {
        bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    add(config.geometry.layers);
    add(config.geometry.query_heads);
    const auto add_rotary = [&add](const RotaryEmbedding& rotary) {
        add(rotary.dim);
        add(rotary.theta);
        if (const auto* linear = std::get_if<LinearScaling>(&rotary.scaling)) add(linear->factor);
        if (const auto* llama3 = std::get_if<Llama3Scaling>(&rotary.scaling)) {
            add(llama3->factor);
            add(llama3->low_freq_factor);
            add(llama3->high_freq_factor);
            add(llama3->original_max_position);
        }
        if (const auto* yarn = std::get_if<YarnScaling>(&rotary.scaling)) {
            add(yarn->factor);
            add(yarn->original_max_position);
            add(yarn->beta_fast);
            add(yarn->beta_slow);
            add(yarn->truncate);
            add(yarn->attention_factor);
        }
    };
    for (const LayerGroup& group : config.geometry.groups) {
        for (const int layer : group.layers)
            add(layer);
        add(group.kv_heads);
        add(group.head_dim);
        add(group.window);
        add_rotary(group.rotary.value_or(config.rotary));
    }
    add(config.grid.heads);
    add(config.grid.context);
    add(config.kv_format);
    for (const KvScales& layer : config.kv_scales) {
        for (const float scale : layer.k)
            add(scale);
        for (const float scale : layer.v)
            add(scale);
    }
    add(config.input_format);
    add(config.output_format);
    add(config.softmax_scale);
    add(config.logit_softcap);
    add(config.attention_sinks);
    add(config.layout);
    add(config.block_size);
    add(config.max_sequences);
    add(config.max_sequence_length);
    add(config.max_step_tokens);
    return static_cast<std::int64_t>(XXH3_64bits(bytes.data(), bytes.size()));
}

Result<void> checkFree(std::int64_t need, std::int64_t free, int sharers, const char* memory) {
    const std::int64_t share = free / sharers;
    if (need <= share) return {};
    return failure(
        ErrorCode::does_not_fit,
        "the cache needs " + std::to_string(need) + " bytes of " + memory + " a rank, " +
            std::to_string(share) + " are free for each of the " + std::to_string(sharers) +
            " ranks that share it: " + std::to_string(need - share) + " bytes are missing");
}

// Whether the memory is there, before any rank takes some: ranks that share it would each see the
// same free bytes.
Result<void> checkMemory(const comm::ProcessState& ranks, const ShardConfig& config) {
    const auto need = Shard::memoryBytes(*ranks.device, config);
    if (!need) return tl::unexpected<Failure>(need.error());
    const std::int64_t host_free = ranks.host->freeMemory();
    if (ranks.device->kind() == DeviceKind::cpu)
        return checkFree(need->device + need->host, host_free, ranks.node_size, "host memory");
    return checkFree(need->device, ranks.device->freeMemory(), ranks.device_sharers, "GPU memory")
        .and_then([&] { return checkFree(need->host, host_free, ranks.node_size, "host memory"); });
}

// The configuration with everything chosen that was left open. Local.
Result<CacheConfig> completed(CacheConfig config, int ranks) {
    if (Result<void> valid = validate(config); !valid)
        return tl::unexpected<Failure>(valid.error());
    Result<Grid> grid = chooseGrid(config.geometry, ranks, config.grid);
    if (!grid) return tl::unexpected<Failure>(grid.error());
    config.grid = *grid;
    if (config.layout == PoolLayout::contiguous) {
        const std::int64_t share = mostOwnedTokens(config.max_sequence_length, config.grid.context);
        const std::int64_t rounded = (share + stripe_tokens - 1) / stripe_tokens * stripe_tokens;
        if (rounded > std::numeric_limits<int>::max()) {
            return failure(ErrorCode::invalid_argument,
                           "max_sequence_length: " + std::to_string(rounded) +
                               " tokens are too long for a contiguous block");
        }
        config.block_size = static_cast<int>(rounded);
    }
    return config;
}

}  // namespace

struct StepGraph::State {
    Graph graph;
    std::int64_t rows;
    std::vector<PartTimer::Span> spans;  // of the timed parts inside
    const void* cache;                   // whose addresses it has
};

StepGraph::StepGraph(std::unique_ptr<State> state) : state_(std::move(state)) {}
StepGraph::StepGraph(StepGraph&&) noexcept = default;
StepGraph& StepGraph::operator=(StepGraph&&) noexcept = default;
StepGraph::~StepGraph() = default;

std::int64_t StepGraph::rows() const noexcept {
    return state_->rows;
}

struct Cache::State {
    comm::ProcessState* ranks;
    CacheConfig config;
    PlanLimits limits;
    Shard shard;
    Sinks sinks;
    comm::Join join;
    StreamView stream;                       // of the step
    Event order;                             // between it and other streams
    std::optional<Coordinator> coordinator;  // on rank 0
    double begin_s = 0;
    PartTimer parts;
    std::int64_t step = 0;        // number of the newest step
    bool open = false;            // it was not advanced yet
    bool capturing_step = false;  // within capture

    // Waits for what still uses the memory. Where that fails, the job has ended anyway.
    ~State() {
        try {
            ranks->synchronize(stream);
        } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the failure is thrown already
        }
        ranks->watchdog->forgetExpected(this);
    }

    [[nodiscard]] Device& device() const noexcept { return *ranks->device; }
    [[nodiscard]] StreamView streamOf(cudaStream_t given) const {
        return given == nullptr ? device().defaultStream() : StreamView(device(), given);
    }

    // `after` runs what is enqueued next only after what `before` has now.
    void arrange(StreamView before, StreamView after) {
        if (before.handle() == after.handle()) return;
        order.record(before);
        order.makeWait(after);
    }

    // Runs `work` on the stream of a call, ordered as calls are. A capture has an order of its own.
    template <typename Work>
    Result<void> enqueue(cudaStream_t given, const Work& work) {
        const StreamView on = given == nullptr ? stream : StreamView(device(), given);
        const bool capturing = device().isCapturing(on);
        if (!capturing) arrange(stream, on);
        // What a caller captures by itself is not timed: nobody knows when it runs.
        const bool timed = parts.isOn();
        parts.setOn(timed && (!capturing || capturing_step));
        Result<void> done = work(on);
        parts.setOn(timed);
        if (!capturing) arrange(on, stream);
        return done;
    }

    [[nodiscard]] Result<void> checkOutsideOfGraphs(const char* call, StreamView on) const {
        if (!device().isCapturing(on)) return {};
        return failure(ErrorCode::invalid_argument,
                       std::string(call) + " cannot be captured into a graph");
    }

    // A captured join is checked here, before anything is enqueued.
    [[nodiscard]] Result<void> checkJoin(Output output, bool capturing) const {
        if (output != Output::gathered || !capturing || ranks->size == 1 ||
            ranks->transport().isCapturable())
            return {};
        return failure(ErrorCode::invalid_argument,
                       "transport " + std::string(name(ranks->transport().kind())) +
                           " is eager: its join cannot be captured into a graph");
    }

    // The step's work is enqueued: from here on it must end within the deadline.
    void close() {
        open = false;
        if (device().kind() != DeviceKind::cuda) return;
        Event done(device());
        done.record(stream);
        ranks->watchdog->expect(this, step, std::move(done));
    }

    [[nodiscard]] Result<void> checkStep(const Step& given) const {
        if (given.number() != step) {
            return failure(ErrorCode::invalid_argument, "step " + std::to_string(given.number()) +
                                                            " is not the newest, which is " +
                                                            std::to_string(step));
        }
        if (!open) {
            return failure(ErrorCode::invalid_argument,
                           "step " + std::to_string(step) + " was advanced already");
        }
        return {};
    }

    [[nodiscard]] Result<void> checkAccepted(std::span<const std::int64_t> accepted) const {
        if (accepted.size() != shard.runs().size()) {
            return failure(ErrorCode::invalid_argument,
                           "accepted: " + std::to_string(accepted.size()) + " counts for " +
                               std::to_string(shard.runs().size()) + " runs");
        }
        for (std::size_t i = 0; i < accepted.size(); ++i) {
            if (accepted[i] < 0 || accepted[i] > shard.runs()[i].rows) {
                return failure(ErrorCode::invalid_argument,
                               "accepted[" + std::to_string(i) +
                                   "]: " + std::to_string(accepted[i]) + " is not in [0, " +
                                   std::to_string(shard.runs()[i].rows) + "]");
            }
        }
        return shard.checkAppended(accepted);
    }

    [[nodiscard]] Result<void> advance(std::span<const std::int64_t> accepted) {
        if (Result<void> checked = checkAccepted(accepted); !checked) return checked;
        if (coordinator) {
            if (Result<void> advanced = coordinator->advance(accepted); !advanced) return advanced;
        }
        shard.commit(accepted);
        close();
        return {};
    }
};

Cache::Cache(std::unique_ptr<State> state) : state_(std::move(state)) {}
Cache::Cache(Cache&&) noexcept = default;
Cache& Cache::operator=(Cache&&) noexcept = default;
Cache::~Cache() = default;

Result<Cache> Cache::create(Process& process, const CacheConfig& given) {
    comm::ProcessState& ranks = process.state();
    comm::Control& control = *ranks.control;

    Result<CacheConfig> config = completed(given, ranks.size);
    const Result<void> valid = config ? Result<void>() : tl::unexpected<Failure>(config.error());
    if (Result<void> agreed = control.agree(valid); !agreed)
        return tl::unexpected<Failure>(agreed.error());
    const std::int64_t digest = configDigest(*config);
    if (control.minimum(digest) != control.maximum(digest)) {
        return failure(ErrorCode::invalid_argument, "the configuration differs between ranks");
    }
    config->device_blocks = control.minimum(config->device_blocks);
    config->host_blocks = control.minimum(config->host_blocks);

    const ShardConfig shard_config = shardConfigOf(*config, ranks.rank);
    if (Result<void> agreed = control.agree(checkMemory(ranks, shard_config)); !agreed)
        return tl::unexpected<Failure>(agreed.error());
    Result<Shard> shard = Shard::create(*ranks.device, shard_config);
    const Result<void> made = shard ? Result<void>() : tl::unexpected<Failure>(shard.error());
    if (Result<void> agreed = control.agree(made); !agreed)
        return tl::unexpected<Failure>(agreed.error());

    Result<Sinks> sinks =
        Sinks::create(*ranks.device, config->attention_sinks ? config->geometry.layers : 0,
                      shard_config.query_heads);
    const Result<void> taken = sinks ? Result<void>() : tl::unexpected<Failure>(sinks.error());
    if (Result<void> agreed = control.agree(taken); !agreed)
        return tl::unexpected<Failure>(agreed.error());

    Result<comm::Join> join = comm::Join::create(ranks.transport(), *ranks.device,
                                                 {.max_rows = config->max_step_tokens,
                                                  .local_heads = shard_config.query_heads,
                                                  .max_head_dim = largestHeadDim(config->geometry),
                                                  .output_format = config->output_format});
    const Result<void> joined = join ? Result<void>() : tl::unexpected<Failure>(join.error());
    if (Result<void> agreed = control.agree(joined); !agreed)
        return tl::unexpected<Failure>(agreed.error());

    std::unique_ptr<State> state(new State{.ranks = &ranks,
                                           .config = *config,
                                           .limits = shard_config.limits,
                                           .shard = std::move(*shard),
                                           .sinks = std::move(*sinks),
                                           .join = std::move(*join),
                                           .stream = ranks.device->defaultStream(),
                                           .order = Event(*ranks.device),
                                           .coordinator = std::nullopt,
                                           .parts = {}});
    if (ranks.rank == 0) {
        state->coordinator.emplace(coordinatorConfigOf(*config));
    }
    return Cache(std::move(state));
}

Result<void> Cache::setSinks(int layer, std::span<const float> logits) {
    State& state = *state_;
    if (Result<void> outside = state.checkOutsideOfGraphs("setSinks", state.stream); !outside)
        return outside;
    if (Result<void> set = state.sinks.set(layer, logits, state.stream); !set) return set;
    state.ranks->synchronize(state.stream);
    return {};
}

Result<Step> Cache::begin(const Requests& requests, cudaStream_t stream) {
    State& state = *state_;
    const StreamView next = state.streamOf(stream);
    for (const StreamView on : {state.stream, next}) {
        if (Result<void> outside = state.checkOutsideOfGraphs("begin", on); !outside)
            return tl::unexpected<Failure>(outside.error());
    }
    const ProfileRange range("begin");
    const Stopwatch watch(state.begin_s);
    state.arrange(state.stream, next);
    state.stream = next;
    state.ranks->watchdog->setPlace(state.step + 1, -1);
    std::vector<std::byte> message;
    if (state.coordinator) message = state.coordinator->plan(requests.all()).encode();
    const Result<StepPlan> plan =
        StepPlan::decode(state.ranks->control->broadcast(message), state.limits);
    if (!plan) throw Error(plan.error());
    if (Result<void> applied = state.shard.apply(*plan, state.stream); !applied)
        throw Error(applied.error());

    state.step = plan->number;
    state.open = true;
    Step step;
    step.number_ = plan->number;
    step.runs_ = static_cast<std::int64_t>(plan->runs.size());
    step.answers_.reserve(plan->answers.size());
    for (const AnswerRecord& answer : plan->answers) {
        step.answers_.push_back({.status = static_cast<Answer::Status>(answer.status),
                                 .sequence = SequenceId{answer.sequence},
                                 .why = plan->text.substr(answer.why_offset, answer.why_bytes)});
    }
    step.rows_.reserve(static_cast<std::size_t>(state.shard.rows()));
    for (const Run& run : state.shard.runs()) {
        for (std::int64_t row = 0; row < run.rows; ++row) {
            step.rows_.push_back(
                {state.shard.replica().sequenceOf(run.slot), run.first_position + row});
        }
    }
    return step;
}

Result<void> Cache::append(const Step& step, int layer, const void* q, const void* k, const void* v,
                           cudaStream_t stream) {
    State& state = *state_;
    if (Result<void> checked = state.checkStep(step); !checked) return checked;
    const ProfileRange range("append");
    state.ranks->watchdog->setPlace(step.number(), layer);
    comm::faultPoint("append", state.ranks->rank);
    return state.enqueue(stream, [&](StreamView on) {
        return state.parts.measure(PartTimer::append, on,
                                   [&] { return state.shard.append(layer, q, k, v, on); });
    });
}

Result<void> Cache::attend(const Step& step, int layer, void* out, Output output,
                           cudaStream_t stream) {
    State& state = *state_;
    if (Result<void> checked = state.checkStep(step); !checked) return checked;
    state.ranks->watchdog->setPlace(step.number(), layer);
    comm::faultPoint("attend", state.ranks->rank);
    return state.enqueue(stream, [&](StreamView on) -> Result<void> {
        const Shard::Extent extent = state.shard.extent(on);
        if (out == nullptr && extent.rows > 0)
            return failure(ErrorCode::invalid_argument, "out is null");
        if (Result<void> joined = state.checkJoin(output, extent.capturing); !joined) return joined;
        const Result<const float*> sinks = state.sinks.of(layer);
        if (!sinks) return tl::unexpected<Failure>(sinks.error());
        {
            const ProfileRange range("attend");
            const Result<void> attended = state.parts.measure(
                PartTimer::attend, on, [&] { return state.shard.attend(layer, on); });
            if (!attended) return attended;
        }
        const ProfileRange range("join");
        const comm::Join::States states{
            .out = state.shard.states(), .lse = state.shard.lse(), .sinks = *sinks};
        return state.parts.measure(PartTimer::join, on, [&]() -> Result<void> {
            const int head_dim = state.shard.headDim(layer);
            if (output == Output::gathered) {
                state.join.gather(states, extent.rows, head_dim, out, on);
            } else {
                state.join.keep(states, extent.rows, head_dim, out, on);
            }
            return {};
        });
    });
}

Result<StepGraph> Cache::capture(const Step& step, std::int64_t rows,
                                 const std::function<void(cudaStream_t)>& body) {
    State& state = *state_;
    if (Result<void> checked = state.checkStep(step); !checked)
        return tl::unexpected<Failure>(checked.error());
    if (rows == 0) rows = state.shard.rows();
    if (rows < state.shard.rows() || rows > state.limits.max_step_tokens) {
        return failure(ErrorCode::invalid_argument,
                       "rows: " + std::to_string(rows) + " is not in [" +
                           std::to_string(state.shard.rows()) + ", " +
                           std::to_string(state.limits.max_step_tokens) + "]");
    }
    if (state.device().kind() != DeviceKind::cuda)
        return failure(ErrorCode::unavailable, "the CPU device has no graphs");
    if (Result<void> outside = state.checkOutsideOfGraphs("capture", state.stream); !outside)
        return tl::unexpected<Failure>(outside.error());
    if (Result<void> joined = state.checkJoin(Output::gathered, true); !joined)
        return tl::unexpected<Failure>(joined.error());

    const ProfileRange range("capture");
    std::vector<PartTimer::Span> outer = state.parts.takeSpans();
    state.shard.setCaptureRows(rows);
    state.capturing_step = true;
    state.device().beginCapture(state.stream);
    const auto end = [&] {
        state.shard.setCaptureRows(0);
        state.capturing_step = false;
        std::vector<PartTimer::Span> inner = state.parts.takeSpans();
        state.parts.add(outer);
        return inner;
    };
    try {
        body(static_cast<cudaStream_t>(state.stream.handle()));
    } catch (...) {
        static_cast<void>(end());
        try {
            static_cast<void>(Graph::endCapture(state.stream));
        } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the first failure counts
        }
        throw;
    }
    std::vector<PartTimer::Span> spans = end();
    return StepGraph(std::make_unique<StepGraph::State>(
        StepGraph::State{Graph::endCapture(state.stream), rows, std::move(spans), &state}));
}

Result<void> Cache::replay(const Step& step, const StepGraph& graph) {
    State& state = *state_;
    if (Result<void> checked = state.checkStep(step); !checked) return checked;
    if (Result<void> outside = state.checkOutsideOfGraphs("replay", state.stream); !outside)
        return outside;
    if (graph.state_->cache != &state)
        return failure(ErrorCode::invalid_argument, "graph: it was captured by another cache");
    const ProfileRange range("replay");
    state.ranks->watchdog->setPlace(step.number(), -1);
    for (const char* place : {"append", "attend", "join"})
        comm::faultPoint(place, state.ranks->rank);
    if (Result<void> counted = replayed(step, graph.rows()); !counted) return counted;
    if (state.ranks->size > 1) comm::faultPoint("collective", state.ranks->rank);
    graph.state_->graph.launch(state.stream);
    if (state.parts.isOn()) state.parts.add(graph.state_->spans);
    return {};
}

Result<void> Cache::replayed(const Step& step, std::int64_t captured_rows) {
    State& state = *state_;
    if (Result<void> checked = state.checkStep(step); !checked) return checked;
    if (state.shard.rows() > captured_rows) {
        return failure(ErrorCode::invalid_argument,
                       "step " + std::to_string(step.number()) + " has " +
                           std::to_string(state.shard.rows()) +
                           " rows, the graph was captured for " + std::to_string(captured_rows));
    }
    state.shard.markAppended();
    return {};
}

Result<void> Cache::advance(const Step& step) {
    State& state = *state_;
    if (Result<void> checked = state.checkStep(step); !checked) return checked;
    if (Result<void> outside = state.checkOutsideOfGraphs("advance", state.stream); !outside)
        return outside;
    std::vector<std::int64_t> all;
    all.reserve(state.shard.runs().size());
    for (const Run& run : state.shard.runs())
        all.push_back(run.rows);
    return state.advance(all);
}

Result<void> Cache::advance(const Step& step, std::span<const std::int64_t> accepted) {
    State& state = *state_;
    if (Result<void> checked = state.checkStep(step); !checked) return checked;
    if (Result<void> outside = state.checkOutsideOfGraphs("advance", state.stream); !outside)
        return outside;
    if (state.coordinator) return state.advance(accepted);
    // Rank 0's counts decide, but a misuse that all ranks share must leave all of them as they
    // were.
    if (Result<void> checked = state.checkAccepted(accepted); !checked) return checked;
    state.close();
    return {};
}

Result<std::int64_t> Cache::length(SequenceId sequence) const {
    const Replica& replica = state_->shard.replica();
    const std::optional<std::int32_t> slot = replica.slotOf(sequence);
    if (!slot) {
        return failure(
            ErrorCode::invalid_argument,
            "sequence " + std::to_string(static_cast<std::int32_t>(sequence)) + " is unknown");
    }
    return replica.length(*slot);
}

Result<void> Cache::gather(SequenceId sequence, int layer, void* k, void* v, cudaStream_t stream) {
    return state_->enqueue(
        stream, [&](StreamView on) { return state_->shard.gather(sequence, layer, k, v, on); });
}

const CacheConfig& Cache::config() const noexcept {
    return state_->config;
}

CacheHeads Cache::heads(int layer) const noexcept {
    const CacheConfig& config = state_->config;
    const GridPlace place = placeOf(state_->ranks->rank, config.grid.heads, config.grid.context);
    const HeadRange query = ownedHeads(config.geometry.query_heads, place);
    CacheHeads heads{.first_query_head = query.first, .query_heads = query.count};
    for (const LayerGroup& group : config.geometry.groups) {
        if (!std::binary_search(group.layers.begin(), group.layers.end(), layer)) continue;
        const HeadRange kv = ownedHeads(group.kv_heads, place);
        heads.first_kv_head = kv.first;
        heads.kv_heads = kv.count;
        heads.head_dim = group.head_dim;
    }
    return heads;
}

CacheStats Cache::stats() {
    // What rank 0 alone knows: the free blocks of each group, then the copies.
    std::vector<std::int64_t> known(2 * state_->limits.groups.size() + 3);
    if (const auto& coordinator = state_->coordinator) {
        auto* next = known.data();
        for (int group = 0; group < static_cast<int>(state_->limits.groups.size()); ++group) {
            *next++ = coordinator->freeBlocks(Tier::device, group, 0);
            *next++ = coordinator->freeBlocks(Tier::host, group, 0);
        }
        *next++ = coordinator->offloadedBlocks();
        *next++ = coordinator->restoredBlocks();
        *next = coordinator->distinctOffloadedBlocks();
    }
    const std::span<const std::byte> root =
        state_->ranks->control->broadcast(std::as_bytes(std::span(known)));
    std::memcpy(known.data(), root.data(), root.size());

    CacheStats stats;
    const std::int64_t* next = known.data();
    for (std::size_t i = 0; i < state_->limits.groups.size(); ++i) {
        const GroupLimits& group = state_->limits.groups[i];
        PoolStats pool{.device_blocks = group.device_blocks, .host_blocks = group.host_blocks};
        pool.device_blocks_free = *next++;
        pool.host_blocks_free = *next++;
        pool.block_bytes = blockBytes(state_->shard.blockShape(static_cast<int>(i))).value();
        stats.groups.push_back(pool);
    }
    stats.offloaded_blocks = *next++;
    stats.restored_blocks = *next++;
    stats.distinct_offloaded_blocks = *next;
    return stats;
}

void Cache::setTiming(bool on) noexcept {
    state_->parts.setOn(on);
}

CacheTiming Cache::takeTiming() {
    state_->ranks->synchronize(state_->stream);
    const auto parts = state_->parts.take();
    return {.begin_s = std::exchange(state_->begin_s, 0.0),
            .append_s = parts[PartTimer::append],
            .attend_s = parts[PartTimer::attend],
            .join_s = parts[PartTimer::join]};
}

}  // namespace kvgrid
