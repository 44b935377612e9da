// How K and V come into shared memory, ahead of the arithmetic: warps that do nothing else keep
// tiles coming into rings, one each. From sm_90 on rows that lie behind each other come as one bulk
// copy, or, in parts, as boxes of the copy engine; before, 16 bytes a thread.
#pragma once

#include "kernels/cuda/attend_schedule.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/paging.h"

namespace kvgrid::cuda {

// Sizes of a tile, that follow from the format and the head dim.
template <NumberFormat format, int head_dim, int tokens = 0>
struct TileShape {
    static constexpr bool has_scales = scaleBytes(format, 1) != 0;
    static constexpr int row_bytes = head_dim * static_cast<int>(bytesPerElement(format));
    static constexpr int row_chunks = row_bytes / 16;
    // Tokens whose weights are counted from one maximum (attend_leaf.cuh). Mostly a tile has as
    // many: copies of up to 8 KB, of which eight warps can have two under way each.
    static constexpr int softmax_tokens = row_bytes <= 128 ? 64 : row_bytes <= 256 ? 32 : 16;
    static constexpr int tile_tokens = tokens > 0 ? tokens : softmax_tokens;
    // With so few a score is made of two sums, so that products wait less for each other.
    static constexpr bool has_two_sums = softmax_tokens < 64;
    static constexpr std::uint64_t tile_mask = ~std::uint64_t{0} >> (64 - tile_tokens);
    static constexpr int steps = head_dim / 16;  // of a product over the head dim
    // A stage of the ring: rows, then, in that of K, the scales of K and of V.
    static constexpr int rows_bytes = tile_tokens * row_bytes;
    static constexpr int scales_bytes = has_scales ? 2 * tile_tokens : 0;
    static constexpr int tile_bytes = rows_bytes + 2 * scales_bytes;
    static constexpr int stage_bytes = tile_bytes + 24;  // of a ring
    // Queries have rests: what rounding left out of them, as the products want it.
    static constexpr bool splits_queries = format == NumberFormat::bf16;
    // Whether a tile's rows lie in parts of 128 bytes, the first parts of all rows first, as
    // products of warp groups want them (attend_group.cuh), or as in the pool.
    static constexpr bool has_parts = false;
    // Of a unit queue: the units and their two barriers.
    static constexpr int queue_bytes = queue_slots * (static_cast<int>(sizeof(Unit)) + 16);
};

// Of attend_kernel: sizes that follow from that, and from for how many tiles of 8 query rows it has
// warps.
template <NumberFormat format, int head_dim, int row_tiles>
struct AttendShape : TileShape<format, head_dim> {
    using Tile = TileShape<format, head_dim>;
    static constexpr int team_threads = attend_warps * warp_size;
    static constexpr int computing_threads = row_tiles * team_threads;
    static constexpr int threads = computing_threads + attend_warps * warp_size;
    static constexpr int tile_rows = product_rows * row_tiles;
    static constexpr int query_tiles = 1;  // of 8 rows, of a warp
    static constexpr int rings = attend_warps;
    // Of a thread at the barrier of a stage that its row tile's warps read alone; all else count
    // one.
    static constexpr int arrivals = attend_warps;
    static constexpr bool keeps_rests = false;  // in registers: they lie in shared memory
    static constexpr int rests_bytes =
        Tile::splits_queries ? row_tiles * Tile::steps * warp_size * 8 : 0;

    // The states of leaves by warps on their way into the fold, the elements of some steps at a
    // time. Rows are 4 numbers longer, so that the threads of a warp write to different banks.
    static constexpr int exchange_steps = Tile::steps < 4 ? Tile::steps : 4;
    static constexpr int exchange_stride = 16 * exchange_steps + 4;
    static constexpr int exchange_numbers = attend_warps * tile_rows * (exchange_stride + 1);
    // What the warps of a team tell each other of a leaf (attend_team.cuh). Tiles of few tokens, of
    // long rows, would make much of that; with numbers of 8 bits long launches were up to 3 %
    // slower where the kernel has both ways.
    static constexpr bool has_teams = Tile::tile_tokens > 16 && !Tile::has_scales;
    static constexpr int leaf_tiles = stripe_tokens / Tile::tile_tokens;
    static constexpr int weights_bytes = stripe_tokens / 16 * warp_size * 8;
    static constexpr int sums_bytes = leaf_tiles * warp_size * 16;
    static constexpr int tops_bytes = leaf_tiles * product_rows * 4;
    static constexpr int team_bytes = has_teams ? weights_bytes + sums_bytes + tops_bytes : 0;
    // Either the one or the other.
    static constexpr int scratch_bytes =
        4 * exchange_numbers > row_tiles* team_bytes ? 4 * exchange_numbers : row_tiles* team_bytes;
    static_assert(scratch_bytes % 16 == 0 && team_bytes % 16 == 0);
    // Levels of a unit's fold that are kept in registers; deeper ones are in local memory.
    static constexpr int register_levels = head_dim > 128 ? 0 : 3;

