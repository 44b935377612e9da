// The attention kernel for tiles of more than 16 query rows: large GQA groups, and runs of many new
// tokens. What it computes: kernels/ops.h; how the work is cut: attend_schedule.cuh.
//
// Where attend_kernel gives each warp a leaf of its own, here all warps of a team compute one leaf,
// each for query rows of its own, from the same tiles of K and V: what came into shared memory once
// is multiplied with all rows of the tile, and what a warp loaded into registers once with its two
// query tiles (attend_leaf.cuh). A block of threads has one team of eight warps, or two of four, as
// the tile wants; each team has a ring, which a warp of its own fills, and units of its own.
//
// A warp goes through its unit's leaves in order of their paths and folds them alone, without a
// word to the others: the state of a left half waits until that of its right half is there. The
// states of single leaves wait in shared memory, those of more in the workspace.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/attend_fetch.cuh"
#include "kernels/cuda/attend_fold.cuh"
#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/attend_leaf.cuh"

namespace kvgrid::cuda {

template <NumberFormat format, int head_dim>
struct AttendRowsShape : TileShape<format, head_dim> {
    using Tile = TileShape<format, head_dim>;
    static constexpr int computing_warps = 8;
    static constexpr int computing_threads = computing_warps * warp_size;
    static constexpr int threads = computing_threads + 4 * warp_size;  // by four warps at a time
    // Of a warp: with the sums of two all else fits the registers, where rows are not too long.
    static constexpr int query_tiles = head_dim > 128 ? 1 : 2;
    static constexpr int warp_rows = query_tiles * product_rows;
    static constexpr int block_rows = computing_warps * warp_rows;
    static_assert(block_rows <= most_tile_rows);
    static constexpr int rings = 1;  // of a team
    static constexpr int arrivals = 1;
    static constexpr bool keeps_rests = true;
    // The launch gives all the same. Two tiles of long queries with rests take more.
    static constexpr int launch_registers = 168;
    static constexpr bool is_tight = Tile::splits_queries && head_dim == 128;
    static constexpr int computing_registers = is_tight ? 232 : 208;
    static constexpr int fetching_registers = is_tight ? 40 : 88;
    // What the computing warps wait for must be there.
    static_assert(2 * computing_registers + fetching_registers <= 3 * launch_registers);

    // A state that waits: what each thread has of out, four numbers at a time, then its lse.
    static constexpr int state_parts = query_tiles * Tile::steps;
    static constexpr int state_bytes =
        computing_threads * (state_parts * static_cast<int>(sizeof(float4)) + 4);

    // Of a block of threads with so many teams, each of whose rings has so many stages.
    static constexpr int sharedBytes(int teams, int stages) {
        return teams * (stages * Tile::stage_bytes + Tile::queue_bytes) + state_bytes;
    }
};

// What a block of threads shares.
template <typename Shape>
struct RowsShared {
    std::byte* tiles;         // [teams][stages]
    std::byte* waiting;       // a state of each warp's rows
    Unit* queues;             // [teams][queue_slots]
    std::uint64_t* barriers;  // [teams]: of the queue [2][queue_slots]: filled, read; then the
                              // ring's stages
    int stages;

    __device__ RowsShared(std::byte* shared, int teams, int ring_stages)
        : tiles(shared),
          waiting(shared + teams * ring_stages * Shape::tile_bytes),
          queues(reinterpret_cast<Unit*>(waiting + Shape::state_bytes)),
          barriers(reinterpret_cast<std::uint64_t*>(queues + teams * queue_slots)),
          stages(ring_stages) {}

    [[nodiscard]] __device__ UnitQueue unitQueue(int team) const {
        const std::uint32_t filled = sharedAddress(ofTeam(team));
        return {queues + team * queue_slots, filled, filled + queue_slots * 8};
    }
    [[nodiscard]] __device__ Ring ring(int team) const {
        return {sharedAddress(tiles + team * stages * Shape::tile_bytes),
                reinterpret_cast<Stage*>(ofTeam(team) + 2 * queue_slots), stages};
    }

private:
    [[nodiscard]] __device__ std::uint64_t* ofTeam(int team) const {
        return barriers + team * (2 * queue_slots + 3 * stages);
    }
};

// What the rows of a warp, of which some exist or none, see of a leaf: some row sees tokens of
// [first, end), all rows see those of [first_of_all, end_of_all). It takes few registers.
template <typename Shape>
class WarpSeen {
public:
    __device__ WarpSeen(const AttendParams& params, const Unit& unit, int first_row)
        : rows_(min(unit.rows - first_row, Shape::warp_rows)) {
        if (rows_ <= 0) return;
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int group = params.query_heads / params.kv_heads;
        const std::int64_t last_position = unit.query(first_row + rows_ - 1, group).position;
        const auto age = [&](int of_warp) {
            return static_cast<int>(last_position -
                                    unit.query(first_row + of_warp, group).position);
        };
        behind_ = static_cast<int>(unit.last_position - last_position);
        oldest_ = age(0);
#pragma unroll
        for (int n = 0; n < Shape::query_tiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int of_warp = n * product_rows + lane % 4 * 2 + e;
                // One that does not exist sees what the last one sees; nothing of it is kept.
                const int of_row = of_warp < rows_ ? age(of_warp) : 0;
                ages_ |= static_cast<std::uint32_t>(of_row) << (16 * n + 8 * e);
            }
    }

