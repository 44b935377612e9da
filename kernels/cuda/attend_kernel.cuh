// The portable attention kernel (sm_80 and newer). What it computes: kernels/ops.h; how the work is
// cut: attend_schedule.cuh.
//
// A block of threads has four warps, and stays for the whole launch. Each warp computes a leaf (a
// stripe of 256 tokens) by itself: it keeps tiles of K and V coming into its own ring of shared
// memory (attend_fetch.cuh), also across leaves and units, so that memory never waits for
// arithmetic. Tokens are the rows of the matrix products and query rows their 8 columns:
//   scores [tokens, rows] = K [tokens, head_dim] * Q^T,    out^T [head_dim, rows] += V^T * weights
// with weights rounded to the format of V, and sums in fp32. Q is rounded to the format of K; for
// bf16 what the rounding left out, rounded again, is a second product: the errors of a query's 8
// bits would add to every score, and take outputs beyond their bound. Within a leaf tiles come in
// order with a running maximum (Milakov and Gimelshein, arXiv 1805.02867). Four sibling
// leaves fold in shared memory; their unit's tree folds in registers.
//
// A column is computed as if it were alone: no choice depends on the other rows of the tile, and a
// token that a row does not see has the weight 0 there. Where no row sees a token its K is masked
// and its V is 0, so that what memory holds there cannot matter. (A V of a later row's own token
// that is not finite does reach the rows before it: 0 x infinity.)
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/attend_fetch.cuh"
#include "kernels/cuda/attend_launch.h"

namespace kvgrid::cuda {

inline constexpr int attend_threads = attend_warps * warp_size;

// A warp's state of one leaf. A thread has rows 2 * (lane % 4) and + 1 of the tile, in that order
// in its arrays, and of those states the elements 16 i + lane / 4 (sums[i][0], [1]) and + 8 ([2],
// [3]).
template <NumberFormat format, int head_dim>
class Leaf {
    using Shape = AttendShape<head_dim>;
    using Product = Products<format>;
    static constexpr int token_steps = Shape::tile_tokens / 16;
    static constexpr float log2_e = 1.44269504F;
    static constexpr float ln_2 = 0.693147181F;
    static constexpr std::uint32_t tile_mask =
        Shape::tile_tokens == warp_size ? all_lanes : (1U << Shape::tile_tokens) - 1;

public:
    // rows of the tile beyond `rows` are zeros.
    __device__ void loadQueries(const AttendParams& params, const Unit& unit) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int group = params.query_heads / params.kv_heads;
        const bool exists = lane / 4 < unit.rows;
        const Unit::Query query = unit.query(exists ? lane / 4 : 0, group);
        const float* const q =
            params.q +
            ((query.row * params.query_heads + unit.kv_head * group + query.head) * head_dim) +
            lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float2 pair = make_float2(0.0F, 0.0F);
                if (exists) pair = *reinterpret_cast<const float2*>(q + 16 * i + 8 * half);
                queries_[i][half] = Product::pack(pair.x, pair.y);
                if constexpr (Product::splits_queries) {
                    const float2 rounded = Product::unpack(queries_[i][half]);
                    query_rests_[i][half] = Product::pack(pair.x - rounded.x, pair.y - rounded.y);
                }
            }
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
            for (float& sum : sums_[i])
                sum = 0.0F;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            top_[e] = empty_lse;
            weight_[e] = 0.0F;
            rounded_weight_[e] = 0.0F;
        }
    }

    // K of a tile whose first token is `first` of the leaf; rows see tokens up to limits[e].
    __device__ void addScores(std::uint32_t tile, std::uint32_t present, int first, float scale,
                              const int (&limits)[2]) {
        float scores[token_steps][4];
        multiplyKeys(tile, scores);

        // Times log2(e), for powers of two.
        const float factor = scale * log2_e;
        float top[2] = {empty_lse, empty_lse};
        const bool all_visible = present == tile_mask &&
                                 first + Shape::tile_tokens - 1 <= limits[0] &&
                                 first + Shape::tile_tokens - 1 <= limits[1];
        if (__builtin_expect(__all_sync(all_lanes, all_visible) != 0, 1)) {
#pragma unroll
            for (int t = 0; t < token_steps; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    scores[t][i] *= factor;
        } else {
            const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
            for (int t = 0; t < token_steps; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = 16 * t + 8 * (i / 2) + lane / 4;
                    const bool visible =
                        (present >> token & 1) != 0 && first + token <= limits[i % 2];
                    scores[t][i] = visible ? scores[t][i] * factor : empty_lse;
                }
        }
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                top[i % 2] = fmaxf(top[i % 2], scores[t][i]);
        float factors[2];
        float base[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int distance = 4; distance < warp_size; distance *= 2)
                top[e] = fmaxf(top[e], __shfl_xor_sync(all_lanes, top[e], distance));
            top[e] = fmaxf(top[e], top_[e]);
            // Without any score yet: -inf minus itself would be NaN.
            base[e] = top[e] == empty_lse ? 0.0F : top[e];
            factors[e] = powerOfTwo(top_[e] - base[e]);
            top_[e] = top[e];
        }
        rescale(factors);
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float weights[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    weights[e] = powerOfTwo(scores[t][2 * half + e] - base[e]);
                    weight_[e] += weights[e];
                }
                const std::uint32_t pair = Product::pack(weights[0] * Product::weight_scale,
                                                         weights[1] * Product::weight_scale);
                const float2 rounded = Product::unpack(pair);
                rounded_weight_[0] += rounded.x;
                rounded_weight_[1] += rounded.y;
                weights_[t][half] = transposed(pair);
            }
    }

    // V of the tile whose K came last.
    __device__ void addValues(std::uint32_t tile) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int t = 0; t < token_steps; ++t) {
            const int row = 16 * t + lane % 8 + lane / 16 * 8;
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i) {
                std::uint32_t values[4];
                const int chunk = 2 * i + (lane / 8 & 1);
                loadTransposed(values,
                               tile + static_cast<std::uint32_t>(storedChunkAt(row, chunk) * 16));
                Product::multiply(sums_[i], values, weights_[t][0], weights_[t][1]);
            }
        }
    }

    // Writes the state: out to out[row * Shape::exchange_stride ...], lse to lse[row].
    __device__ void store(float* out, float* lse) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int distance = 4; distance < warp_size; distance *= 2) {
                weight_[e] += __shfl_xor_sync(all_lanes, weight_[e], distance);
                rounded_weight_[e] += __shfl_xor_sync(all_lanes, rounded_weight_[e], distance);
            }
            const int row = lane % 4 * 2 + e;
            const bool empty = weight_[e] == 0.0F;
            const float factor = empty ? 0.0F : __fdiv_rn(1.0F, rounded_weight_[e]);
            float* const to = out + row * Shape::exchange_stride + lane / 4;
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i) {
                to[16 * i] = sums_[i][e] * factor;
                to[16 * i + 8] = sums_[i][2 + e] * factor;
            }
            if (lane < 4) lse[row] = empty ? empty_lse : top_[e] * ln_2 + logf(weight_[e]);
        }
    }

