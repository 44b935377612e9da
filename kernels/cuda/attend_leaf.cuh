// A leaf: attention of some query tiles, of 8 rows each, over the 256 tokens of a stripe, a tile of
// K and V at a time. Tokens are the rows of the matrix products and query rows their 8 columns:
//   scores [tokens, rows] = K [tokens, head_dim] * Q^T,    out^T [head_dim, rows] += V^T * weights
// with weights rounded to 16 bits, and sums in fp32. Q is rounded to the operands' format
// (attend_operands.cuh); for bf16 what the rounding left out, rounded again, is a second product:
// the errors of a query's 8 bits would add to every score, and take outputs beyond their bound.
// Where K and V have scales, K's is multiplied into the score and V's into the weight. Tiles come
// in order with a running maximum (Milakov and Gimelshein, arXiv 1805.02867).
//
// A column is computed as if it were alone: no choice depends on the other rows of the tile, and a
// token that a row does not see has the weight 0 there. So a row has the same bits in each of the
// kernels that use this, as long as V is finite. Where no row of the query tile sees a token its K
// is masked and its V is 0, so that what memory holds there cannot matter. (A V of a later row's
// own token that is not finite does reach the rows before it, up to a tile of K and V back, or all
// of the 64 rows of a warp group: 0 x infinity.)
//
// A warp computes it alone (Leaf), or four together (attend_team.cuh), or a warp group for 64 rows
// (attend_group.cuh), with the same bits: sums over the tokens of a tile are added to those of the
// tiles before.
#pragma once

#include <limits>

#include "kernels/cuda/attend_fetch.cuh"
#include "kernels/cuda/attend_operands.cuh"

namespace kvgrid::cuda {

// Which tokens of a stripe a row sees: those beyond `above`, up to `last`.
struct SeenTokens {
    int above;
    int last;
};

// Of a row at `position` that sees the positions from first_seen on, in the stripe that begins at
// `begin`.
__device__ __forceinline__ SeenTokens seenOf(std::int64_t position, std::int64_t first_seen,
                                             std::int64_t begin) {
    const std::int64_t last = min(position - begin, std::int64_t{stripe_tokens});
    return {static_cast<int>(max(first_seen - begin - 1, std::int64_t{-1})),
            static_cast<int>(max(last, std::int64_t{-1}))};
}

// What the thread's two rows see of a leaf.
template <typename Shape>
struct RowsSeen {
    SeenTokens rows[2];

    [[nodiscard]] __device__ __forceinline__ bool all(int first) const {
        bool all = true;
#pragma unroll
        for (const SeenTokens& row : rows)
            all = all && first > row.above && first + Shape::tile_tokens - 1 <= row.last;
        return all;
    }
    [[nodiscard]] __device__ __forceinline__ SeenTokens row(int, int e) const {
        return rows[e];
    }
};

// Where the queries of a warp's tiles are: of each the row that the thread loads.
template <int query_tiles>
struct QueryRows {
    const float* rows[query_tiles];  // null where the tile has none

    __device__ __forceinline__ QueryRows(const AttendParams& params, const Unit& unit,
                                         int first_row, int head_dim) {
#pragma unroll
        for (int n = 0; n < query_tiles; ++n) {
            const int row =
                first_row + n * product_rows + static_cast<int>(threadIdx.x) % warp_size / 4;
            const bool exists = row < unit.rows;
            const std::int64_t at = outputRow(params, unit, exists ? row : 0);
            rows[n] = exists ? params.q + at * head_dim : nullptr;
        }
    }
};

// A row's running maximum of the scores times log2(e), from which they are counted. It begins with
// a number: -inf minus itself would be NaN.
struct RunningTop {
    float top = std::numeric_limits<float>::lowest();
    float factor = 0.0F;  // what the sums of the tiles before the last are multiplied with

    // With that of a tile.
    __device__ __forceinline__ void raise(float of_tile) {
        const float raised = fmaxf(of_tile, top);
        factor = powerOfTwo(top - raised);
        top = raised;
    }
};

// Sums of a row's weights: a thread's share, or over all threads.
struct WeightSums {
    float weight = 0.0F;
    float rounded = 0.0F;  // of what the products see, times weight_scale

