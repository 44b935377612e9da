// A leaf computed by a team of four warps, for 8 query rows: what follows from a tile of K by one
// warp each in turn, what is summed up of V by all, each for a part of the head dim. So a leaf's
// tiles, and not leaves, are what warps do at the same time: short contexts keep many warps busy,
// and a block of threads is soon done with what it began.
//
//   1. warp n: scores of the tiles n, n + 4, ... and each row's greatest of a tile, to all
//   2. each: the running maxima, as a warp that goes through the tiles alone has them; weights of
//      its own tiles and their sums, to all
//   3. each: weights times V of all tiles in order, for its part of the head dim
//
// The states stay where they are until they are stored: each warp folds its part.
#pragma once

#include "kernels/cuda/attend_leaf.cuh"

namespace kvgrid::cuda {

// What a warp has of a state of a team's rows. A thread has of the rows 2 * (lane % 4) and + 1 the
// elements TeamLeaf::elementOf: out[step][2 * half + row].
template <int steps>
struct TeamState {
    float out[steps][4];
    float lse[2];

    __device__ __forceinline__ void makeEmpty() {
#pragma unroll
        for (int i = 0; i < steps; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                out[i][j] = 0.0F;
        lse[0] = lse[1] = empty_lse;
    }

    __device__ __forceinline__ void mergeLeft(const TeamState& left) {
        // Each thread works out one row's.
        const bool second = (threadIdx.x & 4) != 0;
        const MergeWeights mine =
            mergeWeights(second ? left.lse[1] : left.lse[0], second ? lse[1] : lse[0]);
        const MergeWeights other{__shfl_xor_sync(all_lanes, mine.left, 4),
                                 __shfl_xor_sync(all_lanes, mine.right, 4),
                                 __shfl_xor_sync(all_lanes, mine.lse, 4)};
        const MergeWeights weights[2] = {second ? other : mine, second ? mine : other};
#pragma unroll
        for (int i = 0; i < steps; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                out[i][j] = mergeOut(weights[j % 2], left.out[i][j], out[i][j]);
        lse[0] = weights[0].lse;
        lse[1] = weights[1].lse;
    }
};

// What the warps of a team share.
template <typename Shape>
struct TeamShared {
    uint2* rests;    // of queries: [steps][32]
    uint2* weights;  // [256 tokens / 16][32], as the products want them
    float4* sums;    // [tiles][32]: of weights of two rows, then of rounded ones
    float2* tops;    // [tiles][4]: of two rows

    __device__ TeamShared(uint2* rests_of_team, std::byte* scratch)
        : rests(rests_of_team),
          weights(reinterpret_cast<uint2*>(scratch)),
          sums(reinterpret_cast<float4*>(scratch + Shape::weights_bytes)),
          tops(reinterpret_cast<float2*>(scratch + Shape::weights_bytes + Shape::sums_bytes)) {}
};

template <NumberFormat format, int head_dim, typename Shape>
class TeamLeaf {
    using Numbers = Operand<format>;
    using Product = typename Numbers::Product;
    using OfQueries = Queries<format, head_dim, Shape>;
    static constexpr int token_steps = Shape::tile_tokens / 16;
    static constexpr int tiles = Shape::leaf_tiles;
    static constexpr int own_tiles = tiles / attend_warps;
    static_assert(own_tiles * attend_warps == tiles && Shape::rings == attend_warps);
    static_assert(!Shape::has_scales && !Numbers::is_narrow);
    static constexpr int own_steps = (Shape::steps + attend_warps - 1) / attend_warps;

public:
    using State = TeamState<own_steps>;

    // For warp `warp` of the team, which synchronises at `barrier`. Waits for the others.
    __device__ TeamLeaf(const QueryRows<1>& queries, const TeamShared<Shape>& shared, int warp,
                        int barrier)
        : queries_(queries, shared.rests, warp == 0),
          shared_(shared),
          warp_(warp),
          barrier_(barrier) {
        if constexpr (Shape::splits_queries) syncTeam();
    }

    // The state of a leaf of so many tokens, whose tiles come through the rings from `place` on.
    template <typename Rings, typename Sees>
    __device__ __forceinline__ void compute(const AttendParams& params, const Rings& ringOf,
                                            RingPlace& place, int tokens, const Sees& sees,
                                            State& state) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int tiles_of_ring = tilesOfRing<Shape>(tokens);
        const Ring own_ring = ringOf(warp_);

        typename OfQueries::template Scores<1> scores[own_tiles];
        std::uint64_t own_present[own_tiles];
#pragma unroll
        for (int i = 0; i < own_tiles; ++i) {
            const int tile = i * attend_warps + warp_;
            own_present[i] = 0;
            float2 tops = make_float2(empty_lse, empty_lse);
            if (i < tiles_of_ring) {
                waitBarrier(own_ring.filled(place.stage), place.phase);
                __syncwarp();
                own_present[i] = own_ring.stages[place.stage].present;
                if (own_present[i] != 0) {
                    queries_.template scoresOf<1>(params, own_ring.tile<Shape>(place.stage),
                                                  own_present[i], tile * Shape::tile_tokens, sees,
                                                  scores[i]);
                    tops = make_float2(OfQueries::template topOf<1>(scores[i], 0, 0),
                                       OfQueries::template topOf<1>(scores[i], 0, 1));
                }
                // Of all that wait for V, in their stead.
                arrive(own_ring.consumed(place.stage), Shape::arrivals);
                place.advance(own_ring.count);
            }
            if (lane < 4) shared_.tops[tile * 4 + lane] = tops;
        }
        syncTeam();

        RunningTop tops[2];
        float factors[tiles][2];
        float bases[own_tiles][1][2];
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
            const float2 of_tile = shared_.tops[tile * 4 + lane % 4];
            tops[0].raise(of_tile.x);
            tops[1].raise(of_tile.y);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                factors[tile][e] = tops[e].factor;
                if (tile % attend_warps == warp_) bases[tile / attend_warps][0][e] = tops[e].top;
            }
        }
#pragma unroll
        for (int i = 0; i < own_tiles; ++i) {
            const int tile = i * attend_warps + warp_;
            WeightSums sums[1][2];
            if (own_present[i] != 0) {
                typename OfQueries::template Weights<1> weights;
                constexpr std::uint32_t no_scales = 0;  // of which the tile would be wanted
                OfQueries::template weigh<1>(no_scales, own_present[i], scores[i], bases[i],
                                             weights, sums);
#pragma unroll
                for (int t = 0; t < token_steps; ++t)
                    shared_.weights[(tile * token_steps + t) * warp_size + lane] =
                        make_uint2(weights[0][t][0], weights[0][t][1]);
            }
            shared_.sums[tile * warp_size + lane] = make_float4(
                sums[0][0].weight, sums[0][1].weight, sums[0][0].rounded, sums[0][1].rounded);
        }
        syncTeam();