private:
    // In 16-byte chunks of a tile, whose rows lie as in the pool: its first position is a multiple
    // of 8.
    static __device__ __forceinline__ int storedChunkAt(int row, int chunk) {
        return row * Shape::row_chunks + storedChunk(row, chunk, Shape::row_chunks);
    }

    // Two sums a score, so that products wait less for each other.
    __device__ void multiplyKeys(std::uint32_t tile, float (&scores)[token_steps][4]) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        float odd[token_steps][4];
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[t][i] = 0.0F;
                odd[t][i] = 0.0F;
            }
#pragma unroll
        for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
            for (int t = 0; t < token_steps; ++t) {
                const int row = 16 * t + lane % 16;
                std::uint32_t keys[4];
                loadMatrices(keys, tile + static_cast<std::uint32_t>(
                                              storedChunkAt(row, 2 * i + lane / 16) * 16));
                Product::multiply(i % 2 == 0 ? scores[t] : odd[t], keys, queries_[i][0],
                                  queries_[i][1]);
                if constexpr (Product::splits_queries)
                    Product::multiply(i % 2 == 0 ? odd[t] : scores[t], keys, query_rests_[i][0],
                                      query_rests_[i][1]);
            }
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                scores[t][i] += odd[t][i];
    }

    __device__ void rescale(const float (&factors)[2]) {
        // Multiplying by 1 changes nothing, and seldom is it anything else.
        if (__builtin_expect(__any_sync(all_lanes, factors[0] != 1.0F || factors[1] != 1.0F) == 0,
                             1))
            return;
#pragma unroll
        for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sums_[i][j] *= factors[j % 2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            weight_[e] *= factors[e];
            rounded_weight_[e] *= factors[e];
        }
    }

    std::uint32_t queries_[Shape::steps][2];
    std::uint32_t query_rests_[Product::splits_queries ? Shape::steps : 1][2];
    std::uint32_t weights_[token_steps][2];
    float sums_[Shape::steps][4];
    float top_[2];             // of the scores times log2(e)
    float weight_[2];          // this thread's share of the sum of weights
    float rounded_weight_[2];  // the same of what the products see, times weight_scale
};

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