    // Now it is about the leaf that begins at `begin`, which the unit sees.
    __device__ void enter(const AttendParams& params, const Unit& unit, std::int64_t begin) {
        // Beyond it nothing changes any more.
        constexpr std::int64_t far = 1 << 20;
        const auto inLeaf = [&](std::int64_t position) {
            return static_cast<int>(min(max(position - begin, -far), far));
        };
        end_ = rows_ > 0 ? inLeaf(unit.last_position + 1) - behind_ : 0;
        end_of_all_ = end_ - oldest_;
        first_of_all_ =
            (params.window == 0 ? 0 : inLeaf(unit.last_position + 1 - params.window)) - behind_;
        first_ = max(first_of_all_ - oldest_, 0);
    }

    // Query tiles with rows.
    [[nodiscard]] __device__ int tiles() const {
        return (rows_ + product_rows - 1) / product_rows;
    }
    [[nodiscard]] __device__ bool any() const {
        return first_ < min(end_, stripe_tokens);
    }
    // Of the tile whose first token is `first` of the leaf.
    [[nodiscard]] __device__ __forceinline__ bool any(int first) const {
        return first < end_ && first + Shape::tile_tokens > first_;
    }
    [[nodiscard]] __device__ __forceinline__ bool all(int first) const {
        return first >= first_of_all_ && first + Shape::tile_tokens <= end_of_all_;
    }
    [[nodiscard]] __device__ __forceinline__ SeenTokens row(int n, int e) const {
        const int age = static_cast<int>(readAnew(ages_) >> (16 * n + 8 * e) & 0xFFU);
        return {first_of_all_ - age - 1, end_ - age - 1};
    }

private:
    static_assert(Shape::warp_rows <= 1 << 8);

    int rows_;
    int behind_ = 0;          // the last row, the unit's last position
    int oldest_ = 0;          // how much earlier than the last row the first one is
    std::uint32_t ages_ = 0;  // the thread's rows, likewise: 8 bits each
    int first_ = 0;
    int end_ = 0;
    int first_of_all_ = 0;
    int end_of_all_ = 0;
};

// A state of a warp's rows while it is folded: out in the thread's sums of the leaf, and the lse of
// row lane % warp_rows.
template <NumberFormat format, int head_dim>
class RowsFold {
    using Shape = AttendRowsShape<format, head_dim>;
    using Sums = float[Shape::query_tiles][Shape::steps][4];

public:
    // waiting: in shared memory, Shape::state_bytes. levels: in the workspace, as many such as a
    // unit has levels, but one.
    __device__ RowsFold(std::byte* waiting, std::byte* levels)
        : waiting_(waiting),
          levels_(levels) {}

    // Behind it come the states of a unit with 2^unit_levels leaves.
    __device__ void begin(int unit_levels) {
        unit_levels_ = unit_levels;
        waits_ = 0;
    }

    // `sums` and `lse` are the state of the subtree number `index` of 2^level leaves, when
    // `has_state`; else it is empty. Afterwards, when it was the unit's last, they are the unit's.
    __device__ __forceinline__ void add(Sums& sums, float& lse, bool& has_state, std::int64_t index,
                                        int level) {
#pragma unroll 1
        for (; level < unit_levels_ && (index & 1) != 0; index >>= 1, ++level) {
            const unsigned bit = 1U << level;
            if ((waits_ & bit) == 0) continue;
            waits_ ^= bit;
            if (has_state)
                mergeLeft(level, sums, lse);
            else
                load(level, sums, lse);
            has_state = true;
        }
        if (level == unit_levels_ || !has_state) return;
        waits_ |= 1U << level;
        store(level, sums, lse);
    }

private:
    [[nodiscard]] __device__ float4* parts(int level) const {
        std::byte* const state =
            level == 0 ? waiting_ : levels_ + std::int64_t{level - 1} * Shape::state_bytes;
        return reinterpret_cast<float4*>(state) + threadIdx.x;
    }
    [[nodiscard]] __device__ float* lseOf(float4* parts) const {
        return reinterpret_cast<float*>(parts - threadIdx.x +
                                        Shape::state_parts * Shape::computing_threads) +
               threadIdx.x;
    }

