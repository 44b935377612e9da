// The attention kernel for tiles of more than 16 query rows: large GQA groups, and runs of many new
// tokens. What it computes: kernels/ops.h; how the work is cut: attend_schedule.cuh.
//
// Where attend_kernel gives each warp a leaf of its own, here all warps of a team compute one leaf,
// each for query rows of its own, 16 or of long rows 8, from the same tiles of K and V: what came
// into shared memory once is multiplied with all rows of the tile. A block of threads has one team
// of eight warps, or two of four, as the tile wants; each team has a ring, which a warp of its own
// fills, and units of its own. A shape says by what products: those of warp groups where they can
// (RowsByGroups), else of warps (RowsByWarps).
//
// A warp goes through its unit's leaves in order of their paths and folds them alone, without a
// word to the others: the state of a left half waits until that of its right half is there. The
// states of single leaves wait in shared memory, those of more in the workspace, but for pairs'
// where there is room (RowsShared::levels).
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/attend_fetch.cuh"
#include "kernels/cuda/attend_fold.cuh"
#include "kernels/cuda/attend_group.cuh"
#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/attend_leaf.cuh"

namespace kvgrid::cuda {

// Sizes that follow from the format and the head dim.
template <NumberFormat number_format, int dim, int tokens = 0>
struct RowsShape : TileShape<number_format, dim, tokens> {
    static constexpr NumberFormat format = number_format;
    static constexpr int head_dim = dim;
    static constexpr int computing_warps = 8;
    static constexpr int computing_threads = computing_warps * warp_size;
    static constexpr int threads = computing_threads + attend_warps * warp_size;  // of warp groups
    static constexpr int rings = 1;                                               // of a team
    static constexpr int arrivals = 1;
    static constexpr int launch_registers = 168;  // of each thread
};

// A state that waits: what each thread has of out, four numbers at a time, then its lse.
template <typename Rows>
struct RowsState {
    static constexpr int parts = Rows::sum_tiles * Rows::sum_steps;
    static constexpr int bytes =
        Rows::computing_threads * (parts * static_cast<int>(sizeof(float4)) + 4);
};

template <NumberFormat format, int head_dim>
class WarpRowsLeaf;

// Each warp multiplies its query tiles, of 8 rows, by itself, with what it loads into registers for
// all of them. With the sums of two all else fits the registers, where rows are not too long.
template <NumberFormat format, int head_dim>
struct RowsByWarps : RowsShape<format, head_dim> {
    using Leaf = WarpRowsLeaf<format, head_dim>;
    static constexpr int query_tiles = head_dim > 128 ? 1 : 2;
    static constexpr bool keeps_rests = true;
    static constexpr int warp_rows = query_tiles * product_rows;
    static constexpr int rests_bytes = 0;            // in shared memory: they are in registers
    static constexpr int warp_arrivals = warp_size;  // at the barrier of a stage that it has read
    static constexpr int seen_rows = warp_rows;  // that leave out together what none of them sees
    static constexpr int computing_registers = 208;
    static constexpr int fetching_registers = 88;

    // What a thread has: rows of its warp, and sums [sum_tiles][sum_steps][4] of them.
    static constexpr int thread_rows = 2 * query_tiles;
    static constexpr int sum_tiles = query_tiles;
    static constexpr int sum_steps = RowsByWarps::steps;
    static __device__ __forceinline__ int rowOf(int row) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        return row / 2 * product_rows + lane % 4 * 2 + row % 2;
    }
    static constexpr __device__ int rowOfSum(int tile, int j) { return 2 * tile + j % 2; }
    static __device__ __forceinline__ int elementOfSum(int step, int j) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        return 16 * step + Operand<format>::outputOf(lane / 4, j / 2);
    }
};

// Warp groups multiply 64 rows, with K and V from shared memory, where these are of 16 bits and in
// whole parts of rows.
template <NumberFormat format, int head_dim>
struct RowsByGroups : RowsShape<format, head_dim, 64> {
    using Leaf = GroupLeaf<format, head_dim, RowsByGroups>;
    static constexpr bool can = bytesPerElement(format) == 2 &&
                                RowsByGroups::row_bytes % part_bytes == 0 && head_dim <= 128;
    static constexpr bool has_parts = true;
    static constexpr int warp_rows = 16;
    static constexpr int warp_arrivals = 1;
    static constexpr int seen_rows = 4 * warp_rows;
    static constexpr int rests_bytes =
        RowsByGroups::splits_queries ? seen_rows * RowsByGroups::row_bytes : 0;
    static constexpr int computing_registers = 232;
    static constexpr int fetching_registers = 40;