// The fold of a unit's rounds: a round's state comes in, and waits until its sibling is there.
template <int head_dim>
class UnitFold {
    static constexpr int register_levels = AttendShape<head_dim>::register_levels;

public:
    // After round 2^k - 1 of 2^k, `state` is the state of all of them.
    __device__ __forceinline__ void add(std::int64_t round, RowPart<head_dim>& state) {
#pragma unroll
        for (int level = 0; level < register_levels; ++level) {
            if ((round >> level & 1) == 0) {
                waiting_[level] = state;
                return;
            }
            state.mergeLeft(waiting_[level]);
        }
#pragma unroll 1
        for (int level = register_levels; level <= most_round_bits; ++level) {
            if ((round >> level & 1) == 0) {
                deep_[level - register_levels] = state;
                return;
            }
            state.mergeLeft(deep_[level - register_levels]);
        }
    }

private:
    RowPart<head_dim> waiting_[register_levels > 0 ? register_levels : 1];
    RowPart<head_dim> deep_[most_round_bits + 1 - register_levels];
};

// Merges the states of four sibling leaves.
template <int head_dim>
__device__ __forceinline__ void foldRound(const float* exchange, const float* exchange_lse,
                                          RowPart<head_dim>& state) {
    using Shape = AttendShape<head_dim>;
    const int row = static_cast<int>(threadIdx.x) / 16;
    const int element = static_cast<int>(threadIdx.x) % 16;
    const MergeWeights low = mergeWeights(exchange_lse[row], exchange_lse[tile_rows + row]);
    const MergeWeights high =
        mergeWeights(exchange_lse[2 * tile_rows + row], exchange_lse[3 * tile_rows + row]);
    const MergeWeights both = mergeWeights(low.lse, high.lse);
    constexpr int leaf = tile_rows * Shape::exchange_stride;
    const float* const from = exchange + row * Shape::exchange_stride + element;
#pragma unroll
    for (int i = 0; i < head_dim / 16; ++i)
        state.out[i] = mergeOut(both, mergeOut(low, from[16 * i], from[leaf + 16 * i]),
                                mergeOut(high, from[2 * leaf + 16 * i], from[3 * leaf + 16 * i]));
    state.lse = both.lse;
}

// To the output when the unit is its tree, else to its slot of the workspace.
template <int head_dim>
__device__ __forceinline__ void storeUnit(const AttendParams& params, const Unit& unit,
                                          const RowPart<head_dim>& state) {
    const int row = static_cast<int>(threadIdx.x) / 16;
    const int element = static_cast<int>(threadIdx.x) % 16;
    float* out;
    float* lse;
    if (unit.whole) {
        if (row >= unit.rows) return;
        const int group = params.query_heads / params.kv_heads;
        const Unit::Query query = unit.query(row, group);
        const std::int64_t to = query.row * params.query_heads + unit.kv_head * group + query.head;
        out = params.out + to * head_dim;
        lse = params.lse + to;
    } else {
        float* const slot =
            static_cast<float*>(params.workspace) + unit.workspace_slot * slotNumbers(head_dim);
        out = slot + row * head_dim;
        lse = slot + tile_rows * head_dim + row;
    }
    const bool empty = state.lse == empty_lse;
#pragma unroll
    for (int i = 0; i < head_dim / 16; ++i)
        out[16 * i + element] = empty ? 0.0F : state.out[i];
    if (element == 0) *lse = state.lse;
}

