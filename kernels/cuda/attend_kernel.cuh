// The attention kernel. What it computes: kernels/ops.h; how the work is cut: attend_schedule.cuh.
//
// A block of threads stays for the whole launch. A warp computes a leaf (a stripe of 256 tokens)
// for 8 query rows (attend_leaf.cuh); four leaves come at a time. Where there are no more leaves
// than blocks, four warps compute one (attend_team.cuh). Other warps keep tiles of K and V coming
// into rings of shared memory (attend_fetch.cuh), also across leaves and units, so that memory
// never waits for arithmetic. Above 8 query heads a KV head there are twice as many warps that
// compute, 8 rows each. Four sibling leaves of warps fold in shared memory; their unit's tree folds
// in registers, and trees that are cut as attend_schedule.cuh says.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/attend_fetch.cuh"
#include "kernels/cuda/attend_fold.cuh"
#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/attend_leaf.cuh"
#include "kernels/cuda/attend_team.cuh"

namespace kvgrid::cuda {

// One row's part of a state that a thread folds: 16 threads a row, element 16 i + lane of 16 each.
template <int head_dim>
struct RowPart {
    float out[head_dim / 16];
    float lse;

    __device__ __forceinline__ void makeEmpty() {
#pragma unroll
        for (float& number : out)
            number = 0.0F;
        lse = empty_lse;
    }

    __device__ __forceinline__ void mergeLeft(const RowPart& left) {
        const MergeWeights weights = mergeWeights(left.lse, lse);
#pragma unroll
        for (int i = 0; i < head_dim / 16; ++i)
            out[i] = mergeOut(weights, left.out[i], out[i]);
        lse = weights.lse;
    }
};

// Of the merges of four sibling leaves, for the thread's row.
struct RoundWeights {
    MergeWeights low;   // leaves 0 and 1
    MergeWeights high;  // leaves 2 and 3
    MergeWeights all;

    // lse: [leaf][tile_rows]. Of a row's 16 threads eight work out each of the first two.
    __device__ __forceinline__ void read(const float* lse, int tile_rows) {
        const int row = static_cast<int>(threadIdx.x) / 16;
        const int pair = static_cast<int>(threadIdx.x) % 16 / 8;
        const float* const of_pair = lse + 2 * pair * tile_rows + row;
        const MergeWeights mine = mergeWeights(of_pair[0], of_pair[tile_rows]);
        low = ofThread(mine, 0);
        high = ofThread(mine, 8);
        all = mergeWeights(low.lse, high.lse);
    }

private:
    static __device__ __forceinline__ MergeWeights ofThread(const MergeWeights& weights,
                                                            int thread_of_row) {
        return {__shfl_sync(all_lanes, weights.left, thread_of_row, 16),
                __shfl_sync(all_lanes, weights.right, thread_of_row, 16),
                __shfl_sync(all_lanes, weights.lse, thread_of_row, 16)};
    }
};

// Merges the states of four sibling leaves: the elements of the steps from `first` on.
template <typename Shape, int head_dim>
__device__ __forceinline__ void foldRound(const float* exchange, const RoundWeights& weights,
                                          int first, RowPart<head_dim>& state) {
    constexpr int leaf = Shape::tile_rows * Shape::exchange_stride;
    const int row = static_cast<int>(threadIdx.x) / 16;
    const int element = static_cast<int>(threadIdx.x) % 16;
    const float* const from = exchange + row * Shape::exchange_stride + element;
#pragma unroll
    for (int i = 0; i < Shape::exchange_steps; ++i)
        if (first + i < Shape::steps)
            state.out[first + i] =
                mergeOut(weights.all, mergeOut(weights.low, from[16 * i], from[leaf + 16 * i]),
                         mergeOut(weights.high, from[2 * leaf + 16 * i], from[3 * leaf + 16 * i]));
}

// Where the thread's row of a unit goes: to the output when the unit is its tree, else to its slot
// of the workspace, where it may be folded with others.
template <int head_dim>
class UnitTarget {
public:
    __device__ __forceinline__ UnitTarget(const AttendLaunch& launch, const Unit& unit)
        : launch_(launch),
          unit_(unit) {
        const int row = static_cast<int>(threadIdx.x) / 16;
        if (unit.cutBits() == 0) {
            const std::int64_t to = outputRow(launch.params, unit, min(row, unit.rows - 1));
            out_ = launch.params.out + to * head_dim;
            lse_ = launch.params.lse + to;
        } else {
            float* const slot = static_cast<float*>(launch.params.workspace) +
                                unit.workspace_slot * slotNumbers(launch.tile_rows, head_dim);
            out_ = slot + row * head_dim;
            lse_ = slot + launch.tile_rows * head_dim + row;
        }
    }

