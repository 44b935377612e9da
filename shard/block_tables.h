// What append and attend read on the device, at fixed addresses: the block tables of each layer
// group, the runs of the step, and the step's tables of rotary angles. A step uploads only what
// changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvgrid/config.h>
#include <kvgrid/error.h>

#include "kernels/device.h"
#include "kernels/ops.h"
#include "shard/rotary_angles.h"
#include "shard/staging.h"
#include "shard/step_plan.h"

namespace kvgrid {

// The block tables of one layer group and context coordinate.
class BlockTables {
public:
    // does_not_fit: the device memory of the tables.
    [[nodiscard]] static Result<BlockTables> create(Device& device, const PlanLimits& limits,
                                                    int group, int context);

    // Uploads the changes that are of this group and context. Stream-ordered, as all below.
    void apply(std::span<const TableRecord> changes, StagingRing& staging, StreamView stream);

    [[nodiscard]] BlockTableView view() const noexcept;

private:
    struct Dirty {
        std::int32_t slot;
        std::int32_t first;
        std::int32_t last;
    };

    BlockTables(const PlanLimits& limits, int group, int context, Buffer entries);

    std::int64_t stride_;  // entries a slot
    int group_;
    int context_;
    std::vector<std::int32_t> mirror_;      // [slot][logical]; -1: not in the device tier
    std::vector<std::int32_t> slot_dirty_;  // [slot] index into dirty_, or -1
    std::vector<Dirty> dirty_;
    Buffer entries_;
};

// The runs of the step.
class StepRuns {
public:
    // does_not_fit: the device memory of a run for each sequence.
    [[nodiscard]] static Result<StepRuns> create(Device& device, const PlanLimits& limits);

    void apply(std::span<const RunRecord> runs, StagingRing& staging, StreamView stream);

    // On the device, [max_sequences]: the step's, then runs of 0 rows.
    [[nodiscard]] const Run* onDevice() const noexcept { return device_runs_.as<Run>(); }
    [[nodiscard]] std::span<const Run> onHost() const noexcept { return runs_; }
    [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
    [[nodiscard]] std::int64_t maxPosition() const noexcept {
        return max_position_;
    }  // -1 without rows
    // Of the shortest run; 0 without.
    [[nodiscard]] std::int64_t leastRows() const noexcept { return least_rows_; }

private:
    explicit StepRuns(Buffer device_runs) : device_runs_(std::move(device_runs)) {}

    std::vector<Run> runs_;
    std::int64_t rows_ = 0;
    std::int64_t max_position_ = -1;
    std::int64_t least_rows_ = 0;
    Buffer device_runs_;
};

// Cosines and sines of one rotary embedding for the rows of the step.
class StepAngles {
public:
    // does_not_fit: the device memory of max_step_tokens rows.
    [[nodiscard]] static Result<StepAngles> create(Device& device, const PlanLimits& limits,
                                                   const RotaryEmbedding& rotary);

    void apply(std::span<const Run> runs, StagingRing& staging, StreamView stream);

    // Pairs of elements that turn together: rotary dim / 2.
    [[nodiscard]] std::size_t pairs() const noexcept { return rotary_.pairs(); }
    // [max_step_tokens, pairs]
    [[nodiscard]] const float* cosines() const noexcept { return cosines_.as<float>(); }
    [[nodiscard]] const float* sines() const noexcept { return sines_.as<float>(); }

private:
    StepAngles(RotaryAngles rotary, Buffer cosines, Buffer sines);

    RotaryAngles rotary_;
    std::vector<float> angles_;  // scratch of one chunk of rows
    Buffer cosines_;
    Buffer sines_;
};

}  // namespace kvgrid