template <NumberFormat format, int head_dim>
__global__ void __launch_bounds__(attend_threads, AttendShape<head_dim>::blocks_per_multiprocessor)
    attend_kernel(const __grid_constant__ AttendLaunch launch) {
    using Shape = AttendShape<head_dim>;
    static_assert(head_dim % 16 == 0);
    extern __shared__ __align__(128) std::byte shared[];
    const AttendParams& params = launch.params;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    // The tiles of all warps, then what is exchanged, then barriers and presence.
    const int ring_bytes = launch.stages * Shape::tile_bytes;
    auto* const exchange = reinterpret_cast<float*>(shared + attend_warps * ring_bytes);
    float* const exchange_lse = exchange + attend_warps * tile_rows * Shape::exchange_stride;
    auto* const barriers = reinterpret_cast<std::uint64_t*>(exchange + Shape::exchange_numbers);
    auto* const present = reinterpret_cast<std::uint32_t*>(barriers + attend_warps * launch.stages);
    const Ring ring{sharedAddress(shared + warp * ring_bytes),
                    sharedAddress(barriers + warp * launch.stages), present + warp * launch.stages,
                    launch.stages};
#if __CUDA_ARCH__ >= 900
    static_assert(most_stages <= warp_size);
    if (lane < ring.stages) initBarrier(ring.barriers + static_cast<std::uint32_t>(lane * 8));
    fenceBarriers();
    __syncwarp();
#endif

    // Only the fold of this launch reads what it writes, and that waits for all of it.
    letNextLaunchStart();
    TileFetcher<head_dim> fetcher(launch, warp, ring);
    fetcher.fillRing();
    // q, and the outputs and workspace that may still be read.
    waitForLaunchBefore();

    const int group = params.query_heads / params.kv_heads;
    UnitDeal deal(launch.plan);
    Unit unit;
    while (deal.next(unit)) {
        Leaf<format, head_dim> leaf;
        leaf.loadQueries(params, unit);
        // Of the thread's rows. One that does not exist sees everything, of which nothing is kept:
        // it must not make the others look at single tokens.
        std::int64_t positions[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = lane % 4 * 2 + e;
            positions[e] = row < unit.rows ? unit.query(row, group).position : unit.last_position;
        }
        UnitFold<head_dim> fold;
        RowPart<head_dim> state;
        for (std::int64_t round = 0; round >> unit.round_bits == 0; ++round) {
            const std::int64_t path = (unit.first_round + round) * attend_warps;
            // The first of four siblings is the lowest stripe: without it there is none.
            if (unit.stripeAt(path, params.context_ranks) >= unit.stripes()) {
                state.makeEmpty();
            } else {
                const std::int64_t stripe = unit.stripeAt(path + warp, params.context_ranks);
                const bool has_leaf = stripe < unit.stripes();
                if (has_leaf) {
                    // How far the thread's rows see into the stripe.
                    int limits[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        limits[e] = static_cast<int>(
                            max(std::int64_t{-1}, min(positions[e] - stripe * stripe_tokens,
                                                      std::int64_t{stripe_tokens})));
                    leaf.clear();
                    // K of a tile, then its V. One place fetches: the loop must stay in the
                    // instruction cache.
#pragma unroll 1
                    for (int step = 0; step < 2 * Shape::tiles; ++step) {
                        std::uint32_t tile;
                        const std::uint32_t there = fetcher.take(tile);
                        if (there == 0) continue;
                        if (step % 2 == 0)
                            leaf.addScores(tile, there, step / 2 * Shape::tile_tokens, params.scale,
                                           limits);
                        else
                            leaf.addValues(tile);
                    }
                }
                __syncthreads();  // the last round's states have been read
                if (has_leaf)
                    leaf.store(exchange + warp * tile_rows * Shape::exchange_stride,
                               exchange_lse + warp * tile_rows);
                else if (lane < tile_rows)
                    exchange_lse[warp * tile_rows + lane] = empty_lse;
                __syncthreads();
                foldRound<head_dim>(exchange, exchange_lse, state);
            }
            fold.add(round, state);
        }
        storeUnit<head_dim>(params, unit, state);
    }
#if __CUDA_ARCH__ < 900
    waitCopies<0>();
#endif
}

template <NumberFormat format, int head_dim>
AttendKernel attendKernel() {
    return {head_dim, AttendShape<head_dim>::blocks_per_multiprocessor,
            attend_kernel<format, head_dim>, AttendShape<head_dim>::sharedBytes};
}

template <NumberFormat format>
AttendKernels attendKernels() {
    return {attendKernel<format, 64>(), attendKernel<format, 80>(), attendKernel<format, 96>(),
            attendKernel<format, 128>(), attendKernel<format, 256>()};
}

}  // namespace kvgrid::cuda
