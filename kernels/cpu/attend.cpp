// Cuts a step into units and folds what a state was cut into.
#include <algorithm>
#include <bit>
#include <string>

#include "kernels/cpu/attend_unit.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/merge_states.h"
#include "kernels/cpu/operations.h"
#include "kernels/paging.h"

namespace kvgrid::cpu {
namespace {

static_assert(sizeof(AttendScratch) <= CpuDevice::scratch_bytes);

// Units a thread, so that threads finish together.
constexpr std::int64_t units_per_thread = 8;
// More workspace than this is not asked for: a step of that many rows has units enough.
constexpr std::int64_t workspace_state_bytes = std::int64_t{32} << 20;

// Rows of a run in one unit: few enough that short runs still share the threads' work.
int rowsPerUnit(int group) {
    return std::max(1, max_unit_rows / 2 / group);
}

// Where each run starts, counted in units (of one part) and in rows.
struct RunStart {
    std::int64_t unit;
    std::int64_t row;
};

std::int64_t bytesForStarts(std::int64_t runs) {
    const std::int64_t bytes = (runs + 1) * static_cast<std::int64_t>(sizeof(RunStart));
    return (bytes + 63) / 64 * 64;
}

std::int64_t stateBytes(std::int64_t rows, int query_heads, int head_dim) {
    return rows * query_heads * (head_dim + 1) * static_cast<std::int64_t>(sizeof(float));
}

// The run that holds `index`, where starts[i].*member is ascending.
std::int64_t findRun(const RunStart* starts, std::int64_t runs, std::int64_t RunStart::*member,
                     std::int64_t index) {
    const RunStart* const after = std::upper_bound(
        starts, starts + runs, index,
        [member](std::int64_t value, const RunStart& s) { return value < s.*member; });
    return after - starts - 1;
}

class Attend {
public:
    Attend(const AttendParams& params, CpuDevice& device)
        : params_(params),
          device_(device),
          group_(params.query_heads / params.kv_heads),
          rows_per_unit_(rowsPerUnit(group_)),
          starts_(static_cast<RunStart*>(params.workspace)) {
        check();
        layOut();
        chooseParts();
    }

    void run() {
        const std::int64_t units = starts_[params_.run_count].unit * parts_;
        device_.pool().parallelFor(units, [this](std::int64_t index, int thread) {
            attendUnit(unit(index), *reinterpret_cast<AttendScratch*>(device_.scratch(thread)));
        });
        if (parts_ == 1) return;
        device_.pool().parallelFor(rows(), [this](std::int64_t row, int thread) {
            fold(row, reinterpret_cast<float*>(device_.scratch(thread)));
        });
    }

private:
    void check() const {
        if (params_.head_dim > max_head_dim || params_.head_dim % head_dim_unit != 0 ||
            group_ > max_unit_rows)
            throw Error(ErrorCode::internal, "attend: head dim " +
                                                 std::to_string(params_.head_dim) + ", group " +
                                                 std::to_string(group_));
        if (params_.workspace_bytes < static_cast<std::size_t>(bytesForStarts(params_.run_count)))
            throw Error(ErrorCode::internal, "attend: the workspace is too small");
    }

    std::int64_t rows() const { return starts_[params_.run_count].row; }

    std::int64_t blocks(const Run& run) const {
        return (run.rows + rows_per_unit_ - 1) / rows_per_unit_;
    }

    void layOut() {
        RunStart next{0, 0};
        for (std::int64_t i = 0; i < params_.run_count; ++i) {
            const Run& run = params_.runs[i];
            starts_[i] = next;
            next.unit += blocks(run) * params_.kv_heads;
            next.row += run.rows;
        }
        starts_[params_.run_count] = next;
    }

    // Into how many subtrees of lanes each state is cut: so many that no unit is a large share of
    // the work, and not more than the workspace holds. The bits do not depend on it.
    void chooseParts() {
        std::int64_t longest = 0;
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < params_.run_count; ++i) {
            const Run& run = params_.runs[i];
            const std::int64_t stripes =
                (run.first_position + run.rows) / stripe_tokens + 1 -
                firstSeen(run.first_position, params_.window) / stripe_tokens;
            longest = std::max(longest, stripes);
            total += stripes * blocks(run) * params_.kv_heads;
        }
        if (device_.threads() == 1 || total == 0) return;
        const std::int64_t wanted = device_.threads() * units_per_thread;
        const std::int64_t state_bytes = stateBytes(rows(), params_.query_heads, params_.head_dim);
        const std::int64_t room =
            static_cast<std::int64_t>(params_.workspace_bytes) - bytesForStarts(params_.run_count);
        while (parts_ < lane_count / params_.context_ranks && parts_ * total < longest * wanted &&
               2 * parts_ * state_bytes <= room)
            parts_ *= 2;
    }