    __device__ __forceinline__ void store(int level, const Sums& sums, float lse) const {
        float4* const to = parts(level);
#pragma unroll
        for (int n = 0; n < Shape::query_tiles; ++n)
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i)
                to[(n * Shape::steps + i) * Shape::computing_threads] =
                    make_float4(sums[n][i][0], sums[n][i][1], sums[n][i][2], sums[n][i][3]);
        *lseOf(to) = lse;
    }

    __device__ __forceinline__ void load(int level, Sums& sums, float& lse) const {
        float4* const from = parts(level);
#pragma unroll
        for (int n = 0; n < Shape::query_tiles; ++n)
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i) {
                const float4 four = from[(n * Shape::steps + i) * Shape::computing_threads];
                sums[n][i][0] = four.x;
                sums[n][i][1] = four.y;
                sums[n][i][2] = four.z;
                sums[n][i][3] = four.w;
            }
        lse = *lseOf(from);
    }

    // Each lane works out the weights of one row.
    __device__ __forceinline__ void mergeLeft(int level, Sums& sums, float& lse) const {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        float4* const from = parts(level);
        const MergeWeights weights = mergeWeights(*lseOf(from), lse);
        lse = weights.lse;
#pragma unroll
        for (int n = 0; n < Shape::query_tiles; ++n) {
            MergeWeights rows[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = n * product_rows + lane % 4 * 2 + e;
                rows[e] = {__shfl_sync(all_lanes, weights.left, row),
                           __shfl_sync(all_lanes, weights.right, row), 0.0F};
            }
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i) {
                const float4 four = from[(n * Shape::steps + i) * Shape::computing_threads];
                const float left[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    sums[n][i][j] = mergeOut(rows[j % 2], left[j], sums[n][i][j]);
            }
        }
    }

    std::byte* waiting_;
    std::byte* levels_;
    int unit_levels_ = 0;
    unsigned waits_ = 0;  // bit of a level: a state waits there
};

// To the output when the unit is its tree, else to its slot of the workspace, where its tree may be
// folded. By each warp, for the rows from first_row on that are its own.
template <NumberFormat format, int head_dim>
__device__ __forceinline__ void storeRows(
    const AttendLaunch& launch, const Unit& unit, int first_row, bool has_state,
    const float (&sums)[AttendRowsShape<format, head_dim>::query_tiles][head_dim / 16][4],
    float warp_lse) {
    using Shape = AttendRowsShape<format, head_dim>;
    const int rows = min(unit.rows - first_row, Shape::warp_rows);
    if (rows <= 0) return;
    const AttendParams& params = launch.params;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int cut_bits = unit.cutBits();
    float* const slot = static_cast<float*>(params.workspace) +
                        unit.workspace_slot * slotNumbers(launch.tile_rows, head_dim);
#pragma unroll
    for (int n = 0; n < Shape::query_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int of_warp = n * product_rows + lane % 4 * 2 + e;
            const float of_row = __shfl_sync(all_lanes, warp_lse, of_warp);
            const float row_lse = has_state ? of_row : empty_lse;
            const int row = first_row + of_warp;
            if (of_warp >= rows) continue;
            float* out = slot + row * head_dim;
            float* lse = slot + launch.tile_rows * head_dim + row;
            if (cut_bits == 0) {
                const std::int64_t to = outputRow(params, unit, row);
                out = params.out + to * head_dim;
                lse = params.lse + to;
            }
            const bool empty = row_lse == empty_lse;
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    out[16 * i + Operand<format>::outputOf(lane / 4, half)] =
                        empty ? 0.0F : sums[n][i][2 * half + e];
            if (lane / 4 == 0) *lse = row_lse;
        }
    // Rows are always the same warp's.
    if (isSmall(unit) &&
        isLastWarp(treeCounter(launch, unit) + first_row / Shape::warp_rows, unitsOfTree(unit)))
        foldTree<head_dim>(launch, unit, first_row, rows);
}

// Takes a leaf's tiles from the ring. A tile of which no row of the warp sees anything gives
// weights of 0: it is left out.
template <typename Shape, typename LeafState>
__device__ __forceinline__ void attendRows(LeafState& leaf, const Ring& ring, RingPlace& place,
                                           const AttendParams& params, int tokens,
                                           const WarpSeen<Shape>& seen) {
    const bool all_tiles = seen.tiles() == Shape::query_tiles;
    takeLeaf<Shape>(
        ring, place, tokens, [&](int part, int first, std::uint32_t tile, std::uint64_t present) {
            if (!seen.any(first)) return;
            if (part == 0) {
                if (all_tiles)
                    leaf.template addScores<Shape::query_tiles>(params, tile, present, first, seen);
                else
                    leaf.template addScores<1>(params, tile, present, first, seen);
            } else {
                if (all_tiles)
                    leaf.template addValues<Shape::query_tiles>(tile);
                else
                    leaf.template addValues<1>(tile);
            }
        });
}

