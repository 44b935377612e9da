// A leaf of 64 query rows, by a warp group: attend_leaf.cuh's arithmetic, with the same bits, by
// Hopper's products of warp groups. Query rows are the rows of the products, 16 a warp, tokens or
// elements of the head dim their columns:
//   scores [rows, tokens] = Q * K^T,    out [rows, head_dim] += weights * V
// Q and weights come from registers, K and V from shared memory, once for all four warps.
#pragma once

#include <utility>

#include "kernels/cuda/attend_leaf.cuh"
#include "kernels/cuda/group_products.cuh"

namespace kvgrid::cuda {

// Shape: TileShape, of parts (has_parts).
template <NumberFormat format, int head_dim, typename Shape>
class GroupLeaf {
    using Product = Products<format>;
    static constexpr int rows = Shape::thread_rows;
    static constexpr int steps = Shape::steps;
    static constexpr int token_steps = Shape::tile_tokens / 16;
    static constexpr int score_parts = Shape::tile_tokens / 8;
    // A tile has tokens for several softmaxes.
    static constexpr int softmax_parts = Shape::softmax_tokens / 8;
    static constexpr int softmax_steps = Shape::softmax_tokens / 16;
    static constexpr int softmaxes = Shape::tile_tokens / Shape::softmax_tokens;
    static constexpr int tile_part_bytes = Shape::tile_tokens * part_bytes;
    static constexpr int rests_part_bytes = Shape::seen_rows * part_bytes;
    static constexpr int part_steps = part_bytes / 32;  // of the head dim's, in a part

public:
    using Sums = float[1][head_dim / 8][4];

    // The queries of the unit's rows from first_row on, zeros where there are none. Their rests lie
    // in shared memory, Shape::rests_bytes of the warp group: registers are scarce.
    __device__ GroupLeaf(const AttendParams& params, const Unit& unit, int first_row,
                         std::uint32_t rests)
        : rests_(rests) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        // The group is done with those of the unit before.
        if constexpr (Shape::splits_queries) syncGroup();
#pragma unroll
        for (int e = 0; e < rows; ++e) {
            const int row = first_row + Shape::rowOf(e);
            const bool exists = row < unit.rows;
            const float* const q =
                params.q + outputRow(params, unit, exists ? row : 0) * head_dim + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < steps; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 pair =
                        exists ? *reinterpret_cast<const float2*>(q + 16 * i + 8 * half)
                               : make_float2(0.0F, 0.0F);
                    const std::uint32_t bits = Product::pack(pair.x, pair.y);
                    queries_[i][e + 2 * half] = bits;
                    if constexpr (Shape::splits_queries) {
                        const float2 rounded = Product::unpack(bits);
                        storeShared(restAt(row % Shape::seen_rows, 2 * i + half) +
                                        static_cast<std::uint32_t>(lane % 4 * 4),
                                    Product::pack(pair.x - rounded.x, pair.y - rounded.y));
                    }
                }
        }
        if constexpr (Shape::splits_queries) {
            fenceAsync();
            syncGroup();
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (auto& part : sums_[0])
#pragma unroll
            for (float& sum : part)
                sum = 0.0F;
#pragma unroll
        for (int e = 0; e < rows; ++e) {
            tops_[e] = RunningTop{};
#pragma unroll
            for (WeightSums& of_columns : weight_sums_[e])
                of_columns = WeightSums{};
        }
    }

    // Takes it from the ring. A tile of which no row of the group sees anything gives weights of 0:
    // it is left out.
    template <typename Seen>
    __device__ __forceinline__ void attend(const AttendParams& params, const Ring& ring,
                                           RingPlace& place, int tokens, const Seen& seen) {
#pragma unroll 1
        for (int first = 0; first < tokens; first += Shape::tile_tokens) {
            const std::uint64_t present = enter(ring, place);
            const bool is_seen = present != 0 && seen.any(first);
            float scores[score_parts][4];
            std::uint32_t weights[token_steps][4];
            if (is_seen) multiplyKeys(ring.tile<Shape>(place.stage), scores);
            leave(ring, place);
            if (is_seen) {
                scale(params, present, first, seen, scores);
                if (raiseTops<0>(scores)) scaleSums();
                weigh<0>(scores, weights);
            }
            enter(ring, place);
            if (is_seen)
                addValues<0>(GroupMatrix(ring.tile<Shape>(place.stage), tile_part_bytes), scores,
                             weights);
            leave(ring, place);
        }
    }

