// How a step's attention is cut into units of work, worked out by every block of threads from the
// runs on the device: nothing of it comes from the host, so that a captured launch follows the
// runs.
//
//   tile    8 query rows: rows of a run times query heads of a KV head, in order of row, then head
//   tree    the states of a tile and KV head over the run's stripes, as attention_state.h folds
//   them path    a leaf's place in its tree: the choices from the root down, left 0, most
//   significant
//           first. A stripe n * 64 + lane has the path (bits of the lane, lowest first; bits of n,
//           highest first). Levels whose right half is empty in the whole run are left out: merging
//           the empty state changes nothing.
//   round   4 neighbouring leaves, which the 4 warps of a block of threads compute at a time
//   unit    an aligned subtree of 2^k rounds of a tree, which a block of threads folds on chip
//
// A tree of one unit goes straight to the output; units of larger ones go to slots of the
// workspace, which attend_fold_kernel folds. How large a unit is changes no bit.
#pragma once

#include <cstdint>

#include "kernels/attention_state.h"
#include "kernels/ops.h"

namespace kvgrid::cuda {

inline constexpr int warp_size = 32;
inline constexpr unsigned all_lanes = 0xFFFFFFFFU;
inline constexpr int attend_warps = 4;
inline constexpr int schedule_warps = 16;
inline constexpr int tile_rows = 8;
inline constexpr int most_round_bits = 24;  // of a unit
inline constexpr int most_unit_bits = 9;    // of a tree

struct AttendLaunch {
    AttendParams params;
    int blocks = 0;          // of threads, of attend_kernel
    int stages = 0;          // tiles of K or V that a warp keeps under way, and the one it works on
    std::int64_t slots = 0;  // that the workspace holds
};

// Numbers of a slot: out of tile_rows states, then their lse.
__host__ __device__ constexpr std::int64_t slotNumbers(int head_dim) {
    return std::int64_t{tile_rows} * (head_dim + 1);
}

// One run, as it is cut.
struct RunShape {
    int first_lane;   // the lowest lane that this context rank owns
    int lane_bits;    // of a path
    int stripe_bits;  // of a path
    int round_bits;   // a tree has 2^round_bits rounds
    std::int64_t tiles;