    static constexpr int thread_rows = 2;
    static constexpr int sum_tiles = 1;
    static constexpr int sum_steps = head_dim / 8;
    static __device__ __forceinline__ int rowOf(int row) {
        return static_cast<int>(threadIdx.x) % warp_size / 4 + 8 * row;
    }
    static constexpr __device__ int rowOfSum(int /*tile*/, int j) { return j / 2; }
    static __device__ __forceinline__ int elementOfSum(int step, int j) {
        return 8 * step + static_cast<int>(threadIdx.x) % 4 * 2 + j % 2;
    }
};

// What a block of threads shares.
template <typename Shape>
struct RowsShared {
    using State = RowsState<Shape>;

    static constexpr int rests_bytes =
        Shape::computing_warps * Shape::warp_rows / Shape::seen_rows * Shape::rests_bytes;

    // Levels of the fold whose states wait there, and not in the workspace: one team leaves room
    // for two, beside the stages that products of warp groups want.
    static __host__ __device__ constexpr int levels(int teams) {
        return Shape::has_parts && teams == 1 ? 2 : 1;
    }

    // Of a block of threads with so many teams, each of whose rings has so many stages.
    static constexpr int bytes(int teams, int stages) {
        return teams * (stages * Shape::stage_bytes + Shape::queue_bytes) + rests_bytes +
               levels(teams) * State::bytes;
    }

    std::byte* tiles;         // [teams][stages]
    std::byte* rests;         // of queries, of each of seen_rows rows
    std::byte* waiting;       // [levels] states of all rows
    Unit* queues;             // [teams][queue_slots]
    std::uint64_t* barriers;  // [teams]: of the queue [2][queue_slots]: filled, read; then the
                              // ring's stages
    int stages;