    // The leaf is over: all of out takes the place of its sums; the lse of the warp's row lane % 16
    // is returned.
    __device__ __forceinline__ float finish() {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        float mine = empty_lse;
#pragma unroll
        for (int e = 0; e < rows; ++e) {
            WeightSums sums = weight_sums_[e][0];
            join(sums, weight_sums_[e][1]);
            const float normaliser = RowResult<format>::normaliserOf(sums);
#pragma unroll
            for (auto& part : sums_[0])
#pragma unroll
                for (int j = 2 * e; j < 2 * e + 2; ++j)
                    part[j] = RowResult<format>::outOf(part[j], sums, normaliser);
            const float of_row =
                __shfl_sync(all_lanes, RowResult<format>::lseOf(tops_[e], sums), lane % 8 * 4);
            if (lane / 8 % 2 == e) mine = of_row;
        }
        return mine;
    }

    [[nodiscard]] __device__ Sums& sums() {
        return sums_;
    }

private:
    // Waits for the tile at a place; which of its tokens there are.
    static __device__ __forceinline__ std::uint64_t enter(const Ring& ring,
                                                          const RingPlace& place) {
        waitBarrier(ring.filled(place.stage), place.phase);
        __syncwarp();
        return __shfl_sync(all_lanes,
                           isFirstLane() ? ring.stages[place.stage].present : std::uint64_t{0}, 0);
    }
    // Only products read tiles, and they are over: one thread tells it for its warp.
    static __device__ __forceinline__ void leave(const Ring& ring, RingPlace& place) {
        __syncwarp();
        if (isFirstLane()) arrive(ring.consumed(place.stage));
        place.advance(ring.count);
    }

    static __device__ __forceinline__ void syncGroup() {
        constexpr int threads = 4 * warp_size;
        syncThreads(1 + static_cast<int>(threadIdx.x) / threads, threads);
    }

    // Of a row of the group, eight elements of its rests.
    [[nodiscard]] __device__ __forceinline__ std::uint32_t restAt(int row, int chunk) const {
        constexpr int part_chunks = part_bytes / 16;
        return rests_ + static_cast<std::uint32_t>(
                            chunk / part_chunks * rests_part_bytes + row * part_bytes +
                            storedChunk(row, chunk % part_chunks, part_chunks) * 16);
    }

    // V of a tile, with the weights of softmax number `softmax`, and those behind it, whose weights
    // are worked out while products go on.
    template <int softmax>
    __device__ __forceinline__ void addValues(const GroupMatrix& values,
                                              const float (&scores)[score_parts][4],
                                              std::uint32_t (&weights)[token_steps][4]) {
        beginGroupProducts();
#pragma unroll
        for (int t = softmax * softmax_steps; t < (softmax + 1) * softmax_steps; ++t)
            multiplyGroup<format, true, true>(sums_[0], weights[t],
                                              values.behind(16 * t * part_bytes));
        endGroupProducts();
        if constexpr (softmax + 1 < softmaxes) {
            const bool raised = raiseTops<softmax + 1>(scores);
            weigh<softmax + 1>(scores, weights);
            waitForGroupProducts();
            readSums(sums_[0]);
            if (raised) scaleSums();
            addValues<softmax + 1>(values, scores, weights);
        } else {
            waitForGroupProducts();
            readSums(sums_[0]);
        }
    }

