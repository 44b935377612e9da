// What one rank does with a plan: apply it, append a layer, attend a layer. No MPI, no NCCL.
//
// All memory is taken in create: the pools, the tables, and the workspace for the largest step.
// apply, append and attend enqueue on the stream they are given; block copies run on a stream of
// their own, after what was enqueued before and before what is enqueued next.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <kvgrid/config.h>
#include <kvgrid/error.h>

#include "kernels/device.h"
#include "kernels/ops.h"
#include "shard/block_tables.h"
#include "shard/ownership.h"
#include "shard/pool.h"
#include "shard/replica.h"
#include "shard/step_plan.h"

namespace kvgrid {

// This rank's part of a layer group.
struct ShardGroup {
    std::vector<int> layers;  // by their numbers in the model
    BlockShape block;         // of all of them and this rank's KV heads
    std::int64_t window = 0;  // tokens that a query sees; 0: all
    RotaryEmbedding rotary;
    float softmax_scale = 1.0F;
    // fp16 bits, [layer of the group][K, V][KV head]; empty: every row has a scale of its own.
    std::vector<std::uint16_t> fixed_scales = {};
};

// This rank's part of a cache. The groups have each layer once.
struct ShardConfig {
    std::vector<ShardGroup> groups;
    int query_heads = 0;  // of this rank
    PoolLayout layout = PoolLayout::block_major;
    NumberFormat input_format = NumberFormat::bf16;
    float logit_softcap = 0.0F;
    GridPlace place;
    PlanLimits limits;
};

class Shard {
public:
    // Bytes that create takes, about. does_not_fit: beyond 64 bits.
    struct MemoryBytes {
        std::int64_t device = 0;
        std::int64_t host = 0;  // that copies may use (Device::allocateHost)
    };
    [[nodiscard]] static Result<MemoryBytes> memoryBytes(const Device& device,
                                                         const ShardConfig& config);
    // does_not_fit: pools, tables or workspace; internal: another number of fixed scales than there
    // are layers, K and V, and KV heads. The device must outlive it.
    [[nodiscard]] static Result<Shard> create(Device& device, const ShardConfig& config);

    // Metadata, block copies in order, tables, runs. internal: the plan contradicts this rank's
    // state; the job must end.
    [[nodiscard]] Result<void> apply(const StepPlan& plan, StreamView stream);

    // How many rows and runs append and attend are told of: the step's, or, where the stream is in
    // a capture, as many as a step of setCaptureRows (at least this step's) can have. What is
    // really there, they read on the device.
    struct Extent {
        bool capturing = false;
        std::int64_t rows = 0;
        std::int64_t runs = 0;
        std::int64_t max_position = -1;
        std::int64_t run_rows = 1;  // of the shortest run; 1 in a capture, which is for decoding
    };
    [[nodiscard]] Extent extent(StreamView stream) const;
    void setCaptureRows(std::int64_t rows) noexcept { capture_rows_ = rows; }
    // A launched graph has appended the step's rows to every layer.
    void markAppended();

    // K and V of the step's rows into one layer; shapes as in Cache::append. invalid_argument: null
    // k or v, a layer that is not there. In a capture nothing counts as appended yet.
    [[nodiscard]] Result<void> append(int layer, const void* q, const void* k, const void* v,
                                      StreamView stream);

    // States of the step's rows over what this rank owns, into states(). invalid_argument: not
    // right after an append of the same layer with q.
    [[nodiscard]] Result<void> attend(int layer, StreamView stream);
    [[nodiscard]] const float* states() const noexcept {
        return out_.as<const float>();
    }  // [rows, query heads, head_dim of the layer]
    [[nodiscard]] const float* lse() const noexcept {
        return lse_.as<const float>();
    }  // [rows, query heads]

    // As Cache::gather.
    [[nodiscard]] Result<void> gather(SequenceId sequence, int layer, void* k, void* v,
                                      StreamView stream);

    // Whether every layer has appended the first tokens[i] of run i of the step. invalid_argument:
    // the least appended layer, by number.
    [[nodiscard]] Result<void> checkAppended(std::span<const std::int64_t> tokens) const;
    // Ahead of the plan that carries the same lengths: runs grow by tokens[i].
    void commit(std::span<const std::int64_t> tokens);

    [[nodiscard]] const Replica& replica() const noexcept { return replica_; }
    [[nodiscard]] std::span<const Run> runs() const noexcept { return runs_.onHost(); }
    [[nodiscard]] std::int64_t rows() const noexcept { return runs_.rows(); }
    [[nodiscard]] int headDim(int layer) const { return groupOf(layer).config.block.head_dim; }
    [[nodiscard]] const BlockShape& blockShape(int group) const {
        return groupAt(group).config.block;
    }
    [[nodiscard]] const Pool& devicePool(int group) const { return groupAt(group).device_pool; }
    [[nodiscard]] const Pool& hostPool(int group) const { return groupAt(group).host_pool; }

private:
    struct Group {
        ShardGroup config;
        Pool device_pool, host_pool;
        BlockTables tables;
        std::size_t angles;   // index into angles_
        Buffer plan;          // of attend, made in apply
        Buffer fixed_scales;  // as in config; 0 bytes: none
    };
    struct Memory {
        std::vector<Group> groups;
        std::vector<StepAngles> angles;
        StepRuns runs;
        StagingRing staging;
        Buffer q, out, lse, workspace;
    };
    // Where a layer is.
    struct LayerPlace {
        int group;
        int within;
    };
    struct CopyStream {
        explicit CopyStream(Device& device) : stream(device), before(device), after(device) {}
        Stream stream;
        Event before, after;  // what the copies wait for, and what waits for them
    };

    Shard(Device& device, const ShardConfig& config, Memory memory);
    [[nodiscard]] bool copyBlocks(std::span<const CopyRecord> copies, StreamView stream);
    void mark(int layer);
    [[nodiscard]] AttendParams attendParams(const Group& group, const Extent& extent) const;
    void forgetPast(std::int32_t slot, std::int64_t length);
    [[nodiscard]] Result<void> checkLayer(int layer) const;
    [[nodiscard]] const Group& groupAt(int group) const {
        return groups_[static_cast<std::size_t>(group)];
    }
    [[nodiscard]] const LayerPlace& layerAt(int layer) const {
        return layers_[static_cast<std::size_t>(layer)];
    }
    [[nodiscard]] const Group& groupOf(int layer) const { return groupAt(layerAt(layer).group); }

    Device* device_;
    ShardConfig config_;
    std::vector<LayerPlace> layers_;  // [layer]
    std::vector<Group> groups_;
    std::vector<StepAngles> angles_;  // one for each embedding, whatever groups share it
    Replica replica_;
    StepRuns runs_;
    StagingRing staging_;
    Buffer q_;          // [max_step_tokens, query heads, largest head_dim] fp32, rotated
    Buffer out_;        // [max_step_tokens, query heads, largest head_dim] fp32
    Buffer lse_;        // [max_step_tokens, query heads] fp32
    Buffer workspace_;  // of attend
    std::vector<std::int64_t> appended_;  // [slot][layer]: positions below are written
    std::vector<BlockPair> pairs_;
    CopyStream copies_;
    std::int64_t capture_rows_ = 0;
    int q_layer_ = -1;         // whose q lies in q_
    bool q_captured_ = false;  // or will, when the capture is launched
};

}  // namespace kvgrid