    __device__ __forceinline__ void store(const RowPart<head_dim>& state) const {
        constexpr int warp_rows = warp_size / 16;
        const int warp = static_cast<int>(threadIdx.x) / warp_size;
        const int rows = min(unit_.rows - warp * warp_rows, warp_rows);
        if (rows <= 0) return;
        const int element = static_cast<int>(threadIdx.x) % 16;
        if (static_cast<int>(threadIdx.x) / 16 < unit_.rows) {
            const bool empty = state.lse == empty_lse;
#pragma unroll
            for (int i = 0; i < head_dim / 16; ++i)
                out_[16 * i + element] = empty ? 0.0F : state.out[i];
            if (element == 0) *lse_ = state.lse;
        }
        // Rows are always the same warp's.
        if (isSmall(unit_) && isLastWarp(treeCounter(launch_, unit_) + warp, unitsOfTree(unit_)))
            foldTree<head_dim>(launch_, unit_, warp * warp_rows, rows);
    }

private:
    const AttendLaunch& launch_;
    const Unit& unit_;
    float* out_;
    float* lse_;
};

// What a block of threads shares.
template <typename Shape>
struct SharedParts {
    std::byte* tiles;    // [4 rings][stages]
    std::byte* scratch;  // of leaves by warps the exchange, of teams what each has
    float* exchange;     // [4 leaves][tile_rows][exchange_stride]
    float* exchange_lse;
    uint2* rests;             // [row_tiles][steps][32]
    Unit* queue;              // [queue_slots]
    std::uint64_t* barriers;  // of the queue [2][queue_slots]: filled, read; then the rings' stages
    int stages;

    __device__ SharedParts(std::byte* shared, int ring_stages)
        : tiles(shared),
          scratch(shared + Shape::rings * ring_stages * Shape::tile_bytes),
          exchange(reinterpret_cast<float*>(scratch)),
          exchange_lse(exchange + attend_warps * Shape::tile_rows * Shape::exchange_stride),
          rests(reinterpret_cast<uint2*>(scratch + Shape::scratch_bytes)),
          queue(reinterpret_cast<Unit*>(reinterpret_cast<std::byte*>(rests) + Shape::rests_bytes)),
          barriers(reinterpret_cast<std::uint64_t*>(queue + queue_slots)),
          stages(ring_stages) {}

    [[nodiscard]] __device__ UnitQueue unitQueue() const {
        return {queue, sharedAddress(barriers), sharedAddress(barriers + queue_slots)};
    }
    [[nodiscard]] __device__ __forceinline__ Ring ring(int number) const {
        return {
            sharedAddress(tiles) + static_cast<std::uint32_t>(number * stages * Shape::tile_bytes),
            reinterpret_cast<Stage*>(barriers + 2 * queue_slots) + number * stages, stages};
    }
    [[nodiscard]] __device__ uint2* restsOf(int row_tile) const {
        return rests + row_tile * Shape::steps * warp_size;
    }
    [[nodiscard]] __device__ TeamShared<Shape> team(int row_tile) const {
        return {restsOf(row_tile), scratch + row_tile * Shape::team_bytes};
    }
    // Whether the unit was its tree's last.
    [[nodiscard]] __device__ int* isLast() const {
        return reinterpret_cast<int*>(ring(Shape::rings).stages);
    }
};

// Takes a leaf's tiles from the ring.
template <typename Shape, typename LeafState>
__device__ __forceinline__ void attendLeaf(LeafState& leaf, const Ring& ring, RingPlace& place,
                                           const AttendParams& params, int tokens,
                                           const RowsSeen<Shape>& seen) {
    leaf.clear();
    takeLeaf<Shape>(ring, place, tokens,
                    [&](int part, int first, std::uint32_t tile, std::uint64_t present) {
                        if (part == 0)
                            leaf.template addScores<1>(params, tile, present, first, seen);
                        else
                            leaf.template addValues<1>(tile);
                    });
}

// Folds the states of four leaves, of which this warp has rows of leaf `leaf_number`, or no leaf.
// What the merges are weighted with is worked out while the states are on their way.
template <typename Shape, typename LeafState, int head_dim>
__device__ __forceinline__ void foldLeaves(LeafState& leaf, bool has_leaf, int leaf_number,
                                           int first_row, const SharedParts<Shape>& shared,
                                           RowPart<head_dim>& state) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int first_state = leaf_number * Shape::tile_rows + first_row;
    if (has_leaf) {
        leaf.finish();
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (lane < 4) shared.exchange_lse[first_state + lane * 2 + e] = leaf.lse(0, e);
    } else if (lane < product_rows) {
        shared.exchange_lse[first_state + lane] = empty_lse;
    }
    RoundWeights weights;
#pragma unroll
    for (int first = 0; first < Shape::steps; first += Shape::exchange_steps) {
        // The lse are there, and the numbers that were written last have been read.
        syncThreads(Shape::computing_threads);
        if (has_leaf) leaf.store(first, shared.exchange + first_state * Shape::exchange_stride);
        if (first == 0) weights.read(shared.exchange_lse, Shape::tile_rows);
        syncThreads(Shape::computing_threads);
        foldRound<Shape>(shared.exchange, weights, first, state);
    }
    state.lse = weights.all.lse;
}