    // As Queries::multiplyKeys: of two sums a score, one has the odd steps, and the rests of the
    // others.
    __device__ __forceinline__ void multiplyKeys(std::uint32_t tile,
                                                 float (&scores)[score_parts][4]) const {
        constexpr bool is_short = Shape::has_two_sums;
        float odd[score_parts][4];
        const GroupMatrix keys(tile, tile_part_bytes);
        const GroupMatrix rests(rests_, rests_part_bytes);
        beginGroupProducts();
        const auto multiply = [&]<int step>(std::integral_constant<int, step>) {
            constexpr auto behind = [](int bytes_of_part) {
                return step / part_steps * bytes_of_part + step % part_steps * 32;
            };
            const std::uint64_t of_keys = keys.behind(behind(tile_part_bytes));
            auto& own = is_short && step % 2 != 0 ? odd : scores;
            [[maybe_unused]] auto& other = is_short && step % 2 == 0 ? odd : scores;
            constexpr bool is_first = step == 0;
            constexpr bool is_first_of_odd = is_short && step == 1 && !Shape::splits_queries;
            multiplyGroup<format, false, !is_first && !is_first_of_odd>(own, queries_[step],
                                                                        of_keys);
            if constexpr (Shape::splits_queries)
                multiplyGroup<!is_short || !is_first>(other, rests.behind(behind(rests_part_bytes)),
                                                      of_keys);
        };
        [&]<int... all>(std::integer_sequence<int, all...>) {
            (multiply(std::integral_constant<int, all>{}), ...);
        }
        (std::make_integer_sequence<int, steps>{});
        endGroupProducts();
        waitForGroupProducts();
        readSums(scores);
        if constexpr (is_short) readSums(odd);
        if constexpr (is_short)
#pragma unroll
            for (int i = 0; i < score_parts; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    scores[i][j] += odd[i][j];
    }

    // Scores of a tile whose first token is `first` of the leaf, as Queries::scoresOf.
    template <typename Seen>
    static __device__ __forceinline__ void scale(const AttendParams& params, std::uint64_t present,
                                                 int first, const Seen& seen,
                                                 float (&scores)[score_parts][4]) {
        const float factor = params.scale * log2_e;
        if (__builtin_expect(params.softcap != 0.0F, 0))
            capScores(params.scale, params.softcap, scores);
        else
#pragma unroll
            for (auto& part : scores)
#pragma unroll
                for (float& score : part)
                    score *= factor;
        if (__builtin_expect(present != Shape::tile_mask || !seen.all(first), 0))
            mask(present, first, seen, scores);
    }

    template <typename Seen>
    static __device__ void mask(std::uint64_t present, int first, const Seen& sees,
                                float (&scores)[score_parts][4]) {
        const auto column = static_cast<int>(readAnew(threadIdx.x) % 4 * 2);
        const SeenTokens seen[rows] = {sees.row(0, 0), sees.row(0, 1)};
#pragma unroll
        for (int i = 0; i < score_parts; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int token = 8 * i + column + j % 2;
                const bool visible = (present >> token & 1) != 0 &&
                                     first + token > seen[j / 2].above &&
                                     first + token <= seen[j / 2].last;
                if (!visible) scores[i][j] = empty_lse;
            }
    }

    // The running maxima with the scores of a softmax; whether some is another now.
    template <int softmax>
    __device__ __forceinline__ bool raiseTops(const float (&scores)[score_parts][4]) {
        bool raised = false;
#pragma unroll
        for (int e = 0; e < rows; ++e) {
            float top = empty_lse;
#pragma unroll
            for (int i = softmax * softmax_parts; i < (softmax + 1) * softmax_parts; ++i)
                top = fmaxf(top, fmaxf(scores[i][2 * e], scores[i][2 * e + 1]));
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2)
                top = fmaxf(top, __shfl_xor_sync(all_lanes, top, distance));
            tops_[e].raise(top);
            raised = raised || tops_[e].factor != 1.0F;
        }
        return __any_sync(all_lanes, raised) != 0;
    }
    // To be counted from the running maxima.
    __device__ __forceinline__ void scaleSums() {
#pragma unroll
        for (auto& part : sums_[0])
#pragma unroll
            for (int j = 0; j < 4; ++j)
                part[j] *= tops_[j / 2].factor;
    }

    // Tokens whose weights a thread of attend_leaf.cuh sums up, those of one place among eight, are
    // here in one column.
    template <int softmax>
    __device__ __forceinline__ void weigh(const float (&scores)[score_parts][4],
                                          std::uint32_t (&rounded_weights)[token_steps][4]) {
        WeightSums of_tokens[rows][2];
#pragma unroll
        for (int i = softmax * softmax_parts; i < (softmax + 1) * softmax_parts; ++i)
#pragma unroll
            for (int e = 0; e < rows; ++e) {
                float weights[2];
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    weights[b] = powerOfTwo(scores[i][2 * e + b] - tops_[e].top);
                    of_tokens[e][b].weight += weights[b];
                }
                const std::uint32_t pair = Product::pack(weights[0] * Product::weight_scale,
                                                         weights[1] * Product::weight_scale);
                const float2 rounded = Product::unpack(pair);
                of_tokens[e][0].rounded += rounded.x;
                of_tokens[e][1].rounded += rounded.y;
                rounded_weights[i / 2][e + 2 * (i % 2)] = pair;
            }
#pragma unroll
        for (int e = 0; e < rows; ++e)
#pragma unroll
            for (int b = 0; b < 2; ++b)
                weight_sums_[e][b].add(tops_[e].factor, of_tokens[e][b]);
    }

    // As WeightSums::join, of which these are two of the eight threads' shares.
    static __device__ __forceinline__ void join(WeightSums& sums, const WeightSums& odd) {
        sums.weight += odd.weight;
        sums.rounded += odd.rounded;
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
            sums.weight += __shfl_xor_sync(all_lanes, sums.weight, distance);
            sums.rounded += __shfl_xor_sync(all_lanes, sums.rounded, distance);
        }
    }

    std::uint32_t rests_;
    std::uint32_t queries_[steps][4];
    Sums sums_;
    RunningTop tops_[rows];
    WeightSums weight_sums_[rows][2];  // of even and odd columns
};

}  // namespace kvgrid::cuda
