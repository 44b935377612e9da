// A leaf of attend_kernel: attention of 8 query rows over the 256 tokens of a stripe, by one warp,
// a tile of K and V at a time. Tokens are the rows of the matrix products and query rows their 8
// columns:
//   scores [tokens, rows] = K [tokens, head_dim] * Q^T,    out^T [head_dim, rows] += V^T * weights
// with weights rounded to 16 bits, and sums in fp32. Q is rounded to the operands' format
// (attend_operands.cuh); for bf16 what the rounding left out, rounded again, is a second product:
// the errors of a query's 8 bits would add to every score, and take outputs beyond their bound.
// Where K and V have scales, K's is multiplied into the score and V's into the weight. Tiles come
// in order with a running maximum (Milakov and Gimelshein, arXiv 1805.02867).
//
// A column is computed as if it were alone: no choice depends on the other rows of the tile, and a
// token that a row does not see has the weight 0 there. Where no row sees a token its K is masked
// and its V is 0, so that what memory holds there cannot matter. (A V of a later row's own token
// that is not finite does reach the rows before it: 0 x infinity.)
#pragma once

#include "kernels/cuda/attend_fetch.cuh"
#include "kernels/cuda/attend_operands.cuh"

namespace kvgrid::cuda {

// A warp's state of one leaf. A thread has the rows 2 * (lane % 4) and + 1 of the product, in that
// order in its arrays, and of those states the elements Operand::outputOf(lane / 4, half) of each
// step's 16: sums[i][0] and [1] of half 0, [2] and [3] of half 1.
template <NumberFormat format, int head_dim, int row_tiles>
class Leaf {
    using Shape = AttendShape<format, head_dim, row_tiles>;
    using Numbers = Operand<format>;
    using Product = typename Numbers::Product;
    static constexpr int token_steps = Shape::tile_tokens / 16;
    static constexpr int chunk_pairs = Shape::row_chunks / 2;
    static constexpr bool has_odd_chunk = Shape::row_chunks % 2 != 0;
    static constexpr bool has_offset = Numbers::offset != 0.0F;
    static constexpr float log2_e = 1.44269504F;
    static constexpr float ln_2 = 0.693147181F;

public:
    // Which tokens of a stripe a row sees: those beyond `above`, up to `last`.
    struct Seen {
        int above;
        int last;
    };

    // rests: in shared memory, where the rests of these rows' queries lie, [steps][32] of 8 bytes.
    // Rows of the tile beyond unit.rows are zeros. Writes the rests when `writes_rests`.
    __device__ Leaf(const AttendParams& params, const Unit& unit, int first_row, uint2* rests,
                    bool writes_rests)
        : rests_(rests) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int group = params.query_heads / params.kv_heads;
        const int row = first_row + lane / 4;
        const bool exists = row < unit.rows;
        const Unit::Query query = unit.query(exists ? row : 0, group);
        const float* const q =
            params.q +
            (query.row * params.query_heads + unit.kv_head * group + query.head) * head_dim;
#pragma unroll
        for (int i = 0; i < Shape::steps; ++i) {
            std::uint32_t rest[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float2 pair = make_float2(0.0F, 0.0F);
                if (exists)
                    pair = *reinterpret_cast<const float2*>(q + 16 * i +
                                                            Numbers::elementOf(lane % 4, half));
                queries_[i][half] = Product::pack(pair.x, pair.y);
                const float2 rounded = Product::unpack(queries_[i][half]);
                rest[half] = Product::pack(pair.x - rounded.x, pair.y - rounded.y);
            }
            if (Shape::splits_queries && writes_rests)
                rests_[i * warp_size + lane] = make_uint2(rest[0], rest[1]);
        }
        if constexpr (has_offset) sumQueries();
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

