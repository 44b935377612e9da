#include "shard/block_tables.h"

#include <algorithm>
#include <utility>

namespace kvgrid {

namespace {

constexpr std::int64_t angle_chunk_rows = 256;

}  // namespace

Result<BlockTables> BlockTables::create(Device& device, const PlanLimits& limits, int group,
                                        int context) {
    const std::size_t entries = static_cast<std::size_t>(limits.max_sequences) *
                                static_cast<std::size_t>(limits.of(group).blocks_per_sequence);
    Result<Buffer> table = Buffer::onDevice(device, entries * sizeof(std::int32_t));
    if (!table) return tl::unexpected<Failure>(table.error());
    device.fill(table->data(), 0xFF, table->bytes(), device.defaultStream());
    return BlockTables(limits, group, context, std::move(*table));
}

BlockTables::BlockTables(const PlanLimits& limits, int group, int context, Buffer entries)
    : stride_(limits.of(group).blocks_per_sequence),
      group_(group),
      context_(context),
      mirror_(static_cast<std::size_t>(limits.max_sequences) * static_cast<std::size_t>(stride_),
              -1),
      slot_dirty_(static_cast<std::size_t>(limits.max_sequences), -1),
      entries_(std::move(entries)) {}

BlockTableView BlockTables::view() const noexcept {
    return {.entries = entries_.as<const std::int32_t>(), .stride = stride_};
}

void BlockTables::apply(std::span<const TableRecord> changes, StagingRing& staging,
                        StreamView stream) {
    const auto stride = static_cast<std::size_t>(stride_);
    for (const TableRecord& change : changes) {
        if (change.group != group_ || change.context != context_) continue;
        const auto slot = static_cast<std::size_t>(change.slot);
        mirror_[slot * stride + static_cast<std::size_t>(change.logical)] =
            change.tier == Tier::device ? change.block : -1;
        if (slot_dirty_[slot] < 0) {
            slot_dirty_[slot] = static_cast<std::int32_t>(dirty_.size());
            dirty_.push_back({change.slot, change.logical, change.logical});
        } else {
            Dirty& range = dirty_[static_cast<std::size_t>(slot_dirty_[slot])];
            range.first = std::min(range.first, change.logical);
            range.last = std::max(range.last, change.logical);
        }
    }
    for (const Dirty& range : dirty_) {
        const std::size_t first =
            static_cast<std::size_t>(range.slot) * stride + static_cast<std::size_t>(range.first);
        const auto count =
            static_cast<std::size_t>(range.last) - static_cast<std::size_t>(range.first) + 1;
        staging.upload(entries_.as<std::int32_t>() + first, mirror_.data() + first,
                       count * sizeof(std::int32_t), stream);
        slot_dirty_[static_cast<std::size_t>(range.slot)] = -1;
    }
    dirty_.clear();
}

Result<StepRuns> StepRuns::create(Device& device, const PlanLimits& limits) {
    Result<Buffer> runs =
        Buffer::onDevice(device, static_cast<std::size_t>(limits.max_sequences) * sizeof(Run));
    if (!runs) return tl::unexpected<Failure>(runs.error());
    device.fill(runs->data(), 0, runs->bytes(), device.defaultStream());
    return StepRuns(std::move(*runs));
}

void StepRuns::apply(std::span<const RunRecord> runs, StagingRing& staging, StreamView stream) {
    const std::size_t before = runs_.size();
    runs_.clear();
    rows_ = 0;
    max_position_ = -1;
    least_rows_ = 0;
    for (const RunRecord& run : runs) {
        runs_.push_back({.slot = run.slot,
                         .rows = run.rows,
                         .first_row = rows_,
                         .first_position = run.first_position});
        rows_ += run.rows;
        max_position_ = std::max(max_position_, run.first_position + run.rows - 1);
        least_rows_ = least_rows_ == 0 ? run.rows : std::min<std::int64_t>(least_rows_, run.rows);
    }
    // Behind them, where the last step had more, come runs of 0 rows.
    const std::size_t count = runs_.size();
    runs_.resize(std::max(count, before));
    staging.upload(device_runs_.data(), runs_.data(), runs_.size() * sizeof(Run), stream);
    runs_.resize(count);
}

Result<StepAngles> StepAngles::create(Device& device, const PlanLimits& limits,
                                      const RotaryEmbedding& rotary) {
    RotaryAngles angles(rotary);
    const std::size_t bytes =
        static_cast<std::size_t>(limits.max_step_tokens) * angles.pairs() * sizeof(float);
    Result<Buffer> cosines = Buffer::onDevice(device, bytes);
    if (!cosines) return tl::unexpected<Failure>(cosines.error());
    Result<Buffer> sines = Buffer::onDevice(device, bytes);
    if (!sines) return tl::unexpected<Failure>(sines.error());
    return StepAngles(std::move(angles), std::move(*cosines), std::move(*sines));
}

StepAngles::StepAngles(RotaryAngles rotary, Buffer cosines, Buffer sines)
    : rotary_(std::move(rotary)),
      cosines_(std::move(cosines)),
      sines_(std::move(sines)) {}

void StepAngles::apply(std::span<const Run> runs, StagingRing& staging, StreamView stream) {
    const std::size_t pairs = rotary_.pairs();
    if (pairs == 0) return;
    angles_.resize(2 * pairs * angle_chunk_rows);
    float* cosines = angles_.data();
    float* sines = angles_.data() + pairs * angle_chunk_rows;
    for (const Run& run : runs) {
        for (std::int64_t done = 0; done < run.rows; done += angle_chunk_rows) {
            const std::int64_t rows = std::min<std::int64_t>(angle_chunk_rows, run.rows - done);
            for (std::int64_t row = 0; row < rows; ++row) {
                const std::size_t to = static_cast<std::size_t>(row) * pairs;
                rotary_.at(run.first_position + done + row, cosines + to, sines + to);
            }
            const auto at = static_cast<std::size_t>(run.first_row + done) * pairs;
            const std::size_t bytes = static_cast<std::size_t>(rows) * pairs * sizeof(float);
            staging.upload(cosines_.as<float>() + at, cosines, bytes, stream);
            staging.upload(sines_.as<float>() + at, sines, bytes, stream);
        }
    }
}

}  // namespace kvgrid
