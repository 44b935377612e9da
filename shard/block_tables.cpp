#include "shard/block_tables.h"

#include <algorithm>
#include <utility>

namespace kvgrid {

namespace {

constexpr std::size_t staging_bytes = std::size_t{1} << 20;
constexpr std::int64_t angle_chunk_rows = 256;

}  // namespace

Result<BlockTables> BlockTables::create(Device& device, const PlanLimits& limits, int group,
                                        int context, const RotaryEmbedding& rotary) {
    const auto slots = static_cast<std::size_t>(limits.max_sequences);
    const auto entries = slots * static_cast<std::size_t>(limits.blocks_per_sequence);
    const auto angles =
        static_cast<std::size_t>(limits.max_step_tokens) * static_cast<std::size_t>(rotary.dim / 2);
    Result<Buffer> table = Buffer::onDevice(device, entries * sizeof(std::int32_t));
    if (!table) return tl::unexpected<Failure>(table.error());
    Result<Buffer> runs = Buffer::onDevice(device, slots * sizeof(Run));
    if (!runs) return tl::unexpected<Failure>(runs.error());
    Result<Buffer> cosines = Buffer::onDevice(device, angles * sizeof(float));
    if (!cosines) return tl::unexpected<Failure>(cosines.error());
    Result<Buffer> sines = Buffer::onDevice(device, angles * sizeof(float));
    if (!sines) return tl::unexpected<Failure>(sines.error());
    Result<StagingRing> staging = StagingRing::create(device, staging_bytes);
    if (!staging) return tl::unexpected<Failure>(staging.error());
    device.fill(table->data(), 0xFF, table->bytes(), device.defaultStream());
    device.fill(runs->data(), 0, runs->bytes(), device.defaultStream());
    return BlockTables(limits, group, context, rotary,
                       Memory{std::move(*table), std::move(*runs), std::move(*cosines),
                              std::move(*sines), std::move(*staging)});
}

BlockTables::BlockTables(const PlanLimits& limits, int group, int context,
                         const RotaryEmbedding& rotary, Memory memory)
    : limits_(limits),
      group_(group),
      context_(context),
      rotary_(rotary),
      mirror_(static_cast<std::size_t>(limits.max_sequences) *
                  static_cast<std::size_t>(limits.blocks_per_sequence),
              -1),
      slot_dirty_(static_cast<std::size_t>(limits.max_sequences), -1),
      entries_(std::move(memory.entries)),
      device_runs_(std::move(memory.runs)),
      cosines_(std::move(memory.cosines)),
      sines_(std::move(memory.sines)),
      staging_(std::move(memory.staging)) {}

BlockTableView BlockTables::view() const noexcept {
    return {.entries = entries_.as<const std::int32_t>(), .stride = limits_.blocks_per_sequence};
}

void BlockTables::apply(const StepPlan& plan, StreamView stream) {
    uploadEntries(plan.tables, stream);
    uploadRuns(plan.runs, stream);
    uploadAngles(stream);
}

void BlockTables::uploadEntries(std::span<const TableRecord> changes, StreamView stream) {
    for (const TableRecord& change : changes) {
        if (change.group != group_ || change.context != context_) continue;
        const auto slot = static_cast<std::size_t>(change.slot);
        mirror_[slot * static_cast<std::size_t>(limits_.blocks_per_sequence) +
                static_cast<std::size_t>(change.logical)] =
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
        const std::size_t first = static_cast<std::size_t>(range.slot) *
                                      static_cast<std::size_t>(limits_.blocks_per_sequence) +
                                  static_cast<std::size_t>(range.first);
        const auto count =
            static_cast<std::size_t>(range.last) - static_cast<std::size_t>(range.first) + 1;
        staging_.upload(entries_.as<std::int32_t>() + first, mirror_.data() + first,
                        count * sizeof(std::int32_t), stream);
        slot_dirty_[static_cast<std::size_t>(range.slot)] = -1;
    }
    dirty_.clear();
}

void BlockTables::uploadRuns(std::span<const RunRecord> runs, StreamView stream) {
    const std::size_t before = runs_.size();
    runs_.clear();
    rows_ = 0;
    max_position_ = -1;
    for (const RunRecord& run : runs) {
        runs_.push_back({.slot = run.slot,
                         .rows = run.rows,
                         .first_row = rows_,
                         .first_position = run.first_position});
        rows_ += run.rows;
        max_position_ = std::max(max_position_, run.first_position + run.rows - 1);
    }
    // Behind them, where the last step had more, come runs of 0 rows.
    const std::size_t count = runs_.size();
    runs_.resize(std::max(count, before));
    staging_.upload(device_runs_.data(), runs_.data(), runs_.size() * sizeof(Run), stream);
    runs_.resize(count);
}

void BlockTables::uploadAngles(StreamView stream) {
    const std::size_t pairs = rotary_.pairs();
    if (pairs == 0) return;
    angles_.resize(2 * pairs * angle_chunk_rows);
    float* cosines = angles_.data();
    float* sines = angles_.data() + pairs * angle_chunk_rows;
    for (const Run& run : runs_) {
        for (std::int64_t done = 0; done < run.rows; done += angle_chunk_rows) {
            const std::int64_t rows = std::min<std::int64_t>(angle_chunk_rows, run.rows - done);
            for (std::int64_t row = 0; row < rows; ++row) {
                const std::size_t to = static_cast<std::size_t>(row) * pairs;
                rotary_.at(run.first_position + done + row, cosines + to, sines + to);
            }
            const auto at = static_cast<std::size_t>(run.first_row + done) * pairs;
            const std::size_t bytes = static_cast<std::size_t>(rows) * pairs * sizeof(float);
            staging_.upload(cosines_.as<float>() + at, cosines, bytes, stream);
            staging_.upload(sines_.as<float>() + at, sines, bytes, stream);
        }
    }
}

}  // namespace kvgrid