    // K of a tile whose first token is `first` of the leaf.
    __device__ void addScores(const AttendParams& params, std::uint32_t tile, std::uint64_t present,
                              int first, const Seen (&seen)[2]) {
        float scores[token_steps][4];
        multiplyKeys(tile, scores);
        if constexpr (Shape::has_scales) multiplyScales(tile, scores);

        // Times log2(e), for powers of two.
        const float factor = params.scale * log2_e;
        if (__builtin_expect(params.softcap != 0.0F, 0))
            cap(params.scale, params.softcap, scores);
        else
#pragma unroll
            for (int t = 0; t < token_steps; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    scores[t][i] *= factor;
        bool all_seen = present == Shape::tile_mask;
#pragma unroll
        for (int e = 0; e < 2; ++e)
            all_seen =
                all_seen && first > seen[e].above && first + Shape::tile_tokens - 1 <= seen[e].last;
        if (__builtin_expect(__all_sync(all_lanes, all_seen) == 0, 0)) {
            const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
            for (int t = 0; t < token_steps; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = 16 * t + 8 * (i / 2) + lane / 4;
                    const bool visible = (present >> token & 1) != 0 &&
                                         first + token > seen[i % 2].above &&
                                         first + token <= seen[i % 2].last;
                    if (!visible) scores[t][i] = empty_lse;
                }
        }
        float base[2];
        raiseTop(scores, base);
        weigh(tile, present, scores, base);
    }

    // V of the tile whose K came last.
    __device__ void addValues(std::uint32_t tile) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int t = 0; t < token_steps; ++t) {
            const int row = 16 * t + lane % 8 + lane / 16 * 8;
#pragma unroll
            for (int pair = 0; pair < chunk_pairs; ++pair) {
                std::uint32_t values[4];
                loadTransposed(values, tile + storedAt(row, 2 * pair + (lane / 8 & 1)));
                if constexpr (Numbers::is_narrow) {
                    std::uint32_t operand[4];
                    Numbers::values(operand, values[0], values[2]);
                    Product::multiply(sums_[2 * pair], operand, weights_[t][0], weights_[t][1]);
                    Numbers::values(operand, values[1], values[3]);
                    Product::multiply(sums_[2 * pair + 1], operand, weights_[t][0], weights_[t][1]);
                } else {
                    Product::multiply(sums_[pair], values, weights_[t][0], weights_[t][1]);
                }
            }
            if constexpr (Numbers::is_narrow && has_odd_chunk) {
                std::uint32_t values[2];
                loadTransposed(values, tile + storedAt(16 * t + lane % 16, Shape::row_chunks - 1));
                std::uint32_t operand[4];
                Numbers::values(operand, values[0], values[1]);
                Product::multiply(sums_[Shape::steps - 1], operand, weights_[t][0], weights_[t][1]);
            }
        }
    }

    // The leaf is over: its states, of which lse goes to lse[row].
    __device__ void finish(float* lse) {
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
            const float divisor =
                Shape::has_scales ? weight_[e] * Numbers::weight_scale : rounded_weight_[e];
            normaliser_[e] = empty ? 0.0F : __fdiv_rn(1.0F, divisor);
            if constexpr (has_offset) rounded_weight_[e] *= Numbers::offset;
            if (lane < 4) lse[row] = empty ? empty_lse : top_[e] * ln_2 + logf(weight_[e]);
        }
    }

    // What out is of the steps from `first` on, to out[row * Shape::exchange_stride ...].
    __device__ void store(int first, float* out) const {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float* const to = out + (lane % 4 * 2 + e) * Shape::exchange_stride;
#pragma unroll
            for (int i = 0; i < Shape::exchange_steps; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (first + i < Shape::steps)
                        to[16 * i + Numbers::outputOf(lane / 4, half)] =
                            withoutOffset(sums_[first + i][2 * half + e], rounded_weight_[e]) *
                            normaliser_[e];
        }
    }

private:
    // Where a chunk of a tile's row lies, in bytes. Rows lie as in the pool: the tile's first
    // position is a multiple of 8.
    static __device__ __forceinline__ std::uint32_t storedAt(int row, int chunk) {
        return static_cast<std::uint32_t>(
            (row * Shape::row_chunks + storedChunk(row, chunk, Shape::row_chunks)) * 16);
    }

    // A sum of products, of which this is the offset's share.
    static __device__ __forceinline__ float withoutOffset(float sum, float share) {
        return has_offset ? sum - share : sum;
    }

    // The sum of a row's rounded queries lies with four threads, for the thread that has its
    // scores.
    __device__ void sumQueries() {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        float sum = 0.0F;
#pragma unroll
        for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 pair = Product::unpack(queries_[i][half]);
                sum += pair.x + pair.y;
            }
        sum += __shfl_xor_sync(all_lanes, sum, 1);
        sum += __shfl_xor_sync(all_lanes, sum, 2);
#pragma unroll
        for (int e = 0; e < 2; ++e)
            query_share_[e] = Numbers::offset * __shfl_sync(all_lanes, sum, (lane % 4 * 2 + e) * 4);
    }

    // With few tokens two sums a score, so that products wait less for each other.
    __device__ void multiplyKeys(std::uint32_t tile, float (&scores)[token_steps][4]) {
        constexpr bool is_short = token_steps < 4;
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        float odd[is_short ? token_steps : 1][4];
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[t][i] = 0.0F;
                if constexpr (is_short) odd[t][i] = 0.0F;
            }
        const auto multiply = [&](int t, int step, const std::uint32_t(&keys)[4],
                                  const uint2& rest) {
            float(&own)[4] = is_short && step % 2 != 0 ? odd[is_short ? t : 0] : scores[t];
            float(&other)[4] = is_short && step % 2 == 0 ? odd[is_short ? t : 0] : scores[t];
            Product::multiply(own, keys, queries_[step][0], queries_[step][1]);
            if constexpr (Shape::splits_queries) Product::multiply(other, keys, rest.x, rest.y);
        };
