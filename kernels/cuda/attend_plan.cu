// Cuts a step's attention into units and deals them out by size: attend_schedule.cuh says into
// what.
//
// One block of threads does it, once a step: it counts the units of each run, how much work each
// unit is, sorts them by that (by counting), and writes them down whole, so that attend_kernel and
// attend_fold_kernel need one load to begin.
#include "kernels/cuda/attend_plan.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/operations.h"

namespace kvgrid::cuda {
namespace {

constexpr int threads = 1024;
constexpr int warps = threads / warp_size;
constexpr std::int64_t header_bytes = 64;
constexpr std::int64_t counter_bytes =
    most_slots * most_computing_warps * static_cast<std::int64_t>(sizeof(std::uint32_t));
// Leaves for each block of threads, up to which teams of warps compute them: with more, leaves that
// wait each for its own tiles keep more of them under way (docs/kernels.md).
constexpr std::int64_t most_leaves_by_teams = 1;
constexpr int sizes = 65;  // of units, to sort by: 0 to 64 parts of the largest

// What comes before a run, and how it is cut.
struct RunBegin {
    std::int64_t units;      // of the runs before
    std::int64_t slots;      // of the runs before
    std::int64_t trees;      // of the runs before, that attend_fold_kernel folds
    std::int64_t unit_bits;  // log2 of the leaves of a unit
};

template <typename T>
__device__ __forceinline__ T warpSum(T value) {
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(all_lanes, value, distance);
    return value;
}

// Called by all threads. The sum of `value` over them.
__device__ std::int64_t blockSum(std::int64_t value) {
    __shared__ std::int64_t sums[warps];
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    value = warpSum(value);
    if (lane == 0) sums[threadIdx.x / warp_size] = value;
    __syncthreads();
    const std::int64_t sum = warpSum(sums[lane]);
    __syncthreads();
    return sum;
}

// Called by all threads. The sum over the threads before this one; `total` over all.
__device__ std::int64_t sumBefore(std::int64_t value, std::int64_t& total) {
    __shared__ std::int64_t sums[warps];
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const auto warp = threadIdx.x / warp_size;
    std::int64_t upTo = value;
#pragma unroll
    for (int distance = 1; distance < warp_size; distance *= 2) {
        const std::int64_t more = __shfl_up_sync(all_lanes, upTo, distance);
        if (lane >= distance) upTo += more;
    }
    if (lane == warp_size - 1) sums[warp] = upTo;
    __syncthreads();
    std::int64_t before = 0;
    total = 0;
    for (unsigned i = 0; i < warps; ++i) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    __syncthreads();
    return before + upTo - value;
}

// Leaves of a tree in which there is something to do.
__device__ __forceinline__ std::int64_t workOf(const Run& run, const RunShape& shape,
                                               const AttendParams& params) {
    if (run.rows == 0) return 0;
    const std::int64_t stripes =
        (run.first_position + run.rows - 1) / stripe_tokens + 1 - shape.first_stripe;
    const std::int64_t leaves = divide(stripes + params.context_ranks - 1, params.context_ranks);
    return min(leaves, std::int64_t{1} << shape.leaf_bits);
}

// log2 of the leaves of a unit of a run, of whose trees each has `work` leaves with something to
// do, where `left` such leaves of `all` are left for it and the runs behind it: up to twice the
// share of one of `teams` of warps, and half of what one does in all, unless that is little. As who
// is done takes the next unit, units may be large while much is left, and become smaller towards
// the end, so that all end together. Trees that attend_fold_kernel may not be there for
// (AttendLaunch::folds) are cut into as many as their own warps fold.
__device__ __forceinline__ int unitBits(const RunShape& shape, std::int64_t work, std::int64_t left,
                                        std::int64_t all, int teams, int least_bits) {
    constexpr std::int64_t little = 32;
    const std::int64_t share = min(2 * left / teams, max(all / (2 * teams), little));
    const int share_bits = share < 2 ? 0 : 63 - __clzll(share);
    const int empty_bits = shape.first_stripe == 0 ? 0 : shape.leaf_bits - bitsFor(work);
    const int most_cut =
        std::int64_t{1} << shape.leaf_bits <= lane_count ? small_tree_bits : most_unit_bits;
    // With fewer than four leaves a unit, trees of no more units than attend_fold_kernel folds
    // soon.
    constexpr int soon_folded_bits = 7;
    const int enough = min(max(shape.leaf_bits - soon_folded_bits, 0), leaves_by_warps_bits);
    const int least = max(max(least_bits, shape.leaf_bits - most_cut), enough);
    return min(max(share_bits + empty_bits, least), shape.leaf_bits);
}

// A unit of a run, or (unit_of_tree 0 of) a tree. Tiles vary fastest, so that blocks of threads
// that run together read the same K and V; then the units of a tree, then KV heads.
__device__ Unit unitOf(const AttendLaunch& launch, const Run& run, const RunBegin& begin,
                       bool by_teams, bool is_tree, std::int64_t index) {
    const AttendParams& params = launch.params;
    const int group = params.query_heads / params.kv_heads;
    Unit unit;
    unit.shape = shapeOf(run, params, launch.tile_rows, by_teams ? 0 : leaves_by_warps_bits);
    unit.leaf_bits = static_cast<int>(begin.unit_bits);
    const int cut_bits = unit.cutBits();
    const std::int64_t tiles = unit.shape.tiles;
    const std::int64_t head_and_unit = index / tiles;
    const std::int64_t tile = index - head_and_unit * tiles;
    const std::int64_t unit_of_tree =
        is_tree ? 0 : head_and_unit & ((std::int64_t{1} << cut_bits) - 1);
    unit.kv_head = static_cast<int>(is_tree ? head_and_unit : head_and_unit >> cut_bits);
    unit.slot = run.slot;
    unit.by_team = by_teams ? 1 : 0;
    unit.unused = 0;
    unit.first_leaf = unit_of_tree << unit.leaf_bits;
    unit.first_position = run.first_position;
    unit.first_row = run.first_row;
    // All tiles of a run are alike, but the last.
    const std::int64_t all_queries = std::int64_t{run.rows} * group;
    const std::int64_t rows =
        ((all_queries + tiles - 1) / tiles + product_rows - 1) / product_rows * product_rows;
    unit.first_query = tile * rows;
    const std::int64_t queries = all_queries - unit.first_query;
    unit.rows = static_cast<int>(queries < rows ? queries : rows);
    unit.first_seen = firstSeen(run.first_position + unit.first_query / group, params.window);
    unit.last_position = run.first_position + (unit.first_query + unit.rows - 1) / group;
    // Of a whole tree they mean nothing.
    unit.slot_stride = static_cast<std::int32_t>(tiles);
    unit.workspace_slot = static_cast<std::int32_t>(
        begin.slots +
        ((static_cast<std::int64_t>(unit.kv_head) << cut_bits) + unit_of_tree) * tiles + tile);
    return unit;
}

// The run that has the item, where member(begin) counts the items before each run.
template <typename Member>
__device__ std::int64_t runOf(const RunBegin* begins, std::int64_t run_count, std::int64_t item,
                              const Member& member) {
    std::int64_t low = 0;  // the last run that begins at or before the item lies in [low, high)
    std::int64_t high = run_count;
    while (high - low > 1) {
        const std::int64_t middle = (low + high) / 2;
        if (member(begins[middle]) <= item)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// How much of the largest unit there is, in parts of 64: leaves that exist, of some if there are
// many.
__device__ int sizeOf(const Unit& unit, int largest_bits, int context_ranks) {
    const std::int64_t paths = std::int64_t{1} << unit.leaf_bits;
    const std::int64_t step = paths > 64 ? paths / 64 : 1;
    std::int64_t leaves = 0;
    for (std::int64_t path = 0; path < paths; path += step)
        leaves += unit.sees(unit.stripeAt(unit.first_leaf + path, context_ranks)) ? step : 0;
    return static_cast<int>(((leaves << 6) + (std::int64_t{1} << largest_bits) - 1) >>
                            largest_bits);
}

// Called by all threads: writes begins, and returns what comes before the end. Units have
// 2^least_bits leaves at least, and trees 2^least_tree_bits.
__device__ RunBegin cutRuns(const AttendLaunch& launch, std::int64_t work, int least_tree_bits,
                            int least_bits, RunBegin* begins, int& largest_bits) {
    const AttendParams& params = launch.params;
    RunBegin before{0, 0, 0, 0};
    std::int64_t work_before = 0;
    for (std::int64_t first = 0; first < params.run_count; first += threads) {
        const std::int64_t i = first + threadIdx.x;
        RunShape shape{};
        std::int64_t tree_work = 0;
        if (i < params.run_count) {
            shape = shapeOf(params.runs[i], params, launch.tile_rows, least_tree_bits);
            tree_work = workOf(params.runs[i], shape, params);
        }
        const std::int64_t mine_work = tree_work * shape.trees(params.kv_heads);
        std::int64_t sum;
        const std::int64_t left = work - work_before - sumBefore(mine_work, sum) - mine_work / 2;
        work_before += sum;
        RunBegin mine{
            0, 0, 0,
            unitBits(shape, tree_work, left, work, launch.blocks * launch.teams, least_bits)};
        const std::int64_t trees = shape.trees(params.kv_heads);
        const auto cut_bits = static_cast<int>(shape.leaf_bits - mine.unit_bits);
        mine.units = trees << cut_bits;
        mine.slots = cut_bits > 0 ? mine.units : 0;
        mine.trees = cut_bits > small_tree_bits ? trees : 0;
        if (mine.units > 0) atomicMax(&largest_bits, static_cast<int>(mine.unit_bits));
        RunBegin sums;
        const RunBegin here{before.units + sumBefore(mine.units, sums.units),
                            before.slots + sumBefore(mine.slots, sums.slots),
                            before.trees + sumBefore(mine.trees, sums.trees), mine.unit_bits};
        if (i < params.run_count) begins[i] = here;
        before = {before.units + sums.units, before.slots + sums.slots, before.trees + sums.trees,
                  0};
    }
    return before;
}

__global__ void __launch_bounds__(threads)
    attend_plan_kernel(const __grid_constant__ AttendLaunch launch, RunBegin* begins,
                       std::uint8_t* unit_sizes) {
    __shared__ int places[sizes];  // how many units of each size, then where the next one goes
    __shared__ int largest_bits;
    __shared__ int most_units;
    const AttendParams& params = launch.params;
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < sizes) places[thread] = 0;
    if (thread == 0) most_units = 0;

    std::int64_t work = 0;
    for (std::int64_t i = thread; i < params.run_count; i += threads) {
        const RunShape shape = shapeOf(params.runs[i], params, launch.tile_rows, 0);
        work += workOf(params.runs[i], shape, params) * shape.trees(params.kv_heads);
    }
    work = blockSum(work);
    const bool by_teams = launch.has_teams && work <= most_leaves_by_teams * launch.blocks;
    const int least_tree_bits = by_teams ? 0 : leaves_by_warps_bits;
    // As fine as the slots allow.
    RunBegin end{};
    for (int least_bits = least_tree_bits; least_bits <= most_leaf_bits; ++least_bits) {
        if (thread == 0) largest_bits = 0;
        __syncthreads();
        end = cutRuns(launch, work, least_tree_bits, least_bits, begins, largest_bits);
        __syncthreads();
        if (end.slots <= launch.slots) break;
    }
    // attendPlanBytes makes room for all that can be. Were it wrong, the device had better fail.
    if (end.units > launch.plan.unit_capacity || end.slots > launch.slots || end.trees > most_trees)
        __trap();
    // So does the workspace for what waits there, unless a sequence is longer than its table.
    if (launch.fold != nullptr && largest_bits - 1 > launch.fold_levels) __trap();
    const auto units = static_cast<int>(end.units);
    const auto trees = static_cast<int>(end.trees);
    const auto unitAt = [&](int item) {
        const std::int64_t run = runOf(begins, params.run_count, item,
                                       [](const RunBegin& begin) { return begin.units; });
        return unitOf(launch, params.runs[run], begins[run], by_teams, false,
                      item - begins[run].units);
    };
    for (int item = thread; item < units; item += threads) {
        const int size = min(sizeOf(unitAt(item), largest_bits, params.context_ranks), sizes - 1);
        unit_sizes[item] = static_cast<std::uint8_t>(size);
        atomicAdd(&places[size], 1);
    }
    __syncthreads();
    if (thread == 0) {
        int next = 0;
        for (int size = sizes - 1; size >= 0; --size) {
            const int count = places[size];
            places[size] = next;
            next += count;
        }
    }
    __syncthreads();
    for (int item = thread; item < units; item += threads)
        launch.plan.units[atomicAdd(&places[unit_sizes[item]], 1)] = unitAt(item);
    for (int item = thread; item < trees; item += threads) {
        const std::int64_t run = runOf(begins, params.run_count, item,
                                       [](const RunBegin& begin) { return begin.trees; });
        const Unit tree =
            unitOf(launch, params.runs[run], begins[run], by_teams, true, item - begins[run].trees);
        launch.plan.trees[item] = tree;
        atomicMax(&most_units, 1 << tree.cutBits());
    }
    for (std::int64_t i = thread; i < end.slots * most_computing_warps; i += threads)
        launch.plan.counters[i] = 0;
    __syncthreads();
    if (thread == 0) *launch.plan.header = {units, 0, trees, most_units, launch.tile_rows};
}

// A launch that overlaps the one before it reads the plan at once: so that one is this, which waits
// for the plan.
__global__ void attend_planned_kernel() {}

// Behind the units: their sizes, then the runs' beginnings.
std::size_t bytesOf(std::int64_t units, std::int64_t runs) {
    constexpr std::int64_t fixed =
        header_bytes + counter_bytes + most_trees * static_cast<std::int64_t>(sizeof(Unit));
    const std::int64_t sizes_bytes = (units + 15) / 16 * 16;
    return static_cast<std::size_t>(fixed + units * static_cast<std::int64_t>(sizeof(Unit)) +
                                    sizes_bytes +
                                    runs * static_cast<std::int64_t>(sizeof(RunBegin)));
}

}  // namespace

std::size_t attendPlanBytes(std::int64_t rows, std::int64_t runs, int query_heads) {
    // Whole trees: a tile of each KV head for 8 query rows, and one more a run.
    const std::int64_t tiles = rows * query_heads / product_rows + runs * query_heads;
    // Of two plans (ops.h).
    return 2 * ((bytesOf(tiles + most_slots, runs) + 15) / 16 * 16);
}

PlanView planView(void* plan, std::size_t bytes) {
    auto* const data = static_cast<std::byte*>(plan);
    PlanView view;
    view.header = reinterpret_cast<PlanHeader*>(data);
    view.counters = reinterpret_cast<std::uint32_t*>(data + header_bytes);
    view.trees = reinterpret_cast<Unit*>(data + header_bytes + counter_bytes);
    view.units = view.trees + most_trees;
    const std::size_t fixed = bytesOf(0, 0);
    view.unit_capacity =
        bytes < fixed ? 0 : static_cast<std::int64_t>((bytes - fixed) / (sizeof(Unit) + 1));
    return view;
}

void preparePlan() {
    load(attend_plan_kernel);
    load(attend_planned_kernel);
}

void launchPlan(const AttendLaunch& launch, ::cudaStream_t stream) {
    AttendLaunch planned = launch;
    const std::int64_t runs = launch.params.run_count;
    const std::int64_t runs_bytes = runs * static_cast<std::int64_t>(sizeof(RunBegin));
    if (launch.params.plan_bytes < bytesOf(0, runs) + 16)
        throw Error(ErrorCode::internal, "attend: no room for the plan");
    // What the beginnings take, units cannot.
    const auto bytes = static_cast<std::int64_t>(launch.params.plan_bytes);
    planned.plan = planView(launch.params.plan, static_cast<std::size_t>(bytes - runs_bytes - 16));
    auto* const begins = reinterpret_cast<RunBegin*>(static_cast<std::byte*>(launch.params.plan) +
                                                     (bytes - runs_bytes) / 16 * 16);
    auto* const unit_sizes =
        reinterpret_cast<std::uint8_t*>(planned.plan.units + planned.plan.unit_capacity);
    attend_plan_kernel<<<1, threads, 0, stream>>>(planned, begins, unit_sizes);
    checkLaunch("attend_plan_kernel");
    attend_planned_kernel<<<1, 1, 0, stream>>>();
    checkLaunch("attend_planned_kernel");
}

}  // namespace kvgrid::cuda