    __device__ __forceinline__ void add(float factor, const WeightSums& of_tile) {
        weight = weight * factor + of_tile.weight;
        rounded = rounded * factor + of_tile.rounded;
    }
    // From the shares of the row's eight threads.
    __device__ __forceinline__ void join() {
#pragma unroll
        for (int distance = 4; distance < warp_size; distance *= 2) {
            weight += __shfl_xor_sync(all_lanes, weight, distance);
            rounded += __shfl_xor_sync(all_lanes, rounded, distance);
        }
    }
};

// What a row's sums make of it, when all have joined.
template <NumberFormat format>
struct RowResult {
    using Numbers = Operand<format>;
    static constexpr bool has_offset = Numbers::offset != 0.0F;

    // What its sums of weights times V are multiplied with.
    static __device__ __forceinline__ float normaliserOf(const WeightSums& sums) {
        const float divisor =
            Numbers::is_narrow ? sums.weight * Numbers::weight_scale : sums.rounded;
        return sums.weight == 0.0F ? 0.0F : reciprocalOf(divisor);
    }
    // A number of out from such a sum.
    static __device__ __forceinline__ float outOf(float sum, const WeightSums& sums,
                                                  float normaliser) {
        return withoutOffset(sum, sums.rounded * Numbers::offset) * normaliser;
    }
    static __device__ __forceinline__ float lseOf(const RunningTop& top, const WeightSums& sums) {
        constexpr float ln_2 = 0.693147181F;
        return sums.weight == 0.0F ? empty_lse : (top.top + logOfTwo(sums.weight)) * ln_2;
    }
    // A sum of products, of which this is the offset's share.
    static __device__ __forceinline__ float withoutOffset(float sum, float share) {
        return has_offset ? sum - share : sum;
    }
};

inline constexpr float log2_e = 1.44269504F;

// scores = softcap * tanh(scale * scores / softcap), times log2(e). tanh x = 1 - 2 / (e^2x + 1).
template <int parts>
__device__ __forceinline__ void capScores(float scale, float softcap, float (&scores)[parts][4]) {
    const float factor = scale / softcap * (2.0F * log2_e);
    const float size = softcap * log2_e;
#pragma unroll
    for (auto& part : scores)
#pragma unroll
        for (float& score : part)
            score = size - __fdividef(2.0F * size, powerOfTwo(score * factor) + 1.0F);
}

// The queries of a warp's tiles, and what K and V make of them. Of each query tile a thread has the
// rows 2 * (lane % 4) and + 1 of the products, in that order in arrays [2]. What takes a number of
// tiles `used` does nothing for those beyond.
template <NumberFormat format, int head_dim, typename Shape>
class Queries {
    using Numbers = Operand<format>;
    using Product = typename Numbers::Product;
    static constexpr int query_tiles = Shape::query_tiles;
    static constexpr int token_steps = Shape::tile_tokens / 16;
    static constexpr int chunk_pairs = Shape::row_chunks / 2;
    static constexpr bool has_odd_chunk = Shape::row_chunks % 2 != 0;
    static constexpr bool has_offset = RowResult<format>::has_offset;
    static constexpr bool is_short = Shape::has_two_sums;

public:
    // Of a tile: [query tile][16 tokens][2 * half + row], tokens lane / 4 of each half of 8.
    template <int used>
    using Scores = float[used][token_steps][4];
    // Rounded weights, two rows' in one: [query tile][16 tokens][half], as the products want them.
    template <int used>
    using Weights = std::uint32_t[used][token_steps][2];