#pragma unroll
        for (int pair = 0; pair < chunk_pairs; ++pair) {
            uint2 rest{};
            if constexpr (Shape::splits_queries) rest = rests_[pair * warp_size + lane];
#pragma unroll
            for (int t = 0; t < token_steps; ++t) {
                std::uint32_t keys[4];
                loadMatrices(keys, tile + storedAt(16 * t + lane % 16, 2 * pair + lane / 16));
                if constexpr (Numbers::is_narrow) {
                    std::uint32_t operand[4];
                    Numbers::keys(operand, keys[0], keys[1]);
                    multiply(t, 2 * pair, operand, rest);
                    Numbers::keys(operand, keys[2], keys[3]);
                    multiply(t, 2 * pair + 1, operand, rest);
                } else {
                    multiply(t, pair, keys, rest);
                }
            }
        }
        if constexpr (Numbers::is_narrow && has_odd_chunk) {
#pragma unroll
            for (int t = 0; t < token_steps; ++t) {
                std::uint32_t keys[2];
                loadMatrices(keys, tile + storedAt(16 * t + lane % 16, Shape::row_chunks - 1));
                std::uint32_t operand[4];
                Numbers::keys(operand, keys[0], keys[1]);
                multiply(t, Shape::steps - 1, operand, uint2{});
            }
        }
        if constexpr (is_short) {
#pragma unroll
            for (int t = 0; t < token_steps; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    scores[t][i] += odd[t][i];
        }
    }

    // The scale of K of the tile's token `token`, or, `of_values`, of V.
    static __device__ __forceinline__ float scaleOfToken(std::uint32_t tile, int token,
                                                         bool of_values) {
        const int at = Shape::rows_bytes + (of_values ? Shape::scales_bytes : 0) + 2 * token;
        return __half2float(__ushort_as_half(loadShared16(tile + static_cast<std::uint32_t>(at))));
    }

    __device__ void multiplyScales(std::uint32_t tile, float (&scores)[token_steps][4]) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float scale = scaleOfToken(tile, 16 * t + 8 * half + lane / 4, false);
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    scores[t][2 * half + e] =
                        withoutOffset(scores[t][2 * half + e], query_share_[e]) * scale;
            }
    }

    // scores = softcap * tanh(scale * scores / softcap), times log2(e). tanh x = 1 - 2 / (e^2x +
    // 1).
    static __device__ void cap(float scale, float softcap, float (&scores)[token_steps][4]) {
        const float factor = scale / softcap * (2.0F * log2_e);
        const float size = softcap * log2_e;
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
#pragma unroll
            for (float& score : scores[t])
                score = size - __fdividef(2.0F * size, powerOfTwo(score * factor) + 1.0F);
    }

    // The running maximum with these scores; `base` is what scores are counted from.
    __device__ void raiseTop(const float (&scores)[token_steps][4], float (&base)[2]) {
        float factors[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float top = empty_lse;
#pragma unroll
            for (int t = 0; t < token_steps; ++t)
                top = fmaxf(top, fmaxf(scores[t][e], scores[t][2 + e]));
#pragma unroll
            for (int distance = 4; distance < warp_size; distance *= 2)
                top = fmaxf(top, __shfl_xor_sync(all_lanes, top, distance));
            top = fmaxf(top, top_[e]);
            // Without any score yet: -inf minus itself would be NaN.
            base[e] = top == empty_lse ? 0.0F : top;
            factors[e] = powerOfTwo(top_[e] - base[e]);
            top_[e] = top;
        }
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

    // Weights of the scores, and what the products want of them.
    __device__ void weigh(std::uint32_t tile, std::uint64_t present,
                          const float (&scores)[token_steps][4], const float (&base)[2]) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float factor = Numbers::weight_scale;
                if constexpr (Shape::has_scales) {
                    const int token = 16 * t + 8 * half + lane / 4;
                    // The scale of a token that is not there may be anything.
                    factor *= (present >> token & 1) != 0 ? scaleOfToken(tile, token, true) : 0.0F;
                }
                float weights[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    weights[e] = powerOfTwo(scores[t][2 * half + e] - base[e]);
                    weight_[e] += weights[e];
                }
                const std::uint32_t pair = Product::pack(weights[0] * factor, weights[1] * factor);
                if constexpr (!Shape::has_scales || has_offset) {
                    const float2 rounded = Product::unpack(pair);
                    rounded_weight_[0] += rounded.x;
                    rounded_weight_[1] += rounded.y;
                }
                weights_[t][half] = transposed(pair);
            }
    }

    uint2* rests_;
    std::uint32_t queries_[Shape::steps][2];
    std::uint32_t weights_[token_steps][2];
    float sums_[Shape::steps][4];
    float top_[2];             // of the scores times log2(e)
    float weight_[2];          // this thread's share of the sum of weights
    float rounded_weight_[2];  // the same of what the products see, times weight_scale
    float normaliser_[2];      // of the sums
    float query_share_[2];     // of the offset in scores, before their scale
};

}  // namespace kvgrid::cuda
