#include "shard/shard.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "shard/poison.h"

namespace kvgrid {

namespace {

constexpr std::size_t staging_bytes = std::size_t{1} << 20;

int largestHeadDim(const ShardConfig& config) {
    int largest = 0;
    for (const ShardGroup& group : config.groups)
        largest = std::max(largest, group.block.head_dim);
    return largest;
}

std::size_t workspaceBytes(const Device& device, const ShardConfig& config) {
    std::size_t most = 0;
    for (const ShardGroup& group : config.groups) {
        most = std::max(
            most, device.operations().attendWorkspaceBytes(
                      config.limits.max_step_tokens, config.query_heads, group.block.head_dim));
    }
    return most;
}

std::size_t planBytes(const Device& device, const ShardConfig& config) {
    return device.operations().attendPlanBytes(config.limits.max_step_tokens,
                                               config.limits.max_sequences, config.query_heads);
}

// The different ones among the groups' rotary embeddings.
std::vector<RotaryEmbedding> rotaries(const ShardConfig& config) {
    std::vector<RotaryEmbedding> different;
    for (const ShardGroup& group : config.groups) {
        if (std::find(different.begin(), different.end(), group.rotary) == different.end())
            different.push_back(group.rotary);
    }
    return different;
}

// On the device, where they stay at one address. Stream-ordered: the group must stay until the
// default stream is there.
Result<Buffer> uploadFixedScales(Device& device, const ShardGroup& group) {
    const std::span<const std::uint16_t> scales = group.fixed_scales;
    const std::size_t all =
        group.layers.size() * 2 * static_cast<std::size_t>(group.block.kv_heads);
    if (!scales.empty() && scales.size() != all) {
        return failure(ErrorCode::internal, std::to_string(scales.size()) +
                                                " fixed scales of a layer group that needs " +
                                                std::to_string(all));
    }
    Result<Buffer> buffer = Buffer::onDevice(device, scales.size_bytes());
    if (buffer && !scales.empty())
        device.copy(buffer->data(), scales.data(), scales.size_bytes(), device.defaultStream());
    return buffer;
}

}  // namespace

Result<Shard::MemoryBytes> Shard::memoryBytes(const Device& device, const ShardConfig& config) {
    const PlanLimits& limits = config.limits;
    using Wide = __int128;
    const Wide heads = Wide{limits.max_step_tokens} * config.query_heads;
    const Wide states = heads * (2 * Wide{largestHeadDim(config)} + 1) * 4;  // q, out, lse
    Wide on_device = states + static_cast<Wide>(workspaceBytes(device, config));
    Wide on_host = 0;
    for (std::size_t i = 0; i < config.groups.size(); ++i) {
        const Result<std::int64_t> block = blockBytes(config.groups[i].block);
        if (!block) return tl::unexpected<Failure>(block.error());
        const GroupLimits& group = limits.groups[i];
        on_device += Wide{*block} * group.device_blocks +
                     Wide{limits.max_sequences} * group.blocks_per_sequence * 4 +
                     static_cast<Wide>(planBytes(device, config)) +
                     static_cast<Wide>(config.groups[i].fixed_scales.size()) * 2;
        on_host += Wide{*block} * group.host_blocks;
    }
    for (const RotaryEmbedding& rotary : rotaries(config))
        on_device += Wide{limits.max_step_tokens} * rotary.dim * 4;
    if (on_device + on_host > std::numeric_limits<std::int64_t>::max()) {
        return failure(ErrorCode::does_not_fit, "the bytes of the cache exceed 64 bits");
    }
    return MemoryBytes{.device = static_cast<std::int64_t>(on_device),
                       .host = static_cast<std::int64_t>(on_host)};
}

Result<Shard> Shard::create(Device& device, const ShardConfig& config) {
    const PlanLimits& limits = config.limits;
    const std::vector<RotaryEmbedding> different = rotaries(config);
    std::vector<StepAngles> angles;
    for (const RotaryEmbedding& rotary : different) {
        Result<StepAngles> made = StepAngles::create(device, limits, rotary);
        if (!made) return tl::unexpected<Failure>(made.error());
        angles.push_back(std::move(*made));
    }
    std::vector<Group> groups;
    for (std::size_t i = 0; i < config.groups.size(); ++i) {
        const ShardGroup& group = config.groups[i];
        Result<Pool> device_pool =
            Pool::onDevice(device, config.layout, group.block, limits.groups[i].device_blocks);
        if (!device_pool) return tl::unexpected<Failure>(device_pool.error());
        Result<Pool> host_pool = Pool::onHost(device, group.block, limits.groups[i].host_blocks);
        if (!host_pool) return tl::unexpected<Failure>(host_pool.error());
        poison(device, device_pool->view().data, static_cast<std::size_t>(device_pool->bytes()));
        poisonHost(*host_pool);
        Result<BlockTables> tables =
            BlockTables::create(device, limits, static_cast<int>(i), config.place.context);
        if (!tables) return tl::unexpected<Failure>(tables.error());
        Result<Buffer> plan = Buffer::onDevice(device, planBytes(device, config));
        if (!plan) return tl::unexpected<Failure>(plan.error());
        Result<Buffer> fixed_scales = uploadFixedScales(device, group);
        if (!fixed_scales) return tl::unexpected<Failure>(fixed_scales.error());
        const auto found = std::find(different.begin(), different.end(), group.rotary);
        groups.push_back({.config = group,
                          .device_pool = std::move(*device_pool),
                          .host_pool = std::move(*host_pool),
                          .tables = std::move(*tables),
                          .angles = static_cast<std::size_t>(found - different.begin()),
                          .plan = std::move(*plan),
                          .fixed_scales = std::move(*fixed_scales)});
    }
    Result<StepRuns> runs = StepRuns::create(device, limits);
    if (!runs) return tl::unexpected<Failure>(runs.error());
    Result<StagingRing> staging = StagingRing::create(device, staging_bytes);
    if (!staging) return tl::unexpected<Failure>(staging.error());

    const auto heads = static_cast<std::size_t>(limits.max_step_tokens) *
                       static_cast<std::size_t>(config.query_heads);
    const std::size_t state_bytes =
        heads * static_cast<std::size_t>(largestHeadDim(config)) * sizeof(float);
    Result<Buffer> q = Buffer::onDevice(device, state_bytes);
    if (!q) return tl::unexpected<Failure>(q.error());
    Result<Buffer> out = Buffer::onDevice(device, state_bytes);
    if (!out) return tl::unexpected<Failure>(out.error());
    Result<Buffer> lse = Buffer::onDevice(device, heads * sizeof(float));
    if (!lse) return tl::unexpected<Failure>(lse.error());
    Result<Buffer> workspace = Buffer::onDevice(device, workspaceBytes(device, config));
    if (!workspace) return tl::unexpected<Failure>(workspace.error());
    for (const Buffer* buffer : {&*q, &*out, &*lse, &*workspace})
        poison(device, buffer->data(), buffer->bytes());
    device.synchronize(
        device.defaultStream());  // tables are clear, scales there, whatever stream comes first
    return Shard(device, config,
                 Memory{std::move(groups), std::move(angles), std::move(*runs), std::move(*staging),
                        std::move(*q), std::move(*out), std::move(*lse), std::move(*workspace)});
}

Shard::Shard(Device& device, const ShardConfig& config, Memory memory)
    : device_(&device),
      config_(config),
      groups_(std::move(memory.groups)),
      angles_(std::move(memory.angles)),
      replica_(config.limits),
      runs_(std::move(memory.runs)),
      staging_(std::move(memory.staging)),
      q_(std::move(memory.q)),
      out_(std::move(memory.out)),
      lse_(std::move(memory.lse)),
      workspace_(std::move(memory.workspace)),
      copies_(device) {
    for (std::size_t group = 0; group < groups_.size(); ++group) {
        const std::vector<int>& layers = groups_[group].config.layers;
        for (std::size_t within = 0; within < layers.size(); ++within) {
            const auto layer = static_cast<std::size_t>(layers[within]);
            layers_.resize(std::max(layers_.size(), layer + 1));
            layers_[layer] = {.group = static_cast<int>(group), .within = static_cast<int>(within)};
        }
    }
    appended_.resize(static_cast<std::size_t>(config.limits.max_sequences) * layers_.size());
}

Result<void> Shard::apply(const StepPlan& plan, StreamView stream) {
    if (Result<void> applied = replica_.apply(plan); !applied) return applied;
    for (const SequenceRecord& record : plan.sequences) {
        forgetPast(record.slot, record.kind == SequenceRecord::Kind::length ? record.length : 0);
    }
    // The copies run beside the uploads.
    const bool copied = copyBlocks(plan.copies, stream);
    runs_.apply(plan.runs, staging_, stream);
    for (StepAngles& angles : angles_)
        angles.apply(runs(), staging_, stream);
    for (Group& group : groups_) {
        group.tables.apply(plan.tables, staging_, stream);
        device_->operations().planAttend(attendParams(group, extent(stream)), stream);
    }
    if (copied) copies_.after.makeWait(stream);
    q_layer_ = -1;
    return {};
}

// Tokens past the committed length were rejected, or belonged to the slot's last owner: they do not
// count as appended again.
void Shard::forgetPast(std::int32_t slot, std::int64_t length) {
    const auto layers = static_cast<std::ptrdiff_t>(layers_.size());
    const auto first = appended_.begin() + slot * layers;
    std::transform(first, first + layers, first,
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
        const Group& group = groupAt(first.group);
        params.source = offload ? group.device_pool.runs() : group.host_pool.runs();
        params.destination = offload ? group.host_pool.runs() : group.device_pool.runs();
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
                .max_position = runs_.maxPosition(),
                .run_rows = runs_.leastRows()};
    }
    const std::int64_t rows_at_most = std::max(rows(), capture_rows_);
    return {.capturing = true,
            .rows = rows_at_most,
            .runs = std::min<std::int64_t>(rows_at_most, config_.limits.max_sequences),
            .max_position = config_.limits.max_sequence_length - 1,
            .run_rows = 1};
}

