// What append and attend read on the device, at fixed addresses: the block tables of one layer
// group and context coordinate, the runs of the step, and the step's table of rotary angles. A step
// uploads only what changed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <kvgrid/config.h>
#include <kvgrid/error.h>

#include "kernels/device.h"
#include "kernels/ops.h"
#include "shard/rotary_angles.h"
#include "shard/staging.h"
#include "shard/step_plan.h"

namespace kvgrid {

class BlockTables {
public:
    // does_not_fit: the device memory of the tables, of max_step_tokens rows of angles and of the
    // runs.
    [[nodiscard]] static Result<BlockTables> create(Device& device, const PlanLimits& limits,
                                                    int group, int context,
                                                    const RotaryEmbedding& rotary);

    // Uploads the plan's changes and its runs. Stream-ordered.
    void apply(const StepPlan& plan, StreamView stream);

    [[nodiscard]] BlockTableView view() const noexcept;
    // On the device, [max_sequences]: the step's, then runs of 0 rows.
    [[nodiscard]] const Run* runs() const noexcept { return device_runs_.as<Run>(); }
    [[nodiscard]] std::span<const Run> hostRuns() const noexcept { return runs_; }
    [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
    [[nodiscard]] std::int64_t maxPosition() const noexcept {
        return max_position_;
    }  // -1 without rows
    [[nodiscard]] const float* cosines() const noexcept { return cosines_.as<float>(); }
    [[nodiscard]] const float* sines() const noexcept { return sines_.as<float>(); }

private:
    struct Dirty {
        std::int32_t slot;
        std::int32_t first;
        std::int32_t last;
    };
    struct Memory {
        Buffer entries, runs, cosines, sines;
        StagingRing staging;
    };

    BlockTables(const PlanLimits& limits, int group, int context, const RotaryEmbedding& rotary,
                Memory memory);
    void uploadEntries(std::span<const TableRecord> changes, StreamView stream);
    void uploadRuns(std::span<const RunRecord> runs, StreamView stream);
    void uploadAngles(StreamView stream);

    PlanLimits limits_;
    int group_;
    int context_;
    RotaryAngles rotary_;
    std::vector<std::int32_t> mirror_;      // [slot][logical]; -1: not in the device tier
    std::vector<std::int32_t> slot_dirty_;  // [slot] index into dirty_, or -1
    std::vector<Dirty> dirty_;
    std::vector<Run> runs_;
    std::vector<float> angles_;  // scratch of one chunk of rows
    std::int64_t rows_ = 0;
    std::int64_t max_position_ = -1;
    Buffer entries_;
    Buffer device_runs_;
    Buffer cosines_;
    Buffer sines_;
    StagingRing staging_;
};

}  // namespace kvgrid