// A unit of leaves by warps: of four leaves at a time this warp computes leaf `leaf_number`, for
// the query rows from first_row on.
template <NumberFormat format, int head_dim, int row_tiles>
__device__ __forceinline__ void computeByWarps(
    const AttendLaunch& launch, const SharedParts<AttendShape<format, head_dim, row_tiles>>& shared,
    const Unit& unit, int leaf_number, int first_row, RingPlace& place) {
    using Shape = AttendShape<format, head_dim, row_tiles>;
    using LeafState = Leaf<format, head_dim, Shape>;
    const AttendParams& params = launch.params;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int group = params.query_heads / params.kv_heads;
    const Ring ring = shared.ring(leaf_number);
    // What follows from the unit alone is worked out before the wait.
    const QueryRows<1> queries(params, unit, first_row, head_dim);
    const UnitTarget<head_dim> target(launch, unit);
    // Of the thread's rows. One that does not exist sees all that there is, of which nothing is
    // kept: it must not make the others look at single tokens.
    std::int64_t first_seen[2];
    std::int64_t positions[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int row = first_row + lane % 4 * 2 + e;
        const bool exists = row < unit.rows;
        positions[e] = exists ? unit.query(row, group).position : unit.last_position;
        first_seen[e] = exists ? firstSeen(positions[e], params.window) : unit.first_seen;
    }
    bool has_four;
    bool has_leaf;
    int tokens;
    RowsSeen<Shape> seen;
    const auto enter = [&](std::int64_t round) {
        const std::int64_t path = unit.first_leaf + round * attend_warps;
        const std::int64_t stripe = unit.stripeAt(path + leaf_number, params.context_ranks);
        has_four = unit.seesFour(path, params.context_ranks);
        has_leaf = unit.sees(stripe);
        tokens = unit.tokensOf(stripe);
#pragma unroll
        for (int e = 0; e < 2; ++e)
            seen.rows[e] = seenOf(positions[e], first_seen[e], stripe * stripe_tokens);
    };
    enter(0);
    // q, and the outputs and workspace that may still be read.
    waitForLaunchBefore();
    // The last unit's products are over: they come before the last barrier.
    LeafState leaf(queries, shared.restsOf(first_row / product_rows), leaf_number == 0);
    if constexpr (Shape::splits_queries) syncThreads(Shape::computing_threads);
    UnitFold<RowPart<head_dim>, Shape::register_levels> fold;
    RowPart<head_dim> state;
    for (std::int64_t round = 0; true; enter(round)) {
        if (has_four) {
            if (has_leaf) attendLeaf<Shape>(leaf, ring, place, params, tokens, seen);
            foldLeaves(leaf, has_leaf, leaf_number, first_row, shared, state);
        } else {
            state.makeEmpty();
        }
        fold.add(round, state);
        if (++round >> (unit.leaf_bits - leaves_by_warps_bits) != 0) break;
    }
    target.store(state);
}

// A unit whose leaves teams compute, of which this is warp `warp` of that of row tile `team`.
template <NumberFormat format, int head_dim, int row_tiles>
__device__ __forceinline__ void computeByTeam(
    const AttendLaunch& launch, const SharedParts<AttendShape<format, head_dim, row_tiles>>& shared,
    const Unit& unit, int team, int warp, RingPlace& place) {
    using Shape = AttendShape<format, head_dim, row_tiles>;
    using LeafOfTeam = TeamLeaf<format, head_dim, Shape>;
    // Named barriers: one of all that compute, then the teams'.
    constexpr int barrier_of_all = 1;
    const int barrier_of_team = 2 + team;
    const AttendParams& params = launch.params;
    const int first_row = team * product_rows;
    const auto ringOf = [&](int number) { return shared.ring(number); };
    // What follows from the unit alone is worked out before the wait.
    const QueryRows<1> queries(params, unit, first_row, head_dim);
    const TeamTarget<head_dim> target(launch, unit, first_row);
    TeamSeen<Shape> seen(params, unit, first_row);
    std::int64_t stripe = unit.stripeAt(unit.first_leaf, params.context_ranks);
    bool has_leaf;
    const auto enter = [&] {
        has_leaf = unit.sees(stripe);
        seen.enter(stripe * stripe_tokens);
    };
    enter();
    // q, and the outputs and workspace that may still be read.
    waitForLaunchBefore();
    LeafOfTeam leaf(queries, shared.team(team), warp, barrier_of_team);
    UnitFold<typename LeafOfTeam::State, 2> fold;
    typename LeafOfTeam::State state;
    for (std::int64_t index = 0; true; enter()) {
        if (has_leaf)
            leaf.compute(params, ringOf, place, unit.tokensOf(stripe), seen, state);
        else
            state.makeEmpty();
        fold.add(index, state);
        if (++index >> unit.leaf_bits != 0) break;
        stripe = unit.stripeBehind(stripe, unit.first_leaf + index, params.context_ranks);
    }
    target.template store<LeafOfTeam>(state, warp);
    if (!isSmall(unit)) return;
    syncThreads(barrier_of_all, Shape::computing_threads);
    if (threadIdx.x == 0)
        *shared.isLast() = isLast(treeCounter(launch, unit), unitsOfTree(unit)) ? 1 : 0;
    syncThreads(barrier_of_all, Shape::computing_threads);
    // Two rows a warp.
    const int row = 2 * (team * attend_warps + warp);
    if (*shared.isLast() != 0 && row < unit.rows)
        foldTree<head_dim>(launch, unit, row, min(unit.rows - row, 2));
}

