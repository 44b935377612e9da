#include "shard/shard.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace kvgrid {

Result<Shard::MemoryBytes> Shard::memoryBytes(const Device& device, const ShardConfig& config) {
    const Result<std::int64_t> block = blockBytes(config.block);
    if (!block) return tl::unexpected<Failure>(block.error());
    const PlanLimits& limits = config.limits;
    using Wide = __int128;
    const Wide heads = Wide{limits.max_step_tokens} * config.query_heads;
    const Wide states = heads * (2 * Wide{config.block.head_dim} + 1) * 4;  // q, out, lse
    const Wide tables = Wide{limits.max_sequences} * limits.blocks_per_sequence * 4;
    const Wide angles = Wide{limits.max_step_tokens} * config.rotary.dim * 4;
    const Wide on_device = Wide{*block} * limits.device_blocks + states + tables + angles +
                           static_cast<Wide>(device.operations().attendWorkspaceBytes(
                               limits.max_step_tokens, config.query_heads, config.block.head_dim)) +
                           static_cast<Wide>(device.operations().attendPlanBytes(
                               limits.max_step_tokens, limits.max_sequences, config.query_heads));
    const Wide on_host = Wide{*block} * limits.host_blocks;
    if (on_device + on_host > std::numeric_limits<std::int64_t>::max()) {
        return failure(ErrorCode::does_not_fit, "the bytes of the cache exceed 64 bits");
    }
    return MemoryBytes{.device = static_cast<std::int64_t>(on_device),
                       .host = static_cast<std::int64_t>(on_host)};
}

Result<Shard> Shard::create(Device& device, const ShardConfig& config) {
    const PlanLimits& limits = config.limits;
    Result<Pool> device_pool =
        Pool::onDevice(device, config.layout, config.block, limits.device_blocks);
    if (!device_pool) return tl::unexpected<Failure>(device_pool.error());
    Result<Pool> host_pool = Pool::onHost(device, config.block, limits.host_blocks);
    if (!host_pool) return tl::unexpected<Failure>(host_pool.error());
    Result<BlockTables> tables =
        BlockTables::create(device, limits, 0, config.place.context, config.rotary);
    if (!tables) return tl::unexpected<Failure>(tables.error());

    const auto heads = static_cast<std::size_t>(limits.max_step_tokens) *
                       static_cast<std::size_t>(config.query_heads);
    const std::size_t state_bytes =
        heads * static_cast<std::size_t>(config.block.head_dim) * sizeof(float);
    Result<Buffer> q = Buffer::onDevice(device, state_bytes);
    if (!q) return tl::unexpected<Failure>(q.error());
    Result<Buffer> out = Buffer::onDevice(device, state_bytes);
    if (!out) return tl::unexpected<Failure>(out.error());
    Result<Buffer> lse = Buffer::onDevice(device, heads * sizeof(float));
    if (!lse) return tl::unexpected<Failure>(lse.error());
    Result<Buffer> workspace = Buffer::onDevice(
        device, device.operations().attendWorkspaceBytes(limits.max_step_tokens, config.query_heads,
                                                         config.block.head_dim));
    if (!workspace) return tl::unexpected<Failure>(workspace.error());
    Result<Buffer> attend_plan = Buffer::onDevice(
        device, device.operations().attendPlanBytes(limits.max_step_tokens, limits.max_sequences,
                                                    config.query_heads));
    if (!attend_plan) return tl::unexpected<Failure>(attend_plan.error());
    device.synchronize(
        device.defaultStream());  // the tables are clear, whatever stream comes first
    return Shard(
        device, config,
        Memory{std::move(*device_pool), std::move(*host_pool), std::move(*tables), std::move(*q),
               std::move(*out), std::move(*lse), std::move(*workspace), std::move(*attend_plan)});
}

Shard::Shard(Device& device, const ShardConfig& config, Memory memory)
    : device_(&device),
      config_(config),
      device_pool_(std::move(memory.device_pool)),
      host_pool_(std::move(memory.host_pool)),
      replica_(config.limits),
      tables_(std::move(memory.tables)),
      q_(std::move(memory.q)),
      out_(std::move(memory.out)),
      lse_(std::move(memory.lse)),
      workspace_(std::move(memory.workspace)),
      plan_(std::move(memory.plan)),
      appended_(static_cast<std::size_t>(config.limits.max_sequences) *
                static_cast<std::size_t>(config.block.layers)),
      copies_(device) {}