        WeightSums weight_sums[2];
        state.makeEmpty();
#pragma unroll
        for (int i = 0; i < own_tiles; ++i) {
            if (i >= tiles_of_ring) continue;
#pragma unroll
            for (int n = 0; n < attend_warps; ++n)
                waitBarrier(ringOf(n).filled(place.stage), place.phase);
            __syncwarp();
            std::uint64_t present[attend_warps];
#pragma unroll
            for (int n = 0; n < attend_warps; ++n)
                present[n] = ringOf(n).stages[place.stage].present;
#pragma unroll
            for (int n = 0; n < attend_warps; ++n) {
                const int tile = i * attend_warps + n;
                const float4 sums = shared_.sums[tile * warp_size + lane];
                weight_sums[0].add(factors[tile][0], {sums.x, sums.z});
                weight_sums[1].add(factors[tile][1], {sums.y, sums.w});
#pragma unroll
                for (int step = 0; step < own_steps; ++step)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        state.out[step][j] *= factors[tile][j % 2];
                if (present[n] != 0)
                    addValues(ringOf(n).template tile<Shape>(place.stage), tile, state);
            }
#pragma unroll
            for (int n = 0; n < attend_warps; ++n)
                arrive(ringOf(n).consumed(place.stage));
            place.advance(own_ring.count);
        }

#pragma unroll
        for (int e = 0; e < 2; ++e) {
            weight_sums[e].join();
            const float normaliser = RowResult<format>::normaliserOf(weight_sums[e]);
            state.lse[e] = RowResult<format>::lseOf(tops[e], weight_sums[e]);
#pragma unroll
            for (int step = 0; step < own_steps; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    state.out[step][2 * half + e] = RowResult<format>::outOf(
                        state.out[step][2 * half + e], weight_sums[e], normaliser);
        }
    }

    // Of out[step][2 * half + ...] of warp `warp`: which element of the head dim it is; -1: none.
    static __device__ __forceinline__ int elementOf(int warp, int step, int half) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int of_row = step * attend_warps + warp;
        return of_row < Shape::steps ? 16 * of_row + Numbers::outputOf(lane / 4, half) : -1;
    }

private:
    __device__ __forceinline__ void syncTeam() const {
        syncThreads(barrier_, Shape::team_threads);
    }

