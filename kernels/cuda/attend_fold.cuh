// The fold of trees that are cut into few units, inside the attention kernels. The units' states
// wait in the workspace; whichever warp stores the last of a tree folds it, for the query rows that
// it has. So nobody waits, and most of it is done while memory serves others.
#pragma once

#include "kernels/cuda/attend_schedule.cuh"
#include "kernels/cuda/ptx.cuh"

namespace kvgrid::cuda {

inline constexpr int group_states = 1 << small_tree_bits;
static_assert(2 * group_states == warp_size);

// The weights of all merges of 16 states, in order of the aligned binary tree, for two query rows:
// the first 16 lanes have those of one, the last 16 of the other. Merges of neighbours lie in lanes
// 0 to 7, of pairs in 8 to 11, then 12 and 13, 14.
struct GroupWeights {
    float left = 1.0F;
    float right = 0.0F;
    float lse = empty_lse;  // of what was merged

    static __device__ constexpr int firstLane(int merges) { return group_states - 2 * merges; }

    // Called by all lanes, with the lse of one state each, of which there are 2, 4, 8 or 16: those
    // beyond are empty.
    __device__ __forceinline__ GroupWeights(float state_lse, int states)
        : last_merges_(group_states / states) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int half = lane & group_states;
        float below = state_lse;
        int first_below = 0;
        // A loop, as it runs seldom: straight code takes longer to come than to run.
#pragma unroll 1
        for (int merges = group_states / 2; merges >= last_merges_; merges /= 2) {
            const int merge = lane - half - firstLane(merges);
            const int from = half + (first_below + 2 * merge) % group_states;
            const MergeWeights weights = mergeWeights(__shfl_sync(all_lanes, below, from),
                                                      __shfl_sync(all_lanes, below, from + 1));
            if (merge >= 0 && merge < merges) {
                left = weights.left;
                right = weights.right;
                lse = weights.lse;
            }
            below = lse;
            first_below = firstLane(merges);
        }
    }

    // Called by all lanes.
    [[nodiscard]] __device__ __forceinline__ MergeWeights of(int row, int merges, int merge) const {
        const int lane = row * group_states + firstLane(merges) + merge;
        return {__shfl_sync(all_lanes, left, lane), __shfl_sync(all_lanes, right, lane), 0.0F};
    }
    [[nodiscard]] __device__ __forceinline__ float total(int row) const {
        return __shfl_sync(all_lanes, lse, row * group_states + firstLane(last_merges_));
    }

private:
    int last_merges_;  // of the level at which all states are one: those above change nothing
};

// A group's states of one or two neighbouring query rows, in the workspace: of the first state they
// are the numbers from `out` and from `lse` on, of the next `stride` numbers behind.
template <int head_dim>
struct Group {
    static constexpr int lane_numbers = 4;
    static constexpr int part_numbers = lane_numbers * warp_size;  // of a row, at a time
    static constexpr int parts = (head_dim + part_numbers - 1) / part_numbers;
    static constexpr int half_states = group_states / 2;

    const float* workspace;
    int out;
    int lse;
    int stride;
    int states;
    int rows;

    // Called by all lanes. store(row, number, numbers, lse) gets what they fold to, 4 numbers of a
    // row a lane. As many come at a time as registers hold: of both rows, where the states are few.
    template <typename Store>
    __device__ __forceinline__ void fold(const Store& store) const {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int row_of_lane = lane / group_states;
        const int state_of_lane = lane % group_states;
        const bool both_rows = states <= half_states;
        const int items = both_rows ? parts : rows * parts;
        float4 low[half_states];
        float4 high[half_states];
        load(0, both_rows, low, high);
        const GroupWeights weights(
            state_of_lane < states && row_of_lane < rows
                ? __ldcg(workspace + lse + state_of_lane * stride + row_of_lane)
                : empty_lse,
            states);
        int item = 0;
        while (true) {
            const int low_row = both_rows ? 0 : item / parts;
            const int high_row = both_rows ? 1 : low_row;
            mergeHalf(weights, low_row, 0, low);
            mergeHalf(weights, high_row, both_rows ? 0 : half_states, high);
            if (!both_rows) mergeFour(weights.of(low_row, 1, 0), low[0], high[0]);
            const int number = numberOf(item);
            const float low_lse = weights.total(low_row);
            const float high_lse = weights.total(high_row);
            if (number < head_dim) {
                store(low_row, number, low[0], low_lse);
                if (both_rows && rows > 1) store(high_row, number, high[0], high_lse);
            }
            if (++item == items) return;
            load(item, both_rows, low, high);
        }
    }

private:
    static __device__ __forceinline__ void mergeFour(const MergeWeights& weights, float4& left,
                                                     const float4& right) {
        left.x = mergeOut(weights, left.x, right.x);
        left.y = mergeOut(weights, left.y, right.y);
        left.z = mergeOut(weights, left.z, right.z);
        left.w = mergeOut(weights, left.w, right.w);
    }

    // Eight states from `first` on, to the first of them.
    static __device__ __forceinline__ void mergeHalf(const GroupWeights& weights, int row,
                                                     int first, float4 (&numbers)[half_states]) {
#pragma unroll
        for (int distance = 1; distance < half_states; distance *= 2)
#pragma unroll
            for (int i = 0; i < half_states; i += 2 * distance)
                mergeFour(weights.of(row, half_states / distance, (first + i) / (2 * distance)),
                          numbers[i], numbers[i + distance]);
    }