// What the warps that compute do. All units of a launch are of one kind.
template <NumberFormat format, int head_dim, int row_tiles>
__device__ __forceinline__ void computeUnits(
    const AttendLaunch& launch, const SharedParts<AttendShape<format, head_dim, row_tiles>>& shared,
    int warp_of_four, int row_tile) {
    RingPlace place;
    QueueReader units(shared.unitQueue());
    while (const Unit* const unit = units.next()) {
        bool by_team = false;
        if constexpr (AttendShape<format, head_dim, row_tiles>::has_teams) {
            by_team = unit->by_team != 0;
            if (by_team)
                computeByTeam<format, head_dim, row_tiles>(launch, shared, *unit, row_tile,
                                                           warp_of_four, place);
        }
        if (!by_team)
            computeByWarps<format, head_dim, row_tiles>(launch, shared, *unit, warp_of_four,
                                                        row_tile * product_rows, place);
        units.release();
    }
    // Who waits for this launch waits for the one before.
    waitForLaunchBefore();
}

template <NumberFormat format, int head_dim, int row_tiles>
#if __CUDA_ARCH__ >= 900
__global__ void __launch_bounds__(
    AttendShape<format, head_dim, row_tiles>::threads,
    AttendShape<format, head_dim, row_tiles>::blocks_per_multiprocessor)
#else
__global__ void __launch_bounds__(AttendShape<format, head_dim, row_tiles>::threads)
#endif
    attend_kernel(const __grid_constant__ AttendLaunch launch) {
    using Shape = AttendShape<format, head_dim, row_tiles>;
    static_assert(head_dim % 16 == 0 && most_stages <= warp_size);
    extern __shared__ __align__(128) std::byte memory[];
    const SharedParts<Shape> shared(memory, launch.stages);
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int leaf_number = warp % attend_warps;
    if (warp < attend_warps && lane < launch.stages) {
        const Ring ring = shared.ring(leaf_number);
        initBarrier(ring.filled(lane), warp_size);
        initBarrier(ring.consumed(lane), Shape::computing_threads);
    }
    if (warp == 0 && lane < queue_slots) {
        const UnitQueue queue = shared.unitQueue();
        initBarrier(queue.filled + static_cast<std::uint32_t>(lane * 8), warp_size);
        initBarrier(queue.read + static_cast<std::uint32_t>(lane * 8), Shape::threads);
    }
#if __CUDA_ARCH__ >= 900
    fenceBarriers();
#endif
    __syncthreads();

    // Whatever starts behind this waits for all of it before it reads what this writes.
    letNextLaunchStart();
    if (static_cast<int>(threadIdx.x) < Shape::computing_threads) {
        takeRegisters<Shape::computing_registers>();
        computeUnits<format, head_dim, row_tiles>(launch, shared, leaf_number, warp / attend_warps);
    } else {
        giveRegisters<Shape::fetching_registers>();
        TileFetcher<Shape>(launch, UnitDeal(launch, 0, 1), leaf_number, shared.ring(leaf_number),
                           shared.unitQueue())
            .run();
    }
}

template <NumberFormat format, int head_dim, int row_tiles>
AttendKernel attendKernel() {
    using Shape = AttendShape<format, head_dim, row_tiles>;
    return {.head_dim = head_dim,
            .tile_rows = Shape::tile_rows,
            .has_teams = Shape::has_teams,
            .threads = Shape::threads,
            .blocks_per_multiprocessor = Shape::blocks_per_multiprocessor,
            .most_stages = most_stages,
            .function = attend_kernel<format, head_dim, row_tiles>,
            .sharedBytes = Shape::sharedBytes};
}

}  // namespace kvgrid::cuda