void Shard::mark(int layer) {
    for (const Run& run : runs()) {
        std::int64_t& mark = appended_[static_cast<std::size_t>(run.slot) * layers_.size() +
                                       static_cast<std::size_t>(layer)];
        mark = std::max(mark, run.first_position + run.rows);
    }
}

void Shard::markAppended() {
    for (std::size_t layer = 0; layer < layers_.size(); ++layer)
        mark(static_cast<int>(layer));
    q_layer_ = -1;
}

Result<void> Shard::checkLayer(int layer) const {
    const auto layers = static_cast<int>(layers_.size());
    if (layer >= 0 && layer < layers) return {};
    return failure(
        ErrorCode::invalid_argument,
        "layer " + std::to_string(layer) + " is not in [0, " + std::to_string(layers) + ")");
}

Result<void> Shard::append(int layer, const void* q, const void* k, const void* v,
                           StreamView stream) {
    if (Result<void> checked = checkLayer(layer); !checked) return checked;
    const Extent extent = this->extent(stream);
    if (extent.rows == 0) return {};
    if (k == nullptr || v == nullptr) {
        return failure(ErrorCode::invalid_argument, k == nullptr ? "k is null" : "v is null");
    }
    const Group& group = groupOf(layer);
    const StepAngles& angles = angles_[group.angles];
    AppendParams params;
    params.rows = extent.rows;
    params.query_heads = config_.query_heads;
    params.kv_heads = group.config.block.kv_heads;
    params.head_dim = group.config.block.head_dim;
    params.input_format = config_.input_format;
    params.q = q;
    params.k = k;
    params.v = v;
    params.q_rotated = q_.as<float>();
    params.rotary_dim = static_cast<int>(2 * angles.pairs());
    params.cosines = angles.cosines();
    params.sines = angles.sines();
    if (group.fixed_scales.bytes() > 0) {
        params.fixed_scales = group.fixed_scales.as<const std::uint16_t>() +
                              std::ptrdiff_t{layerAt(layer).within} * 2 * params.kv_heads;
    }
    params.runs = runs_.onDevice();
    params.run_count = extent.runs;
    params.tables = group.tables.view();
    params.pool = group.device_pool.view();
    params.layer = layerAt(layer).within;
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
    AttendParams params = attendParams(groupOf(layer), extent);
    params.layer = layerAt(layer).within;
    device_->operations().attend(params, stream);
    return {};
}