Result<void> Shard::apply(const StepPlan& plan, StreamView stream) {
    if (Result<void> applied = replica_.apply(plan); !applied) return applied;
    for (const SequenceRecord& record : plan.sequences) {
        forgetPast(record.slot, record.kind == SequenceRecord::Kind::length ? record.length : 0);
    }
    // The copies run beside the uploads.
    const bool copied = copyBlocks(plan.copies, stream);
    tables_.apply(plan, stream);
    device_->operations().planAttend(attendParams(extent(stream)), stream);
    if (copied) copies_.after.makeWait(stream);
    q_layer_ = -1;
    return {};
}

// Tokens past the committed length were rejected, or belonged to the slot's last owner: they do not
// count as appended again.
void Shard::forgetPast(std::int32_t slot, std::int64_t length) {
    const auto layers = static_cast<std::size_t>(config_.block.layers);
    const auto first =
        appended_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(slot) * layers);
    std::transform(first, first + config_.block.layers, first,
                   [length](std::int64_t mark) { return std::min(mark, length); });
}

// Whether there was something to copy. Blocks that leave hold what earlier steps appended; blocks
// that come are read, and blocks that became free are written, by what is enqueued next.
bool Shard::copyBlocks(std::span<const CopyRecord> copies, StreamView stream) {
    const auto mine = [&](const CopyRecord& copy) { return copy.context == config_.place.context; };
    if (std::none_of(copies.begin(), copies.end(), mine)) return false;
    const StreamView copy_stream = copies_.stream.view();
    copies_.before.record(stream);
    copies_.before.makeWait(copy_stream);
    std::size_t i = 0;
    while (i < copies.size()) {
        const CopyRecord& first = copies[i];
        pairs_.clear();
        for (; i < copies.size() && copies[i].direction == first.direction &&
               copies[i].context == first.context && copies[i].group == first.group;
             ++i) {
            const bool offload = first.direction == CopyRecord::Direction::offload;
            pairs_.push_back(
                {.source = offload ? copies[i].device_block : copies[i].host_block,
                 .destination = offload ? copies[i].host_block : copies[i].device_block});
        }
        if (!mine(first)) continue;
        const bool offload = first.direction == CopyRecord::Direction::offload;
        CopyBlocksParams params;
        params.source = offload ? device_pool_.runs() : host_pool_.runs();
        params.destination = offload ? host_pool_.runs() : device_pool_.runs();
        params.pairs = pairs_.data();
        params.count = static_cast<std::int64_t>(pairs_.size());
        device_->operations().copyBlocks(params, copy_stream);
    }
    copies_.after.record(copy_stream);
    return true;
}

Shard::Extent Shard::extent(StreamView stream) const {
    if (!device_->isCapturing(stream)) {
        return {.capturing = false,
                .rows = rows(),
                .runs = static_cast<std::int64_t>(runs().size()),
                .max_position = tables_.maxPosition()};
    }
    const std::int64_t rows_at_most = std::max(rows(), capture_rows_);
    return {.capturing = true,
            .rows = rows_at_most,
            .runs = std::min<std::int64_t>(rows_at_most, config_.limits.max_sequences),
            .max_position = config_.limits.max_sequence_length - 1};
}

void Shard::mark(int layer) {
    for (const Run& run : runs()) {
        std::int64_t& mark = appended_[static_cast<std::size_t>(run.slot) *
                                           static_cast<std::size_t>(config_.block.layers) +
                                       static_cast<std::size_t>(layer)];
        mark = std::max(mark, run.first_position + run.rows);
    }
}

void Shard::markAppended() {
    for (int layer = 0; layer < config_.block.layers; ++layer)
        mark(layer);
    q_layer_ = -1;
}

Result<void> Shard::checkLayer(int layer) const {
    if (layer >= 0 && layer < config_.block.layers) return {};
    return failure(ErrorCode::invalid_argument, "layer " + std::to_string(layer) +
                                                    " is not in [0, " +
                                                    std::to_string(config_.block.layers) + ")");
}

Result<void> Shard::append(int layer, const void* q, const void* k, const void* v,
                           StreamView stream) {
    if (Result<void> checked = checkLayer(layer); !checked) return checked;
    const Extent extent = this->extent(stream);
    if (extent.rows == 0) return {};
    if (k == nullptr || v == nullptr) {
        return failure(ErrorCode::invalid_argument, k == nullptr ? "k is null" : "v is null");
    }
    AppendParams params;
    params.rows = extent.rows;
    params.query_heads = config_.query_heads;
    params.kv_heads = config_.block.kv_heads;
    params.head_dim = config_.block.head_dim;
    params.input_format = config_.input_format;
    params.q = q;
    params.k = k;
    params.v = v;
    params.q_rotated = q_.as<float>();
    params.rotary_dim = config_.rotary.dim;
    params.cosines = tables_.cosines();
    params.sines = tables_.sines();
    params.runs = tables_.runs();
    params.run_count = extent.runs;
    params.tables = tables_.view();
    params.pool = device_pool_.view();
    params.layer = layer;
    device_->operations().append(params, stream);

    q_layer_ = q != nullptr ? layer : -1;
    q_captured_ = extent.capturing;
    if (!extent.capturing) mark(layer);
    return {};
}

