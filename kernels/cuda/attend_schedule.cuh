// How a step's attention is cut into units of work. attend_plan.cu works it out from the runs on
// the device, once for all layers: nothing of it comes from the host, so that a captured launch
// follows the runs.
//
//   tile    up to 8 query rows, or 16, 32, 64, 128, as the kernel has it: rows of a run times query
//           heads of a KV head, in order of row, then head, in tiles of one size
//   tree    the states of a tile and KV head over the run's stripes, as attention_state.h folds
//           them
//   path    a leaf's place in its tree: the choices from the root down, left 0, most significant
//           first. A stripe n * 64 + lane has the path (bits of the lane, lowest first; bits of n,
//           highest first). Levels of which one half is empty in the whole run are left out:
//           merging the empty state changes nothing. So a run that sees at most 64 stripes has no
//           bits of n: a lane has one stripe.
//   unit    an aligned subtree of 2^k leaves of a tree, which a block of threads (or a team of its
//           warps) folds by itself. attend_kernel computes four leaves at a time, a warp each;
//           where there is little to do in all, one with four warps (attend_team.cuh)
//
// A tree of one unit goes straight to the output; units of larger ones go to slots of the
// workspace. Up to 16 of them are folded by who stores the last (attend_fold.cuh), more by
// attend_fold_kernel. How large a unit is changes no bit.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "kernels/attention_state.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/ops.h"
#include "kernels/paging.h"

namespace kvgrid::cuda {

inline constexpr int attend_warps = 4;
inline constexpr int product_rows = 8;  // query rows of a matrix product
inline constexpr int most_tile_rows = 128;
// Behind all stripes; the positions of its tokens are numbers too.
inline constexpr std::int64_t no_stripe = INT64_MAX / (2 * stripe_tokens);
inline constexpr int leaves_by_warps_bits = 2;  // log2 of the leaves that warps compute at a time
static_assert(1 << leaves_by_warps_bits == attend_warps);
inline constexpr int queue_slots = 3;
inline constexpr int most_stages = 8;           // of a ring
inline constexpr int most_leaf_bits = 26;       // of a unit
inline constexpr int most_unit_bits = 10;       // of a tree
inline constexpr int small_tree_bits = 4;       // of the units of a tree that its own warps fold
inline constexpr int fold_warps = 16;           // of a block of threads of attend_fold_kernel
inline constexpr int most_computing_warps = 8;  // that have the rows of a tile
// What the workspace holds at most: enough units for many more multiprocessors than there are.
inline constexpr std::int64_t most_slots = 4096;
// Trees that attend_fold_kernel folds.
inline constexpr std::int64_t most_trees = most_slots >> (small_tree_bits + 1);

// Numbers of a slot: out of a tile's states, then their lse.
__host__ __device__ constexpr std::int64_t slotNumbers(int tile_rows, int head_dim) {
    return std::int64_t{tile_rows} * (head_dim + 1);
}

// Numbers of the workspace are counted by an int.
static_assert(most_slots * slotNumbers(most_tile_rows, 256) < std::int64_t{1} << 31);

// Mostly there is little to divide, and 64 bits take many times as long as 32.
__device__ __forceinline__ std::int64_t divide(std::int64_t dividend, std::int64_t divisor) {
    if ((dividend | divisor) >> 32 == 0)
        return static_cast<std::uint32_t>(dividend) / static_cast<std::uint32_t>(divisor);
    return dividend / divisor;
}

// One run, as it is cut.
struct RunShape {
    int first_lane;             // the lowest lane that this context rank owns
    int lane_bits;              // of a path
    int stripe_bits;            // of a path
    int leaf_bits;              // a tree has 2^leaf_bits leaves
    std::int64_t first_stripe;  // that some row sees
    std::int64_t tiles;