    // From sm_90 on. One's arithmetic, folds and waits at barriers pass while memory serves the
    // other.
    static constexpr int blocks_per_multiprocessor = row_tiles == 1 ? 2 : 1;
    // Registers of a thread that computes and of one that fetches. The launch gives all the same.
    static constexpr int computing_registers = row_tiles == 1 ? 176 : 208;
    static constexpr int fetching_registers = row_tiles == 1 ? 80 : 88;

    static constexpr int sharedBytes(int stages) {
        return rings * stages * Tile::stage_bytes + scratch_bytes + rests_bytes +
               Tile::queue_bytes + 16;
    }
};

// Of a stage of a ring: the barriers that it has come and that the warps that compute have done
// with it, and which tokens of the tile there are. All threads that fill a stage arrive at its
// barrier, and all that have read it: each orders its own accesses. Of warps whose products alone
// read tiles, one thread does.
struct Stage {
    std::uint64_t filled;
    std::uint64_t consumed;
    std::uint64_t present;
};

// Stages that are filled in turn.
struct Ring {
    std::uint32_t tiles;
    Stage* stages;  // [count]
    int count;

    [[nodiscard]] __device__ __forceinline__ std::uint32_t filled(int stage) const {
        return sharedAddress(&stages[stage].filled);
    }
    [[nodiscard]] __device__ __forceinline__ std::uint32_t consumed(int stage) const {
        return sharedAddress(&stages[stage].consumed);
    }
    template <typename Shape>
    [[nodiscard]] __device__ __forceinline__ std::uint32_t tile(int stage) const {
        return tiles + static_cast<std::uint32_t>(stage * Shape::tile_bytes);
    }
};

// A place in a ring, from stage to stage.
struct RingPlace {
    int stage = 0;
    unsigned phase = 0;  // of the stage's barriers

    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// The way of a leaf of so many tokens through the ring, by a warp that computes: use(part, first,
// tile, present) of each tile of which there is something, K (part 0) and then V of the tokens from
// `first` of the leaf on.
template <typename Shape, typename Use>
__device__ __forceinline__ void takeLeaf(const Ring& ring, RingPlace& place, int tokens,
                                         const Use& use) {
#pragma unroll 1
    for (int first = 0; first < tokens; first += Shape::tile_tokens) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            waitBarrier(ring.filled(place.stage), place.phase);
            __syncwarp();
            const std::uint64_t present = ring.stages[place.stage].present;
            if (present != 0) use(part, first, ring.tile<Shape>(place.stage), present);
            arrive(ring.consumed(place.stage), Shape::arrivals);
            place.advance(ring.count);
        }
    }
}

// The units of a block of threads, from the warp that takes them to all that work on them. A slot
// is filled again when all have done with it.
struct UnitQueue {
    Unit* units;           // [queue_slots] in shared memory; rows = 0: there are no more
    std::uint32_t filled;  // barriers, [queue_slots]
    std::uint32_t read;
};

// One warp's way through the queue. Units stay there while they are worked on, not in registers.
class QueueReader {
public:
    __device__ explicit QueueReader(const UnitQueue& queue) : queue_(queue) {}

    // The next unit; null after the last.
    __device__ __forceinline__ const Unit* next() {
        waitBarrier(queue_.filled + static_cast<std::uint32_t>(place_.stage * 8), place_.phase);
        __syncwarp();
        const Unit* const unit = queue_.units + place_.stage;
        return unit->rows > 0 ? unit : nullptr;
    }
    // Done with it.
    __device__ __forceinline__ void release() {
        arrive(queue_.read + static_cast<std::uint32_t>(place_.stage * 8));
        place_.advance(queue_slots);
    }

private:
    UnitQueue queue_;
    RingPlace place_;
};