    float* partOut(int part) const {
        auto* const states =
            static_cast<std::byte*>(params_.workspace) + bytesForStarts(params_.run_count);
        return reinterpret_cast<float*>(states) +
               part * rows() * params_.query_heads * params_.head_dim;
    }
    float* partLse(int part) const { return partOut(parts_) + part * rows() * params_.query_heads; }

    AttendUnit unit(std::int64_t index) const {
        // KV heads vary fastest: where they lie side by side, threads read one stream together.
        const std::int64_t run_index =
            findRun(starts_, params_.run_count, &RunStart::unit, index / parts_);
        const Run& run = params_.runs[run_index];
        const std::int64_t within = index - starts_[run_index].unit * parts_;
        const int kv_head = static_cast<int>(within % params_.kv_heads);
        const int part = static_cast<int>(within / params_.kv_heads % parts_);
        const std::int64_t first_row = within / params_.kv_heads / parts_ * rows_per_unit_;

        AttendUnit unit;
        unit.params = &params_;
        unit.run = &run;
        unit.first_row = first_row;
        unit.rows = static_cast<int>(std::min<std::int64_t>(rows_per_unit_, run.rows - first_row));
        unit.kv_head = kv_head;
        unit.lane_stride = params_.context_ranks * parts_;
        unit.first_lane = ownedLane(run) + params_.context_ranks * part;
        const std::int64_t row = (parts_ == 1 ? run.first_row : starts_[run_index].row) + first_row;
        const std::int64_t state = row * params_.query_heads + kv_head * group_;
        unit.out = (parts_ == 1 ? params_.out : partOut(part)) + state * params_.head_dim;
        unit.lse = (parts_ == 1 ? params_.lse : partLse(part)) + state;
        return unit;
    }

    // The lowest lane that this context rank owns of a run's sequence.
    int ownedLane(const Run& run) const {
        const int ranks = params_.context_ranks;
        return ((params_.context_rank - run.slot) % ranks + ranks) % ranks;
    }

    // Folds the parts of one row, counted over the runs.
    void fold(std::int64_t row, float* scratch) const {
        const std::int64_t run_index = findRun(starts_, params_.run_count, &RunStart::row, row);
        const std::int64_t to = params_.runs[run_index].first_row + row - starts_[run_index].row;
        for (int head = 0; head < params_.query_heads; ++head) {
            const std::int64_t from_state = row * params_.query_heads + head;
            const std::int64_t to_state = to * params_.query_heads + head;
            const StateParts parts{.out = partOut(0) + from_state * params_.head_dim,
                                   .lse = partLse(0) + from_state,
                                   .out_stride = rows() * params_.query_heads * params_.head_dim,
                                   .lse_stride = rows() * params_.query_heads,
                                   .count = parts_,
                                   .head_dim = params_.head_dim};
            mergeParts(parts, scratch, params_.out + to_state * params_.head_dim,
                       params_.lse + to_state);
        }
    }

    const AttendParams& params_;
    CpuDevice& device_;
    int group_;
    int rows_per_unit_;
    RunStart* starts_;  // [run_count + 1], in the workspace
    int parts_ = 1;
};

}  // namespace

void attend(const AttendParams& params, StreamView stream) {
    if (params.run_count == 0) return;
    Attend(params, cpuDevice(stream)).run();
}

// The work is cut while it is done.
void planAttend(const AttendParams&, StreamView) {}

std::size_t attendPlanBytes(std::int64_t, std::int64_t, int) {
    return 0;
}

std::size_t attendWorkspaceBytes(std::int64_t rows, int query_heads, int head_dim) {
    const std::int64_t one_part = stateBytes(rows, query_heads, head_dim);
    std::int64_t states = 0;
    for (int parts = 2; parts <= lane_count && parts * one_part <= workspace_state_bytes;
         parts *= 2)
        states = parts * one_part;
    return static_cast<std::size_t>(bytesForStarts(rows) + states);
}

}  // namespace kvgrid::cpu