    // Rows that do not exist are zeros. The rests of bf16 queries are kept in registers
    // (Shape::keeps_rests) or lie at `rests` in shared memory, [query_tiles][steps][32] of 8 bytes:
    // this writes them when `writes_rests`.
    __device__ Queries(const QueryRows<query_tiles>& queries, uint2* rests, bool writes_rests)
        : rests_(rests) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int n = 0; n < query_tiles; ++n) {
            const float* const q = queries.rows[n];
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i) {
                std::uint32_t rest[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float2 pair = make_float2(0.0F, 0.0F);
                    if (q != nullptr)
                        pair = *reinterpret_cast<const float2*>(q + 16 * i +
                                                                Numbers::elementOf(lane % 4, half));
                    queries_[n][i][half] = Product::pack(pair.x, pair.y);
                    const float2 rounded = Product::unpack(queries_[n][i][half]);
                    rest[half] = Product::pack(pair.x - rounded.x, pair.y - rounded.y);
                }
                if constexpr (Shape::splits_queries && Shape::keeps_rests)
                    kept_rests_[n][i] = make_uint2(rest[0], rest[1]);
                else if (Shape::splits_queries && writes_rests)
                    rests_[(n * Shape::steps + i) * warp_size + lane] =
                        make_uint2(rest[0], rest[1]);
            }
            if constexpr (has_offset) sumQueries(n);
        }
    }

    // The scores of a tile of K, times log2(e) for powers of two, -inf where a row does not see a
    // token. The tile's first token is `first` of the leaf. sees.all(first): whether the thread's
    // rows see all of it; sees.row(n, e): what one of them sees.
    template <int used, typename Sees>
    __device__ __forceinline__ void scoresOf(const AttendParams& params, std::uint32_t tile,
                                             std::uint64_t present, int first, const Sees& sees,
                                             Scores<used>& scores) const {
        multiplyKeys<used>(tile, scores);
        if constexpr (Shape::has_scales) multiplyScales<used>(tile, scores);

        const float factor = params.scale * log2_e;
        if (__builtin_expect(params.softcap != 0.0F, 0))
#pragma unroll
            for (int n = 0; n < used; ++n)
                capScores(params.scale, params.softcap, scores[n]);
        else
#pragma unroll
            for (int n = 0; n < used; ++n)
#pragma unroll
                for (int t = 0; t < token_steps; ++t)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        scores[n][t][i] *= factor;
        const bool all_seen = present == Shape::tile_mask && sees.all(first);
        if (__builtin_expect(__all_sync(all_lanes, all_seen) == 0, 0)) {
            const auto lane = static_cast<int>(readAnew(threadIdx.x) % warp_size);
#pragma unroll
            for (int n = 0; n < used; ++n) {
                const SeenTokens seen[2] = {sees.row(n, 0), sees.row(n, 1)};
#pragma unroll
                for (int t = 0; t < token_steps; ++t)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int token = 16 * t + 8 * (i / 2) + lane / 4;
                        const bool visible = (present >> token & 1) != 0 &&
                                             first + token > seen[i % 2].above &&
                                             first + token <= seen[i % 2].last;
                        if (!visible) scores[n][t][i] = empty_lse;
                    }
            }
        }
    }

    // Of a tile's scores, the greatest of the thread's row e of query tile n.
    template <int used>
    static __device__ __forceinline__ float topOf(const Scores<used>& scores, int n, int e) {
        float top = empty_lse;
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
            top = fmaxf(top, fmaxf(scores[n][t][e], scores[n][t][2 + e]));
#pragma unroll
        for (int distance = 4; distance < warp_size; distance *= 2)
            top = fmaxf(top, __shfl_xor_sync(all_lanes, top, distance));
        return top;
    }

    // The weights of scores, counted from `base`, and the thread's sums of them. `tile` is that of
    // K.
    template <int used>
    static __device__ __forceinline__ void weigh(std::uint32_t tile, std::uint64_t present,
                                                 const Scores<used>& scores,
                                                 const float (&base)[used][2],
                                                 Weights<used>& weights,
                                                 WeightSums (&sums)[used][2]) {
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
#pragma unroll
                for (int n = 0; n < used; ++n) {
                    float of_rows[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        of_rows[e] = powerOfTwo(scores[n][t][2 * half + e] - base[n][e]);
                        sums[n][e].weight += of_rows[e];
                    }
                    const std::uint32_t pair =
                        Product::pack(of_rows[0] * factor, of_rows[1] * factor);
                    if constexpr (!Shape::has_scales || has_offset) {
                        const float2 rounded = Product::unpack(pair);
                        sums[n][0].rounded += rounded.x;
                        sums[n][1].rounded += rounded.y;
                    }
                    weights[n][t][half] = transposed(pair);
                }
            }
    }

    // Where a chunk of a tile's row lies, in bytes. Rows lie as in the pool: the tile's first
    // position is a multiple of 8.
    static __device__ __forceinline__ std::uint32_t storedAt(int row, int chunk) {
        return static_cast<std::uint32_t>(
            (row * Shape::row_chunks + storedChunk(row, chunk, Shape::row_chunks)) * 16);
    }

    // From the address of a row's chunk 0 or 1 to that of the chunk 2 * pair behind it. Tiles are
    // aligned so that the permutation of chunks is one of address bits: few addresses serve all.
    static __device__ __forceinline__ std::uint32_t pairBehind(std::uint32_t address, int pair) {
        constexpr int permuted = storedChunk(7, 0, Shape::row_chunks) + 1;  // chunks, 1 to 8
        constexpr int pairs = permuted > 1 ? permuted / 2 : 1;
        static_assert(pairs == 1 || (Shape::row_bytes % (16 * permuted) == 0 &&
                                     Shape::tile_bytes % (16 * permuted) == 0));
        return (address ^ static_cast<std::uint32_t>(pair % pairs * 32)) +
               static_cast<std::uint32_t>(pair / pairs * pairs * 32);
    }