    [[nodiscard]] __device__ std::int64_t trees(int kv_heads) const { return tiles * kv_heads; }
};

__device__ __forceinline__ int bitsFor(std::int64_t count) {  // the least with 2^bits >= count
    return count <= 1 ? 0 : 64 - __clzll(count - 1);
}

__device__ __forceinline__ RunShape shapeOf(const Run& run, const AttendParams& params) {
    const int ranks = params.context_ranks;
    const int group = params.query_heads / params.kv_heads;
    RunShape shape;
    shape.first_lane = ((params.context_rank - run.slot) % ranks + ranks) % ranks;
    shape.tiles = (std::int64_t{run.rows} * group + tile_rows - 1) / tile_rows;
    const std::int64_t stripes =
        run.rows == 0 ? 0 : (run.first_position + run.rows - 1) / stripe_tokens + 1;
    const std::int64_t beyond = stripes - shape.first_lane;  // of the first lane on
    const std::int64_t lanes = (beyond + ranks - 1) / ranks;
    const std::int64_t most = lane_count / ranks;
    shape.lane_bits = bitsFor(lanes < most ? lanes : most);
    shape.stripe_bits = bitsFor((beyond + lane_count - 1) / lane_count);
    const int path_bits = shape.lane_bits + shape.stripe_bits;
    shape.round_bits = path_bits > 2 ? path_bits - 2 : 0;
    return shape;
}

// log2 of the rounds of a unit of this run, given the step's.
__device__ __forceinline__ int unitBits(const RunShape& shape, int step_bits) {
    if (shape.round_bits <= step_bits) return shape.round_bits;
    const int least = shape.round_bits - most_unit_bits;
    return step_bits > least ? step_bits : least;
}

template <typename T>
__device__ __forceinline__ T warpSum(T value) {
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(all_lanes, value, distance);
    return value;
}

// log2 of the rounds of a unit in this step: as large as keeps the blocks of threads evenly busy,
// and so that the units of cut trees fit the slots. Called by all threads of a block of up to
// schedule_warps.
__device__ inline int stepBits(const AttendLaunch& launch) {
    __shared__ std::int64_t sums[schedule_warps];
    const AttendParams& params = launch.params;
    std::int64_t rounds = 0;
    for (std::int64_t i = threadIdx.x; i < params.run_count; i += blockDim.x) {
        const RunShape shape = shapeOf(params.runs[i], params);
        rounds += shape.trees(params.kv_heads) << shape.round_bits;
    }
    rounds = warpSum(rounds);
    if (threadIdx.x % warp_size == 0) sums[threadIdx.x / warp_size] = rounds;
    __syncthreads();
    rounds = 0;
    for (unsigned i = 0; i < blockDim.x / warp_size; ++i)
        rounds += sums[i];
    __syncthreads();

    // Rounds of the busiest block of threads.
    const auto busiest = [&](int bits) {
        const std::int64_t units = ((rounds - 1) >> bits) + 1;
        return (units + launch.blocks - 1) / launch.blocks << bits;
    };
    // A candidate a lane.
    constexpr int preferred_most = 4;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const std::int64_t mine = busiest(lane <= preferred_most ? lane : 0);
    const std::int64_t least = __shfl_sync(all_lanes, mine, 0);
    const bool even = lane <= preferred_most && mine * 64 <= least * 65;
    int bits = 31 - __clz(static_cast<int>(__ballot_sync(all_lanes, even)));
    while (bits < most_round_bits && rounds >> bits > launch.slots)
        ++bits;
    return bits;
}

// A unit of attend_kernel, or a tree of attend_fold_kernel. The same in all lanes of a warp.
struct Unit {
    RunShape shape;
    std::int32_t slot;  // of the block table
    int kv_head;
    int rows;                     // of the tile that exist, 1 to tile_rows
    int round_bits;               // of the unit
    bool whole;                   // the unit is its tree
    std::int64_t first_round;     // in the tree
    std::int64_t last_position;   // of the tile
    std::int64_t first_position;  // of the run
    std::int64_t first_row;       // of the run
    std::int64_t first_query;     // of the tile, counted over rows and heads of the run
    std::int64_t workspace_slot;  // of the unit, or of the tree's first
    std::int64_t slot_stride;     // from one unit of the tree to the next

    // Stripes up to the tile's last position.
    [[nodiscard]] __device__ std::int64_t stripes() const {
        return last_position / stripe_tokens + 1;
    }

    // The stripe at a path; a huge one where the tree has no such path.
    [[nodiscard]] __device__ std::int64_t stripeAt(std::int64_t path, int context_ranks) const {
        if (path >> (shape.lane_bits + shape.stripe_bits) != 0) return INT64_MAX;
        const auto lane_path = static_cast<unsigned>(path >> shape.stripe_bits);
        const std::int64_t lane =
            shape.first_lane +
            std::int64_t{__brev(lane_path) >> 1 >> (31 - shape.lane_bits)} * context_ranks;
        const std::int64_t round_of_lanes = path & ((std::int64_t{1} << shape.stripe_bits) - 1);
        return round_of_lanes * lane_count + lane;
    }

    struct Query {
        std::int64_t row;  // of the step
        int head;          // of the KV head's group
        std::int64_t position;
    };
    [[nodiscard]] __device__ Query query(int row_of_tile, int group) const {
        const std::int64_t index = first_query + row_of_tile;
        const std::int64_t row = index / group;
        return {first_row + row, static_cast<int>(index - row * group), first_position + row};
    }
};

// Walks the runs in order, 32 at a time, for a warp that asks for ascending indices.
template <bool trees>  // trees that are cut, instead of units
class UnitCursor {
public:
    __device__ UnitCursor(const AttendParams& params, int step_bits)
        : params_(params),
          step_bits_(step_bits) {}