// Of the warp that takes units.
class QueueWriter {
public:
    __device__ QueueWriter(const UnitDeal& deal, const UnitQueue& queue)
        : deal_(deal),
          queue_(queue) {}

    __device__ void add() {
        constexpr int words = sizeof(Unit) / sizeof(uint4);
        static_assert(words <= warp_size);
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        unsigned long long from = 0;
        if (lane == 0) from = reinterpret_cast<unsigned long long>(deal_.next());
        from = __shfl_sync(all_lanes, from, 0);
        waitBarrier(queue_.read + static_cast<std::uint32_t>(place_.stage * 8), place_.phase ^ 1);
        __syncwarp();
        Unit* const to = queue_.units + place_.stage;
        if (from == 0)
            to->rows = 0;
        else if (lane < words)
            reinterpret_cast<uint4*>(to)[lane] = reinterpret_cast<const uint4*>(from)[lane];
        arrive(queue_.filled + static_cast<std::uint32_t>(place_.stage * 8));
        place_.advance(queue_slots);
    }

private:
    UnitDeal deal_;
    UnitQueue queue_;
    RingPlace place_;
};

// Of a leaf that a team computes: how many of its tiles come through each ring, of K and of V;
// those of the last may be empty. Tile number n comes through ring n % rings.
template <typename Shape>
__device__ __forceinline__ int tilesOfRing(int tokens) {
    constexpr int ring_tokens = Shape::rings * Shape::tile_tokens;
    return (tokens + ring_tokens - 1) / ring_tokens;
}

// Fetches the tiles that come through a ring, in the order in which they will be wanted, by one
// warp; that of the first ring takes the units. Where teams compute leaves, of each leaf the ring's
// tiles, all of K first; else all tiles of every leaf that is the ring's, K and V in turn.
template <typename Shape>
class TileFetcher {
public:
    __device__ TileFetcher(const AttendLaunch& launch, const UnitDeal& deal, int ring_number,
                           const Ring& ring, const UnitQueue& queue)
        : params_(launch.params),
          writer_(deal, queue),
          reader_(queue),
          ring_number_(ring_number),
          boxes_(launch.boxes),
          whole_tiles_(!Shape::has_parts && launch.params.pool.token_stride == Shape::row_bytes &&
                       launch.params.pool.block_size % Shape::tile_tokens == 0),
          ring_(ring) {}

    __device__ void run() {
        while (true) {
            if (ring_number_ == 0) writer_.add();
            const Unit* const unit = reader_.next();
            if (unit == nullptr) return;
            by_team_ = Shape::rings > 1 && unit->by_team != 0;
            const int step = by_team_ ? 1 : Shape::rings;
            for (std::int64_t leaf = by_team_ ? 0 : ring_number_; leaf >> unit->leaf_bits == 0;
                 leaf += step) {
                const std::int64_t stripe =
                    unit->stripeAt(unit->first_leaf + leaf, params_.context_ranks);
                if (unit->sees(stripe)) fetchLeaf(*unit, stripe);
            }
            reader_.release();
        }
    }

private:
    // A box's place in the pool.
    struct BoxPlace {
        int of_token;  // of token_rows
        int token;
    };

    // One leaf on its way in. What a lane holds of it is of its tile number `lane`, where a tile is
    // one run of memory, else of the leaf's block number `lane`.
    struct LeafSource {
        int kv_head;
        int skip;                 // tokens before the first that is seen
        int tokens;               // of the leaf, up to the tile's last position
        std::int32_t slot;        // of the block table
        std::int64_t logical;     // block of the leaf's first token
        std::int64_t within;      // its place there
        std::int64_t block;       // the lane's
        const std::byte* source;  // K of the lane's tile
        const std::byte* scales;  // of K of the lane's tile
        int rows;                 // of it that there are
        bool is_in_boxes;         // the leaf is whole, and all lanes have a box or none
        BoxPlace keys;            // the lane's box, number `lane` of the leaf
        BoxPlace values;
    };