    [[nodiscard]] __device__ std::int64_t trees(int kv_heads) const { return tiles * kv_heads; }
};

__device__ __forceinline__ int bitsFor(std::int64_t count) {  // the least with 2^bits >= count
    return count <= 1 ? 0 : 64 - __clzll(count - 1);
}

// least_bits: a tree has 2^least_bits leaves at least, empty ones if need be.
__device__ __forceinline__ RunShape shapeOf(const Run& run, const AttendParams& params,
                                            int tile_rows, int least_bits) {
    const int ranks = params.context_ranks;
    const int group = params.query_heads / params.kv_heads;
    RunShape shape;
    shape.first_lane = ((params.context_rank - run.slot) % ranks + ranks) % ranks;
    shape.tiles = (std::int64_t{run.rows} * group + tile_rows - 1) / tile_rows;
    shape.first_stripe = firstSeen(run.first_position, params.window) / stripe_tokens;
    const std::int64_t stripes =
        run.rows == 0 ? 0 : (run.first_position + run.rows - 1) / stripe_tokens + 1;
    const std::int64_t most = lane_count / ranks;
    if (shape.first_stripe == 0) {
        const std::int64_t beyond = stripes - shape.first_lane;  // of the first lane on
        const std::int64_t lanes = (beyond + ranks - 1) / ranks;
        shape.lane_bits = bitsFor(lanes < most ? lanes : most);
        shape.stripe_bits = bitsFor((beyond + lane_count - 1) / lane_count);
    } else {
        shape.lane_bits = bitsFor(most);
        // Of the first and the last n, those from the highest in which they differ on.
        const std::int64_t first = shape.first_stripe / lane_count;
        const std::int64_t last = (stripes - 1) / lane_count;
        shape.stripe_bits =
            stripes - shape.first_stripe <= lane_count ? 0 : bitsFor((first ^ last) + 1);
    }
    const int path_bits = shape.lane_bits + shape.stripe_bits;
    shape.leaf_bits = path_bits > least_bits ? path_bits : least_bits;
    return shape;
}

// A unit of attend_kernel, or a tree of attend_fold_kernel.
struct alignas(16) Unit {
    RunShape shape;
    std::int64_t first_leaf;      // in the tree
    std::int64_t first_seen;      // position that some row of the tile sees
    std::int64_t last_position;   // of the tile
    std::int64_t first_position;  // of the run
    std::int64_t first_row;       // of the run
    std::int64_t first_query;     // of the tile, counted over rows and heads of the run
    std::int32_t slot;            // of the block table
    std::int32_t kv_head;
    std::int32_t rows;            // of the tile that exist, 1 to all
    std::int32_t leaf_bits;       // of the unit
    std::int32_t workspace_slot;  // of the unit, or of the tree's first
    std::int32_t slot_stride;     // from one unit of the tree to the next
    std::int32_t by_team;         // 1: four warps compute a leaf; alike in all units of a plan
    std::int32_t unused;

    // log2 of the units of its tree.
    [[nodiscard]] __device__ __forceinline__ int cutBits() const {
        return shape.leaf_bits - leaf_bits;
    }

    // Whether some row of the tile sees something of a stripe.
    [[nodiscard]] __device__ __forceinline__ bool sees(std::int64_t stripe) const {
        return stripe <= last_position / stripe_tokens && stripe >= first_seen / stripe_tokens;
    }

    // How many tokens of a stripe that it sees come up to its last position.
    [[nodiscard]] __device__ __forceinline__ int tokensOf(std::int64_t stripe) const {
        return static_cast<int>(
            min(last_position - stripe * stripe_tokens + 1, std::int64_t{stripe_tokens}));
    }

    // Whether there is something in the four paths from `path` on. Of four siblings the first is
    // the lowest stripe, behind which there is nothing without a window.
    [[nodiscard]] __device__ __forceinline__ bool seesFour(std::int64_t path,
                                                           int context_ranks) const {
        bool any = sees(stripeAt(path, context_ranks));
        if (first_seen >= stripe_tokens)
            for (int i = 1; i < 4; ++i)
                any = any || sees(stripeAt(path + i, context_ranks));
        return any;
    }

    // The stripe at a path; no_stripe where the tree has no such path.
    [[nodiscard]] __device__ std::int64_t stripeAt(std::int64_t path, int context_ranks) const {
        if (path >> (shape.lane_bits + shape.stripe_bits) != 0) return no_stripe;
        const auto lane_path = static_cast<unsigned>(path >> shape.stripe_bits);
        const std::int64_t lane =
            shape.first_lane +
            std::int64_t{__brev(lane_path) >> 1 >> (31 - shape.lane_bits)} * context_ranks;
        const std::int64_t mask = (std::int64_t{1} << shape.stripe_bits) - 1;
        const std::int64_t round_of_lanes =
            shape.stripe_bits == 0 ? (shape.first_stripe + lane_count - 1 - lane) / lane_count
                                   : (shape.first_stripe / lane_count & ~mask) + (path & mask);
        return round_of_lanes * lane_count + lane;
    }

    // The stripe at a path, from that at the path before it.
    [[nodiscard]] __device__ __forceinline__ std::int64_t stripeBehind(std::int64_t stripe,
                                                                       std::int64_t path,
                                                                       int context_ranks) const {
        const std::int64_t mask = (std::int64_t{1} << shape.stripe_bits) - 1;
        return (path & mask) != 0 ? stripe + lane_count : stripeAt(path, context_ranks);
    }