Result<void> Shard::attend(int layer, StreamView stream) {
    if (Result<void> checked = checkLayer(layer); !checked) return checked;
    const Extent extent = this->extent(stream);
    if (extent.rows == 0) return {};
    if (q_layer_ != layer || q_captured_ != extent.capturing) {
        return failure(ErrorCode::invalid_argument,
                       "layer " + std::to_string(layer) +
                           " is attended before its q was appended in this step");
    }
    AttendParams params = attendParams(extent);
    params.layer = layer;
    device_->operations().attend(params, stream);
    return {};
}

AttendParams Shard::attendParams(const Extent& extent) const {
    AttendParams params;
    params.query_heads = config_.query_heads;
    params.kv_heads = config_.block.kv_heads;
    params.head_dim = config_.block.head_dim;
    params.scale = config_.softmax_scale;
    params.softcap = config_.logit_softcap;
    params.q = q_.as<const float>();
    params.runs = tables_.runs();
    params.run_count = extent.runs;
    params.max_position = extent.max_position;
    params.context_rank = config_.place.context;
    params.context_ranks = config_.place.contexts;
    params.tables = tables_.view();
    params.pool = device_pool_.view();
    params.out = out_.as<float>();
    params.lse = lse_.as<float>();
    params.workspace = workspace_.data();
    params.workspace_bytes = workspace_.bytes();
    params.plan = plan_.data();
    params.plan_bytes = plan_.bytes();
    return params;
}

Result<void> Shard::gather(SequenceId sequence, int layer, void* k, void* v, StreamView stream) {
    if (Result<void> checked = checkLayer(layer); !checked) return checked;
    const std::optional<std::int32_t> slot = replica_.slotOf(sequence);
    if (!slot) {
        return failure(
            ErrorCode::invalid_argument,
            "sequence " + std::to_string(static_cast<std::int32_t>(sequence)) + " is unknown");
    }
    const std::int64_t length = replica_.length(*slot);
    if (length == 0) return {};
    if (k == nullptr || v == nullptr) {
        return failure(ErrorCode::invalid_argument, k == nullptr ? "k is null" : "v is null");
    }
    const std::int64_t blocks = (length + config_.block.block_size - 1) / config_.block.block_size;
    for (std::int64_t logical = 0; logical < blocks; ++logical) {
        if (replica_.block(*slot, 0, config_.place.context, static_cast<std::int32_t>(logical))
                .tier != Tier::device) {
            return failure(ErrorCode::does_not_fit,
                           "sequence " + std::to_string(static_cast<std::int32_t>(sequence)) +
                               " has blocks in host memory; run it first");
        }
    }
    GatherParams params;
    params.slot = *slot;
    params.tokens = length;
    params.kv_heads = config_.block.kv_heads;
    params.head_dim = config_.block.head_dim;
    params.tables = tables_.view();
    params.pool = device_pool_.view();
    params.layer = layer;
    params.format = hasScales(config_.block.format) ? config_.input_format : config_.block.format;
    params.k = k;
    params.v = v;
    device_->operations().gather(params, stream);
    return {};
}

Result<void> Shard::checkAppended(std::span<const std::int64_t> tokens) const {
    const auto layers = static_cast<std::size_t>(config_.block.layers);
    for (std::size_t i = 0; i < runs().size(); ++i) {
        const Run& run = runs()[i];
        const std::int64_t* marks = appended_.data() + static_cast<std::size_t>(run.slot) * layers;
        const std::int64_t* least = std::min_element(marks, marks + layers);
        if (run.first_position + tokens[i] > *least) {
            return failure(
                ErrorCode::invalid_argument,
                "sequence " +
                    std::to_string(static_cast<std::int32_t>(replica_.sequenceOf(run.slot))) +
                    " cannot advance to " + std::to_string(run.first_position + tokens[i]) +
                    " tokens: layer " + std::to_string(least - marks) + " has appended " +
                    std::to_string(*least));
        }
    }
    return {};
}

void Shard::commit(std::span<const std::int64_t> tokens) {
    for (std::size_t i = 0; i < runs().size(); ++i) {
        const Run& run = runs()[i];
        const std::int64_t length = run.first_position + tokens[i];
        replica_.setLength(run.slot, length);
        forgetPast(run.slot, length);
    }
}

}  // namespace kvgrid