    __device__ void fetchLeaf(const Unit& unit, std::int64_t stripe) {
        findLeaf(unit, stripe);
        // The launch before may still be writing tokens of this step.
        if ((stripe + 1) * stripe_tokens > unit.first_position) waitForLaunchBefore();
        const int tiles = by_team_ ? tilesOfRing<Shape>(leaf_.tokens)
                                   : (leaf_.tokens + Shape::tile_tokens - 1) / Shape::tile_tokens;
        for (int i = 0; i < 2 * tiles; ++i) {
            is_value_ = by_team_ ? i >= tiles : i % 2 != 0;
            tile_ = by_team_ ? (is_value_ ? i - tiles : i) * Shape::rings + ring_number_ : i / 2;
            // At first all are free.
            waitBarrier(ring_.consumed(place_.stage), place_.phase ^ 1);
            __syncwarp();
            if (whole_tiles_)
                fetchWholeTile();
            else if (leaf_.is_in_boxes)
                fetchBoxes();
            else
                fetchTile();
            place_.advance(ring_.count);
        }
    }

    __device__ void findLeaf(const Unit& unit, std::int64_t stripe) {
        const PoolView& pool = params_.pool;
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const std::int64_t position = stripe * stripe_tokens;
        leaf_.kv_head = unit.kv_head;
        leaf_.skip = static_cast<int>(max(unit.first_seen - position, std::int64_t{0}));
        leaf_.slot = unit.slot;
        leaf_.logical = divide(position, pool.block_size);
        leaf_.within = position - leaf_.logical * pool.block_size;
        leaf_.tokens = unit.tokensOf(stripe);
        leaf_.is_in_boxes = false;
#if __CUDA_ARCH__ >= 900
        // Read once, it must not drive out code, tables and states. Tiles of one KV head read it
        // together.
        policy_ = unit.shape.tiles == 1 ? evictFirst() : evictNormally();
#endif
        int before = lane;
        const int token = lane * Shape::tile_tokens;
        if (whole_tiles_) {
            leaf_.rows = min(max(leaf_.tokens - token, 0), Shape::tile_tokens);
            before = leaf_.rows > 0 ? blocksBefore(token) : 0;
        }
        leaf_.block = no_block;
        if (before <= blocksBefore(leaf_.tokens - 1))
            leaf_.block =
                findBlock(params_.tables, leaf_.slot, leaf_.logical + before, pool.max_num_blocks);
        if constexpr (Shape::has_parts) findBoxes();
        if (!whole_tiles_) return;
        if (leaf_.block == no_block) {
            leaf_.rows = 0;
            return;
        }
        const std::int64_t offset = leaf_.within + token - before * pool.block_size;
        leaf_.source = keyRow(pool, params_.layer, leaf_.block, leaf_.kv_head, offset);
        if constexpr (Shape::has_scales)
            leaf_.scales = keyScale(pool, params_.layer, leaf_.block, leaf_.kv_head, offset);
    }

    [[nodiscard]] __device__ std::uint32_t stageTile() const {
        return ring_.tile<Shape>(place_.stage);
    }
    [[nodiscard]] __device__ std::uint32_t stageBarrier() const {
        return ring_.filled(place_.stage);
    }

    // Which of the first tokens of a tile come before `end`.
    static __device__ __forceinline__ std::uint64_t tokensBefore(int end) {
        return end >= Shape::tile_tokens ? Shape::tile_mask : (std::uint64_t{1} << end) - 1;
    }

    // Of a tile that lies in one run. Tokens past the end are the last rows, tokens that nobody
    // sees any more the first.
    __device__ __forceinline__ void fetchWholeTile() {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int rows = __shfl_sync(all_lanes, leaf_.rows, tile_);
        const auto address =
            __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(leaf_.source), tile_);
        const std::byte* const source = reinterpret_cast<const std::byte*>(address) +
                                        (is_value_ ? params_.pool.value_offset : 0);
        const int skip = min(max(leaf_.skip - tile_ * Shape::tile_tokens, 0), rows);
        const int count = rows - skip;
        const std::uint64_t present = tokensBefore(rows) & ~tokensBefore(skip);
        const std::uint32_t to = stageTile();
        const std::byte* scales = nullptr;
        if constexpr (Shape::has_scales)
            scales = reinterpret_cast<const std::byte*>(
                __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(leaf_.scales), tile_));