AttendParams Shard::attendParams(const Group& group, const Extent& extent) const {
    AttendParams params;
    params.query_heads = config_.query_heads;
    params.kv_heads = group.config.block.kv_heads;
    params.head_dim = group.config.block.head_dim;
    params.scale = group.config.softmax_scale;
    params.softcap = config_.logit_softcap;
    params.window = group.config.window;
    params.q = q_.as<const float>();
    params.runs = runs_.onDevice();
    params.run_count = extent.runs;
    params.max_position = extent.max_position;
    params.run_rows = extent.run_rows;
    params.context_rank = config_.place.context;
    params.context_ranks = config_.place.contexts;
    params.tables = group.tables.view();
    params.pool = group.device_pool.view();
    params.out = out_.as<float>();
    params.lse = lse_.as<float>();
    params.workspace = workspace_.data();
    params.workspace_bytes = workspace_.bytes();
    params.plan = group.plan.data();
    params.plan_bytes = group.plan.bytes();
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
    const LayerPlace place = layerAt(layer);
    const Group& group = groupAt(place.group);
    const BlockShape& block = group.config.block;
    // The tokens that the next one sees; rows before them are cleared.
    const std::int64_t window = group.config.window;
    const std::int64_t first = window == 0 ? 0 : std::max<std::int64_t>(0, length - window + 1);
    const std::int64_t blocks = (length + block.block_size - 1) / block.block_size;
    for (std::int64_t logical = first / block.block_size; logical < blocks; ++logical) {
        if (replica_
                .block(*slot, place.group, config_.place.context,
                       static_cast<std::int32_t>(logical))
                .tier != Tier::device) {
            return failure(ErrorCode::does_not_fit,
                           "sequence " + std::to_string(static_cast<std::int32_t>(sequence)) +
                               " has blocks in host memory; run it first");
        }
    }
    const NumberFormat format = hasScales(block.format) ? config_.input_format : block.format;
    const std::size_t cleared = static_cast<std::size_t>(first) *
                                static_cast<std::size_t>(block.kv_heads) *
                                static_cast<std::size_t>(block.head_dim) * bytesPerElement(format);
    if (cleared > 0) {
        device_->fill(k, 0, cleared, stream);
        device_->fill(v, 0, cleared, stream);
    }
    if (first == length) return {};
    GatherParams params;
    params.slot = *slot;
    params.first_position = first;
    params.tokens = length - first;
    params.kv_heads = block.kv_heads;
    params.head_dim = block.head_dim;
    params.tables = group.tables.view();
    params.pool = group.device_pool.view();
    params.layer = place.within;
    params.format = format;
    params.k = static_cast<std::byte*>(k) + cleared;
    params.v = static_cast<std::byte*>(v) + cleared;
    device_->operations().gather(params, stream);
    return {};
}

Result<void> Shard::checkAppended(std::span<const std::int64_t> tokens) const {
    const std::size_t layers = layers_.size();
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