// What a warp that computes does: of the units of team `team` the query rows from first_row on.
template <NumberFormat format, int head_dim>
__device__ __forceinline__ void computeRows(
    const AttendLaunch& launch, const RowsShared<AttendRowsShape<format, head_dim>>& shared,
    int team, int first_row) {
    using Shape = AttendRowsShape<format, head_dim>;
    const AttendParams& params = launch.params;
    const Ring ring = shared.ring(team);
    RowsFold<format, head_dim> fold(
        shared.waiting,
        launch.fold + std::int64_t{blockIdx.x} * launch.fold_levels * Shape::state_bytes);
    RingPlace place;
    QueueReader units(shared.unitQueue(team));
    while (const Unit* const next = units.next()) {
        const Unit& unit = *next;
        Leaf<format, head_dim, Shape> leaf(
            QueryRows<Shape::query_tiles>(params, unit, first_row, head_dim), nullptr, false);
        WarpSeen<Shape> seen(params, unit, first_row);
        fold.begin(unit.leaf_bits);
        float lse = empty_lse;
        bool has_state = false;
        std::int64_t index = 0;
        while (index >> unit.leaf_bits == 0) {
            const std::int64_t path = unit.first_leaf + index;
            const bool four_are_empty =
                index % 4 == 0 && !unit.seesFour(path, params.context_ranks);
            const int level = four_are_empty ? leaves_by_warps_bits : 0;
            const std::int64_t stripe = unit.stripeAt(path, params.context_ranks);
            has_state = false;
            if (!four_are_empty && unit.sees(stripe)) {
                seen.enter(params, unit, stripe * stripe_tokens);
                leaf.clear();
                attendRows<Shape>(leaf, ring, place, params, unit.tokensOf(stripe), seen);
                if (seen.any()) {
                    leaf.finish();
                    lse = leaf.normalise();
                    has_state = true;
                }
            }
            fold.add(leaf.sums(), lse, has_state, index >> level, level);
            index += std::int64_t{1} << level;
        }
        storeRows<format, head_dim>(launch, unit, first_row, has_state, leaf.sums(), lse);
        units.release();
    }
}

template <NumberFormat format, int head_dim>
__global__ void __launch_bounds__(AttendRowsShape<format, head_dim>::threads, 1)
    attend_rows_kernel(const __grid_constant__ AttendLaunch launch) {
    using Shape = AttendRowsShape<format, head_dim>;
    extern __shared__ __align__(128) std::byte memory[];
    const RowsShared<Shape> shared(memory, launch.teams, launch.stages);
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int team_warps = Shape::computing_warps / launch.teams;
    if (warp < launch.teams) {
        const Ring ring = shared.ring(warp);
        const UnitQueue queue = shared.unitQueue(warp);
        const auto at = static_cast<std::uint32_t>(lane * 8);
        if (lane < launch.stages) {
            initBarrier(ring.filled(lane), warp_size);
            initBarrier(ring.consumed(lane), team_warps * warp_size);
        }
        if (lane < queue_slots) {
            initBarrier(queue.filled + at, warp_size);
            initBarrier(queue.read + at, (team_warps + 1) * warp_size);
        }
    }
#if __CUDA_ARCH__ >= 900
    fenceBarriers();
#endif
    __syncthreads();

    // Whatever starts behind this waits for all of it before it reads what this writes.
    letNextLaunchStart();
    if (warp < Shape::computing_warps) {
        takeRegisters<Shape::computing_registers>();
        // q, and the outputs and workspace that may still be read.
        waitForLaunchBefore();
        computeRows<format, head_dim>(launch, shared, warp / team_warps,
                                      warp % team_warps * Shape::warp_rows);
    } else {
        giveRegisters<Shape::fetching_registers>();
        const int team = warp - Shape::computing_warps;
        if (team >= launch.teams) return;
        TileFetcher<Shape>(launch, UnitDeal(launch, team, launch.teams), 0, shared.ring(team),
                           shared.unitQueue(team))
            .run();
    }
}

// The kernel with tiles of so many rows as a team of these has.
template <NumberFormat format, int head_dim, int teams>
AttendKernel attendRowsKernel() {
    using Shape = AttendRowsShape<format, head_dim>;
    return {.head_dim = head_dim,
            .tile_rows = Shape::block_rows / teams,
            .teams = teams,
            .threads = Shape::threads,
            .blocks_per_multiprocessor = 1,
            .most_stages = warp_size / teams,
            .state_bytes = Shape::state_bytes,
            .function = attend_rows_kernel<format, head_dim>,
            .sharedBytes = [](int stages) { return Shape::sharedBytes(teams, stages); }};
}

}  // namespace kvgrid::cuda