private:
    // The sum of a row's rounded queries lies with four threads, for the thread that has its
    // scores.
    __device__ void sumQueries(int n) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        float sum = 0.0F;
#pragma unroll
        for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 pair = Product::unpack(queries_[n][i][half]);
                sum += pair.x + pair.y;
            }
        sum += __shfl_xor_sync(all_lanes, sum, 1);
        sum += __shfl_xor_sync(all_lanes, sum, 2);
#pragma unroll
        for (int e = 0; e < 2; ++e)
            query_share_[n][e] =
                Numbers::offset * __shfl_sync(all_lanes, sum, (lane % 4 * 2 + e) * 4);
    }

    template <int used>
    __device__ void multiplyKeys(std::uint32_t tile, Scores<used>& scores) const {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const std::uint32_t first = tile + storedAt(lane % 16, lane / 16);
        float odd[used][is_short ? token_steps : 1][4];
#pragma unroll
        for (int n = 0; n < used; ++n)
#pragma unroll
            for (int t = 0; t < token_steps; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    scores[n][t][i] = 0.0F;
                    if constexpr (is_short) odd[n][t][i] = 0.0F;
                }
        const auto multiply = [&](int t, int step, const std::uint32_t(&keys)[4],
                                  const uint2(&rests)[used]) {
#pragma unroll
            for (int n = 0; n < used; ++n) {
                float(&own)[4] =
                    is_short && step % 2 != 0 ? odd[n][is_short ? t : 0] : scores[n][t];
                float(&other)[4] =
                    is_short && step % 2 == 0 ? odd[n][is_short ? t : 0] : scores[n][t];
                Product::multiply(own, keys, queries_[n][step][0], queries_[n][step][1]);
                if constexpr (Shape::splits_queries)
                    Product::multiply(other, keys, rests[n].x, rests[n].y);
            }
        };
        static_assert(used == 1 || !is_short || !has_odd_chunk);
        const auto join = [&](int t) {
            if constexpr (is_short)
#pragma unroll
                for (int n = 0; n < used; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        scores[n][t][i] += odd[n][t][i];
        };
        // Of one query tile the products of all tokens take turns, of several those of 16 tokens:
        // enough that wait for each other little, and fewer sums at a time.
        uint2 rests[used]{};
#pragma unroll
        for (int i = 0; i < token_steps * chunk_pairs; ++i) {
            const int pair = used == 1 ? i / token_steps : i % chunk_pairs;
            const int t = used == 1 ? i % token_steps : i / chunk_pairs;
            if (Shape::splits_queries && (used > 1 || t == 0))
#pragma unroll
                for (int n = 0; n < used; ++n)
                    rests[n] = Shape::keeps_rests
                                   ? kept_rests_[n][Shape::keeps_rests ? pair : 0]
                                   : rests_[(n * Shape::steps + pair) * warp_size + lane];
            std::uint32_t keys[4];
            loadMatrices(keys, pairBehind(first, pair) + 16 * t * Shape::row_bytes);
            if constexpr (Numbers::is_narrow) {
                std::uint32_t operand[4];
                Numbers::keys(operand, keys[0], keys[1]);
                multiply(t, 2 * pair, operand, rests);
                Numbers::keys(operand, keys[2], keys[3]);
                multiply(t, 2 * pair + 1, operand, rests);
            } else {
                multiply(t, pair, keys, rests);
            }
            if (used > 1 && pair + 1 == chunk_pairs) join(t);
        }
        if constexpr (Numbers::is_narrow && has_odd_chunk) {
            const uint2 none[used]{};
#pragma unroll
            for (int t = 0; t < token_steps; ++t) {
                std::uint32_t keys[2];
                loadMatrices(keys, tile + storedAt(16 * t + lane % 16, Shape::row_chunks - 1));
                std::uint32_t operand[4];
                Numbers::keys(operand, keys[0], keys[1]);
                multiply(t, Shape::steps - 1, operand, none);
            }
        }
        if constexpr (used == 1)
#pragma unroll
            for (int t = 0; t < token_steps; ++t)
                join(t);
    }

    // The scale of K of the tile's token `token`, or, `of_values`, of V.
    static __device__ __forceinline__ float scaleOfToken(std::uint32_t tile, int token,
                                                         bool of_values) {
        const int at = Shape::rows_bytes + (of_values ? Shape::scales_bytes : 0) + 2 * token;
        return __half2float(__ushort_as_half(loadShared16(tile + static_cast<std::uint32_t>(at))));
    }

    template <int used>
    __device__ void multiplyScales(std::uint32_t tile, Scores<used>& scores) const {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int t = 0; t < token_steps; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float scale = scaleOfToken(tile, 16 * t + 8 * half + lane / 4, false);
#pragma unroll
                for (int n = 0; n < used; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& score = scores[n][t][2 * half + e];
                        score = RowResult<format>::withoutOffset(score, query_share_[n][e]) * scale;
                    }
            }
    }

    static constexpr int kept_steps =
        Shape::splits_queries && Shape::keeps_rests ? Shape::steps : 1;

    uint2* rests_;
    uint2 kept_rests_[query_tiles][kept_steps];
    std::uint32_t queries_[query_tiles][Shape::steps][2];
    float query_share_[query_tiles][2];  // of the offset in scores, before their scale
};