    struct Query {
        std::int64_t row;  // of the step
        int head;          // of the KV head's group
        std::int64_t position;
    };
    [[nodiscard]] __device__ Query query(int row_of_tile, int group) const {
        const std::int64_t index = first_query + row_of_tile;
        const std::int64_t row = divide(index, group);
        return {first_row + row, static_cast<int>(index - row * group), first_position + row};
    }
};

// It is copied in words of 16 bytes: of padding some would be bytes that nobody wrote.
static_assert(std::has_unique_object_representations_v<Unit>);

// Which state of the output is that of a row of the unit's tile.
__device__ __forceinline__ std::int64_t outputRow(const AttendParams& params, const Unit& unit,
                                                  int row_of_tile) {
    const int group = params.query_heads / params.kv_heads;
    const Unit::Query query = unit.query(row_of_tile, group);
    return query.row * params.query_heads + unit.kv_head * group + query.head;
}

// What attend_plan_kernel writes.
struct PlanHeader {
    std::int32_t units = 0;
    // Of them, by this launch of attend_kernel, beside one a team; 0 between launches.
    std::int32_t taken = 0;
    std::int32_t trees = 0;       // that attend_fold_kernel folds
    std::int32_t most_units = 0;  // of one of those
    std::int32_t tile_rows = 0;   // for launches with tiles of so many rows
};

// A plan in device memory.
struct PlanView {
    PlanHeader* header = nullptr;
    // Units of a small tree that wait in the workspace, by the slot of its first and the warp that
    // has the rows: [most_slots][most_computing_warps]; 0 between launches.
    std::uint32_t* counters = nullptr;
    Unit* trees = nullptr;  // [most_trees]
    Unit* units = nullptr;  // the most work first
    std::int64_t unit_capacity = 0;
};

// Of one unit or tree, by all lanes of a warp alike.
__device__ __forceinline__ Unit loadUnit(const Unit* from) {
    static_assert(sizeof(Unit) % sizeof(uint4) == 0);
    uint4 words[sizeof(Unit) / sizeof(uint4)];
#pragma unroll
    for (unsigned i = 0; i < sizeof(Unit) / sizeof(uint4); ++i)
        words[i] = reinterpret_cast<const uint4*>(from)[i];
    Unit unit;
    __builtin_memcpy(&unit, words, sizeof(unit));
    return unit;
}

inline constexpr int part_bytes = 128;  // of a row, where tiles have parts (attend_group.cuh)

// The pool's rows of 16-bit numbers for copies that put parts of 128 bytes of several rows behind
// each other: [tokens][token_rows][head_dim], and a box is [rows][1][64].
struct RowBoxes {
    CUtensorMap map{};
    int rows = 0;        // tokens that always lie behind each other, up to a tile
    int token_rows = 1;  // rows from one token of a KV head to the next
};

struct AttendLaunch {
    RowBoxes boxes;  // for kernels that copy so
    AttendParams params;
    PlanView plan;
    int blocks = 0;             // of threads, of the kernel
    int teams = 1;              // of a block, each at a unit of its own (attend_rows_kernel.cuh)
    int tile_rows = 0;          // at most
    bool has_teams = false;     // of four warps, for leaves of a launch with little to do
    int stages = 0;             // of a ring: each a tile of K or V
    bool folds = false;         // attend_fold_kernel follows
    std::int64_t slots = 0;     // that the workspace holds
    std::byte* fold = nullptr;  // where attend_rows_kernel folds: [blocks][fold_levels] states
    int fold_levels = 0;
};

// Which unit a team of warps (a block of threads, or a part of it) does next, by the largest first.
// Multiprocessors read at different speeds, so who is done takes the next.
class UnitDeal {
public:
    // For team number `team` of `teams` in the block.
    __device__ UnitDeal(const AttendLaunch& launch, int team, int teams)
        : launch_(launch),
          player_(team * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)),
          players_(teams * static_cast<int>(gridDim.x)) {}

    // The next unit; null after the last, behind which it is not called again. By one thread.
    __device__ __forceinline__ const Unit* next() {
        PlanHeader& header = *launch_.plan.header;
        // Other parameters than the plan's would read and write anywhere.
        if (header.tile_rows != launch_.tile_rows) __trap();
        const int units = header.units;
        int index = player_;
        if (!is_first_) {
            // The launch before takes from the same counter.
            waitForLaunchBefore();
            const int taken = atomicAdd(&header.taken, 1);
            // Every team that had one comes here until there is no more: the last.
            if (taken == units - 1) header.taken = 0;
            index = players_ + taken;
        }
        is_first_ = false;
        return index < units ? launch_.plan.units + index : nullptr;
    }

private:
    const AttendLaunch& launch_;
    int player_;
    int players_;
    bool is_first_ = true;
};

}  // namespace kvgrid::cuda