    __device__ RowsShared(std::byte* shared, int teams, int ring_stages)
        : tiles(shared),
          rests(shared + teams * ring_stages * Shape::tile_bytes),
          waiting(rests + rests_bytes),
          queues(reinterpret_cast<Unit*>(waiting + levels(teams) * State::bytes)),
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

// What Shape::seen_rows rows, of which some exist or none, see of a leaf: some row sees tokens of
// [first, end), all rows see those of [first_of_all, end_of_all). It takes few registers.
template <typename Shape>
class SeenByRows {
public:
    // With the warp's rows from first_row on.
    __device__ SeenByRows(const AttendParams& params, const Unit& unit, int first_row) {
        const int first = first_row / Shape::seen_rows * Shape::seen_rows;
        rows_ = min(unit.rows - first, Shape::seen_rows);
        if (rows_ <= 0) return;
        const int group = params.query_heads / params.kv_heads;
        const std::int64_t last_position = unit.query(first + rows_ - 1, group).position;
        const auto age = [&](int row) {
            return static_cast<int>(last_position - unit.query(row, group).position);
        };
        behind_ = static_cast<int>(unit.last_position - last_position);
        oldest_ = age(first);
#pragma unroll
        for (int i = 0; i < Shape::thread_rows; ++i) {
            const int row = first_row + Shape::rowOf(i);
            // One that does not exist sees what the last one sees; nothing of it is kept.
            const int of_row = row < first + rows_ ? age(row) : 0;
            ages_ |= static_cast<std::uint32_t>(of_row) << 8 * i;
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

    // How many rows there are.
    [[nodiscard]] __device__ int rows() const {
        return rows_;
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
    // Of the thread's rows the one that is number 2 * n + e.
    [[nodiscard]] __device__ __forceinline__ SeenTokens row(int n, int e) const {
        const int age = static_cast<int>(readAnew(ages_) >> (16 * n + 8 * e) & 0xFFU);
        return {first_of_all_ - age - 1, end_ - age - 1};
    }

private:
    static_assert(Shape::seen_rows <= 1 << 8 && Shape::thread_rows <= 4);

    int rows_;
    int behind_ = 0;          // the last row, the unit's last position
    int oldest_ = 0;          // how much earlier than the last row the first one is
    std::uint32_t ages_ = 0;  // the thread's rows, likewise: 8 bits each
    int first_ = 0;
    int end_ = 0;
    int first_of_all_ = 0;
    int end_of_all_ = 0;
};

// A leaf by the products of warps: of 16 rows, or 8.
template <NumberFormat format, int head_dim>
class WarpRowsLeaf {
    using Shape = RowsByWarps<format, head_dim>;
    using Seen = SeenByRows<Shape>;

public:
    __device__ WarpRowsLeaf(const AttendParams& params, const Unit& unit, int first_row,
                            std::uint32_t /*rests*/)
        : leaf_(QueryRows<Shape::query_tiles>(params, unit, first_row, head_dim), nullptr, false) {}

    __device__ __forceinline__ void clear() { leaf_.clear(); }
    // Takes it from the ring. A tile of which no row sees anything gives weights of 0: it is left
    // out.
    __device__ __forceinline__ void attend(const AttendParams& params, const Ring& ring,
                                           RingPlace& place, int tokens, const Seen& seen) {
        const bool all = seen.rows() > Shape::warp_rows - product_rows;  // tiles have rows
        takeLeaf<Shape>(ring, place, tokens,
                        [&](int part, int first, std::uint32_t tile, std::uint64_t present) {
                            if (!seen.any(first)) return;
                            if (part == 0 && all)
                                leaf_.template addScores<Shape::query_tiles>(params, tile, present,
                                                                             first, seen);
                            else if (part == 0)
                                leaf_.template addScores<1>(params, tile, present, first, seen);
                            else if (all)
                                leaf_.template addValues<Shape::query_tiles>(tile);
                            else
                                leaf_.template addValues<1>(tile);
                        });
    }
    __device__ __forceinline__ float finish() {
        leaf_.finish();
        return leaf_.normalise();
    }
    [[nodiscard]] __device__ auto& sums() { return leaf_.sums(); }

private:
    Leaf<format, head_dim, Shape> leaf_;
};

// A state of a warp's rows while it is folded: out in the thread's sums of the leaf, and the lse of
// row lane % warp_rows.
template <typename Shape>
class RowsFold {
    using State = RowsState<Shape>;
    using Sums = float[Shape::sum_tiles][Shape::sum_steps][4];

public:
    // waiting: in shared memory, shared_levels times State::bytes. levels: in the workspace, as
    // many such as a unit has levels, but one.
    __device__ RowsFold(std::byte* waiting, int shared_levels, std::byte* levels)
        : waiting_(waiting),
          shared_levels_(shared_levels),
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
        std::byte* const state = level < shared_levels_
                                     ? waiting_ + level * State::bytes
                                     : levels_ + std::int64_t{level - 1} * State::bytes;
        return reinterpret_cast<float4*>(state) + threadIdx.x;
    }
    [[nodiscard]] __device__ float* lseOf(float4* parts) const {
        return reinterpret_cast<float*>(parts - threadIdx.x +
                                        State::parts * Shape::computing_threads) +
               threadIdx.x;
    }

    __device__ __forceinline__ void store(int level, const Sums& sums, float lse) const {
        float4* const to = parts(level);
#pragma unroll
        for (int n = 0; n < Shape::sum_tiles; ++n)
#pragma unroll
            for (int i = 0; i < Shape::sum_steps; ++i)
                to[(n * Shape::sum_steps + i) * Shape::computing_threads] =
                    make_float4(sums[n][i][0], sums[n][i][1], sums[n][i][2], sums[n][i][3]);
        *lseOf(to) = lse;
    }

    __device__ __forceinline__ void load(int level, Sums& sums, float& lse) const {
        float4* const from = parts(level);
#pragma unroll
        for (int n = 0; n < Shape::sum_tiles; ++n)
#pragma unroll
            for (int i = 0; i < Shape::sum_steps; ++i) {
                const float4 four = from[(n * Shape::sum_steps + i) * Shape::computing_threads];
                sums[n][i][0] = four.x;
                sums[n][i][1] = four.y;
                sums[n][i][2] = four.z;
                sums[n][i][3] = four.w;
            }
        lse = *lseOf(from);
    }

    // Each lane works out the weights of one row.
    __device__ __forceinline__ void mergeLeft(int level, Sums& sums, float& lse) const {
        float4* const from = parts(level);
        const MergeWeights weights = mergeWeights(*lseOf(from), lse);
        lse = weights.lse;
        MergeWeights rows[Shape::thread_rows];
        bool both = true;
#pragma unroll
        for (int i = 0; i < Shape::thread_rows; ++i) {
            rows[i] = {__shfl_sync(all_lanes, weights.left, Shape::rowOf(i)),
                       __shfl_sync(all_lanes, weights.right, Shape::rowOf(i)), 0.0F};
            both = both && rows[i].left != 0.0F && rows[i].right != 0.0F;
        }
        // Mostly no state is empty, or as good as that.
        if (__builtin_expect(__all_sync(all_lanes, both), 1))
            mergeAll(from, rows, sums, mergeBoth);
        else
            mergeAll(from, rows, sums, mergeOut);
    }

    template <typename Merge>
    static __device__ __forceinline__ void mergeAll(const float4* from,
                                                    const MergeWeights (&rows)[Shape::thread_rows],
                                                    Sums& sums, const Merge& merge) {
#pragma unroll
        for (int n = 0; n < Shape::sum_tiles; ++n)
#pragma unroll
            for (int i = 0; i < Shape::sum_steps; ++i) {
                const float4 four = from[(n * Shape::sum_steps + i) * Shape::computing_threads];
                const float left[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    sums[n][i][j] = merge(rows[Shape::rowOfSum(n, j)], left[j], sums[n][i][j]);
            }
    }

    std::byte* waiting_;
    int shared_levels_;
    std::byte* levels_;
    int unit_levels_ = 0;
    unsigned waits_ = 0;  // bit of a level: a state waits there
};

// To the output when the unit is its tree, else to its slot of the workspace, where its tree may be
// folded. By each warp, for the rows from first_row on that are its own.
template <typename Shape, typename Sums>
__device__ __forceinline__ void storeRows(const AttendLaunch& launch, const Unit& unit,
                                          int first_row, bool has_state, const Sums& sums,
                                          float warp_lse) {
    constexpr int head_dim = Shape::head_dim;
    const int rows = min(unit.rows - first_row, Shape::warp_rows);
    if (rows <= 0) return;
    const AttendParams& params = launch.params;
    const int cut_bits = unit.cutBits();
    float* const slot = static_cast<float*>(params.workspace) +
                        unit.workspace_slot * slotNumbers(launch.tile_rows, head_dim);
#pragma unroll
    for (int r = 0; r < Shape::thread_rows; ++r) {
        const int of_warp = Shape::rowOf(r);
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
        for (int n = 0; n < Shape::sum_tiles; ++n)
#pragma unroll
            for (int i = 0; i < Shape::sum_steps; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (Shape::rowOfSum(n, j) != r) continue;
                    const int element = Shape::elementOfSum(i, j);
                    out[element] = empty ? 0.0F : sums[n][i][j];
                    if (element == 0) *lse = row_lse;
                }
    }
    // Rows are always the same warp's.
    if (isSmall(unit) &&
        isLastWarp(treeCounter(launch, unit) + first_row / Shape::warp_rows, unitsOfTree(unit)))
        foldTree<head_dim>(launch, unit, first_row, rows);
}

// Which of 32 leaves there are.
struct LeafBits {
    unsigned bits;

    [[nodiscard]] __device__ __forceinline__ bool has(int leaf) const {
        return (bits >> leaf & 1) != 0;
    }
    // The largest subtree of the `leaves` that begins with this leaf and has no other, or is empty:
    // log2 of how many it would have. Its state is the leaf's.
    [[nodiscard]] __device__ __forceinline__ int levelsOf(int leaf, int leaves) const {
        int level = 0;
        while ((2 << level) <= leaves && (leaf >> level & 1) == 0 &&
               (bits >> (leaf + (1 << level)) & ((1U << (1 << level)) - 1U)) == 0)
            ++level;
        return level;
    }
};

// What a warp that computes does: of the units of team `team` the query rows from first_row on.
template <typename Shape>
__device__ __forceinline__ void computeRows(const AttendLaunch& launch,
                                            const RowsShared<Shape>& shared, int warp, int team,
                                            int first_row) {
    const AttendParams& params = launch.params;
    const Ring ring = shared.ring(team);
    RowsFold<Shape> fold(
        shared.waiting, RowsShared<Shape>::levels(launch.teams),
        launch.fold + std::int64_t{blockIdx.x} * launch.fold_levels * RowsState<Shape>::bytes);
    RingPlace place;
    const std::uint32_t rests = sharedAddress(
        shared.rests + warp * Shape::warp_rows / Shape::seen_rows * Shape::rests_bytes);
    QueueReader units(shared.unitQueue(team));
    while (const Unit* const next = units.next()) {
        const Unit& unit = *next;
        typename Shape::Leaf leaf(params, unit, first_row, rests);
        SeenByRows<Shape> seen(params, unit, first_row);
        fold.begin(unit.leaf_bits);
        float lse = empty_lse;
        bool has_state = false;
        // The leaves of up to 32 paths, a lane each: bits of those that the unit sees, and stripes.
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        constexpr int warp_bits = 5;
        static_assert(1 << warp_bits == warp_size);
        const int paths = unit.leaf_bits < warp_bits ? 1 << unit.leaf_bits : warp_size;
#pragma unroll 1
        for (std::int64_t first = 0; first >> unit.leaf_bits == 0; first += paths) {
            const std::int64_t of_lane =
                lane < paths ? unit.stripeAt(unit.first_leaf + first + lane, params.context_ranks)
                             : no_stripe;
            const LeafBits seen_leaves{__ballot_sync(all_lanes, unit.sees(of_lane))};
#pragma unroll 1
            for (int path = 0; path < paths;) {
                has_state = seen_leaves.has(path);
                if (has_state) {
                    const std::int64_t stripe = __shfl_sync(all_lanes, of_lane, path);
                    seen.enter(params, unit, stripe * stripe_tokens);
                    leaf.clear();
                    leaf.attend(params, ring, place, unit.tokensOf(stripe), seen);
                    has_state = seen.any();
                    if (has_state) lse = leaf.finish();
                }
                const int level = seen_leaves.levelsOf(path, paths);
                fold.add(leaf.sums(), lse, has_state, (first + path) >> level, level);
                path += 1 << level;
            }
        }
        storeRows<Shape>(launch, unit, first_row, has_state, leaf.sums(), lse);
        units.release();
    }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::threads, 1)
    attend_rows_kernel(const __grid_constant__ AttendLaunch launch) {
    // What the computing warps wait for must be there.
    static_assert(2 * Shape::computing_registers + Shape::fetching_registers <=
                  3 * Shape::launch_registers);
    static_assert(Shape::computing_warps * Shape::warp_rows <= most_tile_rows);
    extern __shared__ __align__(1024) std::byte memory[];
    const RowsShared<Shape> shared(memory, launch.teams, launch.stages);
    // By a shuffle, so that the compiler knows that a warp's threads have the same.
    const int warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / warp_size, 0);
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int team_warps = Shape::computing_warps / launch.teams;
    if (warp < launch.teams) {
        const Ring ring = shared.ring(warp);
        const UnitQueue queue = shared.unitQueue(warp);
        const auto at = static_cast<std::uint32_t>(lane * 8);
        if (lane < launch.stages) {
            initBarrier(ring.filled(lane), warp_size);
            initBarrier(ring.consumed(lane), team_warps * Shape::warp_arrivals);
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
        computeRows<Shape>(launch, shared, warp, warp / team_warps,
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
    using Shape = std::conditional_t<RowsByGroups<format, head_dim>::can,
                                     RowsByGroups<format, head_dim>, RowsByWarps<format, head_dim>>;
    return {.head_dim = head_dim,
            .tile_rows = Shape::computing_warps * Shape::warp_rows / teams,
            .teams = teams,
            .threads = Shape::threads,
            .blocks_per_multiprocessor = 1,
            .most_stages = warp_size / teams,
            .box_tokens = Shape::has_parts ? Shape::tile_tokens : 0,
            .state_bytes = RowsState<Shape>::bytes,
            .function = attend_rows_kernel<Shape>,
            .sharedBytes = [](int stages) { return RowsShared<Shape>::bytes(teams, stages); }};
}

}  // namespace kvgrid::cuda