    // Of a tile of V what the warp has of the head dim.
    __device__ __forceinline__ void addValues(std::uint32_t tile, int tile_number,
                                              State& state) const {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const std::uint32_t first =
            tile + OfQueries::storedAt(lane % 8 + lane / 16 * 8, lane / 8 & 1);
#pragma unroll
        for (int t = 0; t < token_steps; ++t) {
            const uint2 weights =
                shared_.weights[(tile_number * token_steps + t) * warp_size + lane];
#pragma unroll
            for (int i = 0; i < own_steps; ++i) {
                const int step = i * attend_warps + warp_;
                if (Shape::steps % attend_warps != 0 && step >= Shape::steps) continue;
                std::uint32_t values[4];
                loadTransposed(values,
                               OfQueries::pairBehind(first, step) + 16 * t * Shape::row_bytes);
                Product::multiply(state.out[i], values, weights.x, weights.y);
            }
        }
    }

    OfQueries queries_;
    TeamShared<Shape> shared_;
    int warp_;
    int barrier_;
};

// What a thread's two rows see of a leaf: of most leaves all.
template <typename Shape>
class TeamSeen : public RowsSeen<Shape> {
public:
    // Of rows from first_row of the tile on.
    __device__ __forceinline__ TeamSeen(const AttendParams& params, const Unit& unit, int first_row)
        : params_(params),
          unit_(unit),
          first_row_(first_row),
          all_begin_(firstSeen(unit.last_position, params.window)),
          all_end_(unit.query(0, params.query_heads / params.kv_heads).position + 1) {}

    // Now it is about the leaf that begins at `begin`.
    __device__ __forceinline__ void enter(std::int64_t begin) {
        this->rows[0] = this->rows[1] = {-1, stripe_tokens};
        if (__builtin_expect(begin >= all_begin_ && begin + stripe_tokens <= all_end_, 1)) return;
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int group = params_.query_heads / params_.kv_heads;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            // One that does not exist sees all that there is, of which nothing is kept: it must not
            // make the others look at single tokens.
            const int row = first_row_ + lane % 4 * 2 + e;
            const bool exists = row < unit_.rows;
            const std::int64_t position =
                exists ? unit_.query(row, group).position : unit_.last_position;
            const std::int64_t first_seen =
                exists ? firstSeen(position, params_.window) : unit_.first_seen;
            this->rows[e] = seenOf(position, first_seen, begin);
        }
    }

private:
    const AttendParams& params_;
    const Unit& unit_;
    int first_row_;
    std::int64_t all_begin_;  // positions that all rows of the tile see
    std::int64_t all_end_;
};

// Where a thread's two rows of a unit that teams compute go: to the output when the unit is its
// tree, else to its slot of the workspace, where it may be folded with others.
template <int head_dim>
class TeamTarget {
public:
    // Rows from first_row of the tile on are the thread's team's.
    __device__ __forceinline__ TeamTarget(const AttendLaunch& launch, const Unit& unit,
                                          int first_row)
        : launch_(launch),
          unit_(unit) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = first_row + lane % 4 * 2 + e;
            rows_[e] = row >= unit.rows      ? -1
                       : unit.cutBits() == 0 ? outputRow(launch.params, unit, row)
                                             : row;
        }
    }

    // What warp `warp` of the team has.
    template <typename LeafOfTeam>
    __device__ __forceinline__ void store(const typename LeafOfTeam::State& state, int warp) const {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        constexpr int steps = sizeof(state.out) / sizeof(state.out[0]);
        float* out = launch_.params.out;
        float* lse = launch_.params.lse;
        if (unit_.cutBits() != 0) {
            out = static_cast<float*>(launch_.params.workspace) +
                  unit_.workspace_slot * slotNumbers(launch_.tile_rows, head_dim);
            lse = out + launch_.tile_rows * head_dim;
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (rows_[e] < 0) continue;
            float* const to = out + rows_[e] * head_dim;
            const bool empty = state.lse[e] == empty_lse;
#pragma unroll
            for (int step = 0; step < steps; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int element = LeafOfTeam::elementOf(warp, step, half);
                    if (element >= 0) to[element] = empty ? 0.0F : state.out[step][2 * half + e];
                }
            if (warp == 0 && lane / 4 == 0) lse[rows_[e]] = state.lse[e];
        }
    }

private:
    const AttendLaunch& launch_;
    const Unit& unit_;
    std::int64_t rows_[2];  // of the output or of the slot; -1: there is no such row
};

}  // namespace kvgrid::cuda