#if __CUDA_ARCH__ >= 900
        if (__builtin_expect(count != Shape::tile_tokens && count != 0 && is_value_, 0))
            clearRows(to, present);
        if (lane == 0) {
            ring_.stages[place_.stage].present = present;
            const std::uint32_t barrier = stageBarrier();
            const bool with_scales = Shape::has_scales && !is_value_ && count != 0;
            // Scales of 8 tokens at a time.
            const int scales_bytes = with_scales ? (rows + 7) / 8 * 16 : 0;
            expectBytes(barrier, count * Shape::row_bytes + 2 * scales_bytes);
            if (count != 0)
                copyBulk(to + static_cast<std::uint32_t>(skip * Shape::row_bytes),
                         source + skip * Shape::row_bytes, count * Shape::row_bytes, barrier,
                         policy_);
            if (with_scales) {
                copyBulk(to + Shape::rows_bytes, scales, scales_bytes, barrier, policy_);
                copyBulk(to + Shape::rows_bytes + Shape::scales_bytes,
                         scales + params_.pool.value_offset, scales_bytes, barrier, policy_);
            }
        } else {
            arrive(stageBarrier());
        }
#else
        if (lane == 0) ring_.stages[place_.stage].present = present;
        constexpr int copies = Shape::tile_tokens * Shape::row_chunks / warp_size;
#pragma unroll 4
        for (int i = 0; i < copies && count != 0; ++i) {
            const int index = i * warp_size + lane;
            const int row = index / Shape::row_chunks;
            const bool there = row >= skip && row < rows;
            copyAsync(to + static_cast<std::uint32_t>(index * 16),
                      there ? source + index * 16 : source, there ? 16 : 0);
        }
        if constexpr (Shape::has_scales) {
            constexpr int scale_chunks = Shape::scales_bytes / 16;
            for (int chunk = lane; chunk < 2 * scale_chunks && !is_value_; chunk += warp_size) {
                const int of_half = chunk % scale_chunks;
                const bool of_value = chunk != of_half;
                copyAsync(to + static_cast<std::uint32_t>(Shape::rows_bytes + chunk * 16),
                          scales + (of_value ? params_.pool.value_offset : 0) + of_half * 16,
                          of_half * 8 < rows ? 16 : 0);
            }
        }
        __syncwarp();
        arriveAfterCopies(stageBarrier());
#endif
    }

    // How many blocks after the leaf's first one its token `token` lies.
    __device__ int blocksBefore(int token) const {
        const std::int64_t block_size = params_.pool.block_size;
        const std::int64_t within = leaf_.within + token;
        if (within < block_size) return 0;
        // A leaf is shorter than two blocks, unless blocks are small.
        if (block_size >= stripe_tokens) return 1;
        return static_cast<int>(static_cast<std::uint32_t>(within) /
                                static_cast<std::uint32_t>(block_size));
    }

    struct Place {
        std::int64_t block;
        std::int64_t within;
    };

    // Where the leaf's token `token` lies; no_block when nobody sees it or its block is absent.
    // Called by all lanes.
    __device__ Place placeOf(int token) const {
        const PoolView& pool = params_.pool;
        const bool valid = token >= leaf_.skip && token < leaf_.tokens;
        const int before = blocksBefore(valid ? token : 0);
        std::int64_t block = __shfl_sync(all_lanes, leaf_.block, before % warp_size);
        if (!valid) return {no_block, 0};
        if (before >= warp_size)
            block =
                findBlock(params_.tables, leaf_.slot, leaf_.logical + before, pool.max_num_blocks);
        return {block, leaf_.within + token - before * pool.block_size};
    }

    // Of a tile that lies in many runs: a lane looks after every 32nd token.
    __device__ void fetchTile() {
        constexpr int rounds = (Shape::tile_tokens + warp_size - 1) / warp_size;
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const PoolView& pool = params_.pool;
        const std::uint32_t to = stageTile();
        const std::byte* sources[rounds];
        std::uint64_t present = 0;
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            const int token = i * warp_size + lane;
            const bool in_tile = token < Shape::tile_tokens;
            const Place place =
                placeOf(in_tile ? tile_ * Shape::tile_tokens + token : stripe_tokens);
            sources[i] = nullptr;
            if (place.block != no_block) {
                sources[i] = keyRow(pool, params_.layer, place.block, leaf_.kv_head, place.within) +
                             (is_value_ ? pool.value_offset : 0);
                if (Shape::has_scales && !is_value_) {
                    const auto* const scale = reinterpret_cast<const std::uint16_t*>(
                        keyScale(pool, params_.layer, place.block, leaf_.kv_head, place.within));
                    const auto at = static_cast<std::uint32_t>(Shape::rows_bytes + 2 * token);
                    // Past the L1 cache: beside an old token's scale may lie one that the launch
                    // before is still writing.
                    storeShared(to + at, __ldcg(scale));
                    storeShared(to + at + Shape::scales_bytes,
                                __ldcg(scale + pool.value_offset / 2));
                }
            }
            present |= std::uint64_t{__ballot_sync(all_lanes, sources[i] != nullptr)}
                       << i * warp_size;
        }
        if (lane == 0) ring_.stages[place_.stage].present = present;