    // The unit (or tree) of this index, counted over the step; false past the last.
    __device__ bool find(std::int64_t index, Unit& unit) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        while (first_run_ < params_.run_count) {
            std::int64_t items = 0;
            std::int64_t slots = 0;
            if (first_run_ + lane < params_.run_count)
                count(params_.runs[first_run_ + lane], items, slots);
            std::int64_t items_end = items;
            std::int64_t slots_end = slots;
#pragma unroll
            for (int distance = 1; distance < warp_size; distance *= 2) {
                const std::int64_t more_items = __shfl_up_sync(all_lanes, items_end, distance);
                const std::int64_t more_slots = __shfl_up_sync(all_lanes, slots_end, distance);
                if (lane >= distance) {
                    items_end += more_items;
                    slots_end += more_slots;
                }
            }
            const unsigned after = __ballot_sync(all_lanes, first_item_ + items_end > index);
            if (after != 0) {
                const int at = __ffs(static_cast<int>(after)) - 1;
                const std::int64_t before =
                    first_item_ + __shfl_sync(all_lanes, items_end - items, at);
                const std::int64_t slots_before =
                    first_slot_ + __shfl_sync(all_lanes, slots_end - slots, at);
                decode(params_.runs[first_run_ + at], index - before, slots_before, unit);
                return true;
            }
            first_item_ += __shfl_sync(all_lanes, items_end, warp_size - 1);
            first_slot_ += __shfl_sync(all_lanes, slots_end, warp_size - 1);
            first_run_ += warp_size;
        }
        return false;
    }

private:
    __device__ void count(const Run& run, std::int64_t& items, std::int64_t& slots) const {
        const RunShape shape = shapeOf(run, params_);
        const int cut_bits = shape.round_bits - unitBits(shape, step_bits_);
        const std::int64_t units = shape.trees(params_.kv_heads) << cut_bits;
        slots = cut_bits == 0 ? 0 : units;
        items = !trees ? units : cut_bits == 0 ? 0 : shape.trees(params_.kv_heads);
    }

    // Tiles vary fastest, so that blocks of threads that run together read the same K and V; then
    // the units of a tree, then KV heads.
    __device__ void decode(const Run& run, std::int64_t index, std::int64_t slots_before,
                           Unit& unit) const {
        const int group = params_.query_heads / params_.kv_heads;
        unit.shape = shapeOf(run, params_);
        unit.round_bits = unitBits(unit.shape, step_bits_);
        const int cut_bits = unit.shape.round_bits - unit.round_bits;
        const std::int64_t tiles = unit.shape.tiles;
        const std::int64_t head_and_unit = index / tiles;
        const std::int64_t tile = index - head_and_unit * tiles;
        const std::int64_t unit_of_tree =
            trees ? 0 : head_and_unit & ((std::int64_t{1} << cut_bits) - 1);
        unit.kv_head = static_cast<int>(trees ? head_and_unit : head_and_unit >> cut_bits);
        unit.slot = run.slot;
        unit.whole = cut_bits == 0;
        unit.first_round = unit_of_tree << unit.round_bits;
        unit.first_position = run.first_position;
        unit.first_row = run.first_row;
        unit.first_query = tile * tile_rows;
        const std::int64_t queries = std::int64_t{run.rows} * group - unit.first_query;
        unit.rows = static_cast<int>(queries < tile_rows ? queries : tile_rows);
        unit.last_position = run.first_position + (unit.first_query + unit.rows - 1) / group;
        unit.slot_stride = tiles;
        unit.workspace_slot =
            slots_before +
            ((static_cast<std::int64_t>(unit.kv_head) << cut_bits) + unit_of_tree) * tiles + tile;
    }

    const AttendParams& params_;
    int step_bits_;
    std::int64_t first_run_ = 0;
    std::int64_t first_item_ = 0;
    std::int64_t first_slot_ = 0;
};

}  // namespace kvgrid::cuda