// A warp's state of one leaf: of the rows that a thread has, the elements Operand::outputOf(lane /
// 4, half) of each step's 16: sums[n][i][0] and [1] of half 0, [2] and [3] of half 1.
template <NumberFormat format, int head_dim, typename Shape>
class Leaf {
    using Numbers = Operand<format>;
    using Product = typename Numbers::Product;
    using OfQueries = Queries<format, head_dim, Shape>;
    static constexpr int query_tiles = Shape::query_tiles;
    static constexpr int token_steps = Shape::tile_tokens / 16;
    static constexpr int chunk_pairs = Shape::row_chunks / 2;
    static constexpr bool has_odd_chunk = Shape::row_chunks % 2 != 0;

public:
    // As of Queries.
    __device__ Leaf(const QueryRows<query_tiles>& queries, uint2* rests, bool writes_rests)
        : queries_(queries, rests, writes_rests) {}

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < query_tiles; ++n) {
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
                for (float& sum : sums_[n][i])
                    sum = 0.0F;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                tops_[n][e] = RunningTop{};
                weight_sums_[n][e] = WeightSums{};
            }
        }
    }

    // K of a tile, as Queries::scoresOf takes it.
    template <int used, typename Sees>
    __device__ void addScores(const AttendParams& params, std::uint32_t tile, std::uint64_t present,
                              int first, const Sees& sees) {
        typename OfQueries::template Scores<used> scores;
        queries_.template scoresOf<used>(params, tile, present, first, sees, scores);
        raiseTops<used>(scores);
        float base[used][2];
        WeightSums of_tile[used][2];
#pragma unroll
        for (int n = 0; n < used; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                base[n][e] = tops_[n][e].top;
        typename OfQueries::template Weights<used> weights;
        OfQueries::template weigh<used>(tile, present, scores, base, weights, of_tile);
#pragma unroll
        for (int n = 0; n < used; ++n) {
#pragma unroll
            for (int t = 0; t < token_steps; ++t)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    weights_[n][t][half] = weights[n][t][half];
#pragma unroll
            for (int e = 0; e < 2; ++e)
                weight_sums_[n][e].add(tops_[n][e].factor, of_tile[n][e]);
        }
    }

    // V of the tile whose K came last.
    template <int used>
    __device__ void addValues(std::uint32_t tile) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const std::uint32_t first =
            tile + OfQueries::storedAt(lane % 8 + lane / 16 * 8, lane / 8 & 1);
        const auto add = [&](int t, int step, const std::uint32_t(&operand)[4]) {
#pragma unroll
            for (int n = 0; n < used; ++n)
                Product::multiply(sums_[n][step], operand, weights_[n][t][0], weights_[n][t][1]);
        };
#pragma unroll
        for (int t = 0; t < token_steps; ++t) {
#pragma unroll
            for (int pair = 0; pair < chunk_pairs; ++pair) {
                std::uint32_t values[4];
                loadTransposed(values,
                               OfQueries::pairBehind(first, pair) + 16 * t * Shape::row_bytes);
                if constexpr (Numbers::is_narrow) {
                    std::uint32_t operand[4];
                    Numbers::values(operand, values[0], values[2]);
                    add(t, 2 * pair, operand);
                    Numbers::values(operand, values[1], values[3]);
                    add(t, 2 * pair + 1, operand);
                } else {
                    add(t, pair, values);
                }
            }
            if constexpr (Numbers::is_narrow && has_odd_chunk) {
                std::uint32_t values[2];
                loadTransposed(
                    values, tile + OfQueries::storedAt(16 * t + lane % 16, Shape::row_chunks - 1));
                std::uint32_t operand[4];
                Numbers::values(operand, values[0], values[1]);
                add(t, Shape::steps - 1, operand);
            }
        }
    }

    // The leaf is over.
    __device__ void finish() {
#pragma unroll
        for (int n = 0; n < query_tiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                weight_sums_[n][e].join();
                normaliser_[n][e] = RowResult<format>::normaliserOf(weight_sums_[n][e]);
            }
    }

    // Of its states, then, of the thread's row e of tile n: lse, and a number of out.
    [[nodiscard]] __device__ float lse(int n, int e) const {
        return RowResult<format>::lseOf(tops_[n][e], weight_sums_[n][e]);
    }
    [[nodiscard]] __device__ float out(int n, int step, int half, int e) const {
        return RowResult<format>::outOf(sums_[n][step][2 * half + e], weight_sums_[n][e],
                                        normaliser_[n][e]);
    }

    // All of out takes the place of its sums; the lse of row lane % (8 * query_tiles) is returned.
    __device__ float normalise() {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        float mine = empty_lse;
#pragma unroll
        for (int n = 0; n < query_tiles; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float of_row = __shfl_sync(all_lanes, lse(n, e), lane % product_rows / 2);
                if (lane / product_rows % query_tiles == n && lane % 2 == e) mine = of_row;
            }
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    sums_[n][i][j] = out(n, i, j / 2, j % 2);
        }
        return mine;
    }
    // The thread's numbers, [query tile][step][2 * half + e].
    using Sums = float[Shape::query_tiles][Shape::steps][4];
    [[nodiscard]] __device__ Sums& sums() {
        return sums_;
    }

    // Of a shape with one query tile: what out is of the steps from `first` on, to
    // to[row * Shape::exchange_stride ...].
    __device__ void store(int first, float* to) const {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float* const to_row = to + (lane % 4 * 2 + e) * Shape::exchange_stride;
#pragma unroll
            for (int i = 0; i < Shape::exchange_steps; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (first + i < Shape::steps)
                        to_row[16 * i + Numbers::outputOf(lane / 4, half)] =
                            out(0, first + i, half, e);
        }
    }

private:
    // The running maxima with these scores, and all that was summed up before counted from them.
    template <int used>
    __device__ void raiseTops(const typename OfQueries::template Scores<used>& scores) {
        bool raised = false;
#pragma unroll
        for (int n = 0; n < used; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                tops_[n][e].raise(OfQueries::template topOf<used>(scores, n, e));
                raised = raised || tops_[n][e].factor != 1.0F;
            }
        // Multiplying by 1 changes nothing, and seldom is it anything else.
        if (__builtin_expect(__any_sync(all_lanes, raised) == 0, 1)) return;
#pragma unroll
        for (int n = 0; n < used; ++n)
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    sums_[n][i][j] *= tops_[n][j % 2].factor;
    }

    OfQueries queries_;
    typename OfQueries::template Weights<query_tiles> weights_;
    float sums_[query_tiles][Shape::steps][4];
    RunningTop tops_[query_tiles][2];
    WeightSums weight_sums_[query_tiles][2];  // the thread's share
    float normaliser_[query_tiles][2];        // of the sums
};

}  // namespace kvgrid::cuda