#if __CUDA_ARCH__ >= 900
        if (is_value_ && present != 0 && present != Shape::tile_mask) clearRows(to, present);
        if (lane == 0)
            expectBytes(stageBarrier(), __popcll(present) * Shape::row_bytes);
        else
            arrive(stageBarrier());
        __syncwarp();
#pragma unroll
        for (int i = 0; i < rounds; ++i)
            if constexpr (Shape::has_parts)
                copyParts(sources[i], to, i * warp_size + lane, present == Shape::tile_mask);
            else
                copyRuns(sources[i],
                         to + static_cast<std::uint32_t>(i * warp_size * Shape::row_bytes));
#else
#pragma unroll
        for (int i = 0; i < rounds; ++i)
            if (present != 0)
                copyRows(sources[i],
                         to + static_cast<std::uint32_t>(i * warp_size * Shape::row_bytes));
        __syncwarp();
        arriveAfterCopies(stageBarrier());
#endif
    }

    // Where the boxes of a leaf lie, when all of it is there, and each lane has one at most.
    __device__ __forceinline__ void findBoxes() {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int token = lane * boxes_.rows;
        leaf_.is_in_boxes = boxes_.rows * warp_size >= stripe_tokens && leaf_.skip == 0 &&
                            leaf_.tokens == stripe_tokens &&
                            __all_sync(all_lanes, lane > blocksBefore(stripe_tokens - 1) ||
                                                      leaf_.block != no_block) != 0;
        if (!leaf_.is_in_boxes) return;
        const int before = token < stripe_tokens ? blocksBefore(token) : 0;
        const std::int64_t block = __shfl_sync(all_lanes, leaf_.block, before);
        const PoolView& pool = params_.pool;
        const std::byte* const keys = keyRow(pool, params_.layer, block, leaf_.kv_head,
                                             leaf_.within + token - before * pool.block_size);
        leaf_.keys = boxAt(keys);
        leaf_.values = boxAt(keys + pool.value_offset);
    }

    [[nodiscard]] __device__ __forceinline__ BoxPlace boxAt(const std::byte* row) const {
        const std::int64_t place = (row - params_.pool.data) / Shape::row_bytes;
        if (boxes_.token_rows == 1) return {0, static_cast<int>(place)};
        const std::int64_t token = divide(place, boxes_.token_rows);
        return {static_cast<int>(place - token * boxes_.token_rows), static_cast<int>(token)};
    }

    // Of a tile of such a leaf.
    __device__ __forceinline__ void fetchBoxes() {
#if __CUDA_ARCH__ >= 900
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        if (lane == 0) {
            ring_.stages[place_.stage].present = Shape::tile_mask;
            expectBytes(stageBarrier(), Shape::rows_bytes);
        } else {
            arrive(stageBarrier());
        }
        __syncwarp();
        const int row = lane * boxes_.rows - tile_ * Shape::tile_tokens;
        if (row >= 0 && row < Shape::tile_tokens)
            copyBox(is_value_ ? leaf_.values : leaf_.keys, row);
#endif
    }