    // The lane's first number of a part of a row.
    static __device__ __forceinline__ int numberOf(int item) {
        return item % parts * part_numbers +
               static_cast<int>(threadIdx.x) % warp_size * lane_numbers;
    }

    // Of a part: eight states of both rows, or sixteen of one.
    __device__ __forceinline__ void load(int item, bool both_rows, float4 (&low)[half_states],
                                         float4 (&high)[half_states]) const {
        const bool owns = numberOf(item) < head_dim;
        const int from = out + (both_rows ? 0 : item / parts * head_dim) + numberOf(item);
        const int high_from = from + (both_rows ? head_dim : half_states * stride);
        const int high_states = both_rows ? (rows > 1 ? states : 0) : states - half_states;
#pragma unroll
        for (int i = 0; i < half_states; ++i) {
            low[i] = numbersAt(owns && i < states, from + i * stride);
            high[i] = numbersAt(owns && i < high_states, high_from + i * stride);
        }
    }

    [[nodiscard]] __device__ __forceinline__ float4 numbersAt(bool exist, int at) const {
        return exist ? __ldcg(reinterpret_cast<const float4*>(workspace + at))
                     : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    }
};

// The fold of a unit: the state of its next leaf, or of all that are computed at a time, comes in,
// and waits until that of its sibling is there.
template <typename State, int register_levels>
class UnitFold {
public:
    // After state 2^k - 1 of 2^k, `state` is the state of all of them.
    __device__ __forceinline__ void add(std::int64_t index, State& state) {
#pragma unroll
        for (int level = 0; level < register_levels; ++level) {
            if ((index >> level & 1) == 0) {
                waiting_[level] = state;
                return;
            }
            state.mergeLeft(waiting_[level]);
        }
#pragma unroll 1
        for (int level = register_levels; level <= most_leaf_bits; ++level) {
            if ((index >> level & 1) == 0) {
                deep_[level - register_levels] = state;
                return;
            }
            state.mergeLeft(deep_[level - register_levels]);
        }
    }

private:
    State waiting_[register_levels > 0 ? register_levels : 1];
    State deep_[most_leaf_bits + 1 - register_levels];
};

// Whether a tree is cut into few units.
__device__ __forceinline__ bool isSmall(const Unit& unit) {
    return unit.cutBits() > 0 && unit.cutBits() <= small_tree_bits;
}
__device__ __forceinline__ int unitsOfTree(const Unit& unit) {
    return 1 << unit.cutBits();
}

// The slot of the workspace that the first unit of the tree has.
__device__ __forceinline__ int firstSlot(const Unit& unit) {
    return unit.workspace_slot -
           static_cast<int>(unit.first_leaf >> unit.leaf_bits) * unit.slot_stride;
}

// Counters of who has stored units of a small tree.
__device__ __forceinline__ std::uint32_t* treeCounter(const AttendLaunch& launch,
                                                      const Unit& unit) {
    return launch.plan.counters + firstSlot(unit) * most_computing_warps;
}

// Called by one thread, when it and others that it synchronised with have stored. Whether all
// `members` have, whose states then may be read, by those that it synchronises with thereafter too.
__device__ __forceinline__ bool isLast(std::uint32_t* counter, int members) {
    fenceDevice();
    const bool is_last = atomicAdd(counter, 1U) + 1 == static_cast<std::uint32_t>(members);
    if (is_last) {
        fenceDevice();
        *counter = 0;  // for the next launch
    }
    return is_last;
}

// The same of a warp, called by all its lanes.
__device__ __forceinline__ bool isLastWarp(std::uint32_t* counter, int members) {
    __syncwarp();
    int is_last = 0;
    if (isFirstLane()) is_last = isLast(counter, members) ? 1 : 0;
    is_last = __shfl_sync(all_lanes, is_last, 0);
    __syncwarp();
    return is_last != 0;
}

// Called by all lanes of a warp: folds a small tree's states of `rows` query rows of the tile, from
// first_row on, which all of its units have stored.
template <int head_dim>
__device__ __forceinline__ void foldTree(const AttendLaunch& launch, const Unit& unit,
                                         int first_row, int rows) {
    const AttendParams& params = launch.params;
    auto* const workspace = static_cast<float*>(params.workspace);
    const auto numbers = static_cast<int>(slotNumbers(launch.tile_rows, head_dim));
    const int first = firstSlot(unit);
#pragma unroll 1
    for (int pair = first_row; pair < first_row + rows; pair += 2) {
        const Group<head_dim> group{workspace,
                                    first * numbers + pair * head_dim,
                                    first * numbers + launch.tile_rows * head_dim + pair,
                                    numbers * unit.slot_stride,
                                    unitsOfTree(unit),
                                    min(first_row + rows - pair, 2)};
        group.fold([&](int row, int number, float4 folded, float lse) {
            const std::int64_t to = outputRow(params, unit, pair + row);
            *reinterpret_cast<float4*>(params.out + to * head_dim + number) =
                lse == empty_lse ? make_float4(0.0F, 0.0F, 0.0F, 0.0F) : folded;
            if (number == 0) params.lse[to] = lse;
        });
    }
}

}  // namespace kvgrid::cuda