#if __CUDA_ARCH__ >= 900
    // To row `row` of the tile.
    __device__ __forceinline__ void copyBox(const BoxPlace& from, int row) {
#pragma unroll
        for (int part = 0; part < Shape::row_bytes / part_bytes; ++part)
            cuda::copyBox(stageTile() + static_cast<std::uint32_t>(
                                            (part * Shape::tile_tokens + row) * part_bytes),
                          boxes_.map, part * part_bytes / 2, from.of_token, from.token,
                          stageBarrier(), policy_);
    }

    // Where the chunk of a row lies in a tile that is at the same place of the row in the pool.
    static __device__ __forceinline__ std::uint32_t chunkAt(int row, int chunk) {
        constexpr int together = Shape::has_parts ? part_bytes / 16 : Shape::row_chunks;
        return static_cast<std::uint32_t>(
            (chunk / together * Shape::tile_tokens * together + row * together + chunk % together) *
            16);
    }

    // The lane's row of a tile, null where there is none: with those behind it, as many as a box
    // has, where the whole tile is there, else by itself.
    __device__ void copyParts(const std::byte* source, std::uint32_t tile, int row,
                              bool is_whole_tile) {
        if (source == nullptr) return;
        if (is_whole_tile && row % boxes_.rows == 0) copyBox(boxAt(source), row);
        if (is_whole_tile) return;
        for (int part = 0; part < Shape::row_bytes / part_bytes; ++part)
            copyBulk(
                tile + static_cast<std::uint32_t>((part * Shape::tile_tokens + row) * part_bytes),
                source + part * part_bytes, part_bytes, stageBarrier(), policy_);
    }

    // 0 x NaN is NaN, so rows of V that no copy writes must be numbers.
    static __device__ void clearRows(std::uint32_t tile, std::uint64_t present) {
        for (int row = static_cast<int>(threadIdx.x) % warp_size; row < Shape::tile_tokens;
             row += warp_size) {
            if ((present >> row & 1) != 0) continue;
            for (int chunk = 0; chunk < Shape::row_chunks; ++chunk)
                storeZeros(tile + chunkAt(row, chunk));
        }
        fenceAsync();
    }

    // Up to 32 rows, one a lane, null where there is none: a run of rows that lie behind each other
    // is one copy, issued by the lane of its first row.
    __device__ void copyRuns(const std::byte* source, std::uint32_t to) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const auto address = reinterpret_cast<unsigned long long>(source);
        const unsigned long long before = __shfl_up_sync(all_lanes, address, 1);
        const bool here = source != nullptr;
        const bool first = here && (lane == 0 || before + Shape::row_bytes != address);
        const std::uint32_t ends = __ballot_sync(all_lanes, first || !here);
        if (!first) return;
        const std::uint32_t later = lane + 1 == warp_size ? 0 : ends >> (lane + 1);
        const int rows = later == 0 ? warp_size - lane : __ffs(static_cast<int>(later));
        copyBulk(to + static_cast<std::uint32_t>(lane * Shape::row_bytes), source,
                 rows * Shape::row_bytes, stageBarrier(), policy_);
    }
#else
    // Up to 32 rows, one a lane; zeros where there is none.
    __device__ void copyRows(const std::byte* source, std::uint32_t to) {
        constexpr int rows = Shape::tile_tokens < warp_size ? Shape::tile_tokens : warp_size;
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const std::uint32_t there = __ballot_sync(all_lanes, source != nullptr);
        // Some address that may be read, for rows of which nothing is.
        if (source == nullptr) source = params_.pool.data;
        constexpr int copies = rows * Shape::row_chunks / warp_size;
#pragma unroll 4
        for (int i = 0; i < copies; ++i) {
            const int index = i * warp_size + lane;
            const int row = index / Shape::row_chunks;
            const auto address =
                __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(source), row);
            copyAsync(to + static_cast<std::uint32_t>(index * 16),
                      reinterpret_cast<const std::byte*>(address) + index % Shape::row_chunks * 16,
                      (there >> row & 1) != 0 ? 16 : 0);
        }
    }
#endif

    const AttendParams& params_;
    QueueWriter writer_;
    QueueReader reader_;
    LeafSource leaf_;
    std::uint64_t policy_ = 0;  // of the L2 cache
    int tile_ = 0;              // of the leaf
    bool is_value_ = false;     // V of it, or K
    int ring_number_;
    bool by_team_ = false;
    const RowBoxes& boxes_;
    bool whole_tiles_;  // each lies in one run of memory
    Ring ring_;
    RingPlace place_;
};

}  // namespace kvgrid::cuda
