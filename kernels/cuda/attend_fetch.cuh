// How K and V come into shared memory, ahead of the arithmetic: each warp of attend_kernel keeps
// tiles of its leaves coming into a ring of its own. From sm_90 on rows that lie behind each other
// come as one bulk copy; before, 16 bytes a thread.
#pragma once

#include "kernels/cuda/attend_schedule.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/paging.h"

namespace kvgrid::cuda {

// Sizes that follow from the head dim.
template <int head_dim>
struct AttendShape {
    static constexpr int tile_tokens = head_dim > 128 ? 16 : 32;
    static constexpr int tiles = stripe_tokens / tile_tokens;  // of a leaf
    static constexpr int row_chunks = head_dim / 8;            // of 16 bytes
    static constexpr int row_bytes = head_dim * 2;
    static constexpr int tile_bytes = tile_tokens * row_bytes;
    static constexpr int steps = head_dim / 16;  // of a product over the head dim
    // The four leaves' states on their way into the fold. Rows are 4 numbers longer than a state,
    // so that the threads of a warp write to different banks.
    static constexpr int exchange_stride = head_dim + 4;
    static constexpr int exchange_numbers = attend_warps * tile_rows * (exchange_stride + 1);
    // Levels of a unit's fold that are kept in registers; deeper ones are in local memory.
    static constexpr int register_levels = head_dim > 128 ? 0 : 3;

    // So that one's arithmetic, folds and waits at barriers pass while memory serves the other.
    static constexpr int blocks_per_multiprocessor = 2;

    // Of a stage: its tile, its barrier, and which of its tokens there are.
    static constexpr int stage_bytes = tile_bytes + 8 + 4;
    static constexpr int sharedBytes(int stages) {
        return attend_warps * stages * stage_bytes + 4 * exchange_numbers;
    }
};

// A warp's part of the shared memory.
struct Ring {
    std::uint32_t tiles;
    std::uint32_t barriers;
    std::uint32_t* present;  // [stages]: which tokens of the tile there are
    int stages;
};

// One leaf on its way in. What a lane holds of it is of its tile number `lane`, where a tile is one
// run of memory, else of the leaf's block number `lane`.
struct LeafSource {
    bool there = false;
    bool is_new = false;  // has tokens of this step
    int kv_head;
    int tokens;               // of the leaf, up to the tile's last position
    std::int32_t slot;        // of the block table
    std::int64_t logical;     // block of the leaf's first token
    std::int64_t within;      // its place there
    std::int64_t block;       // the lane's
    std::int64_t offset;      // of the lane's tile in its block, in tokens
    const std::byte* source;  // K of the lane's tile
    int rows;                 // of it that there are
    std::uint64_t policy;     // of the L2 cache
};

// Fetches the tiles of a warp's leaves, in the order in which the warp will want them: for each
// leaf K and V of its first tile, of its second, ... The block ids of a leaf are read while the
// leaf before it comes in.
template <int head_dim>
class TileFetcher {
    using Shape = AttendShape<head_dim>;

public:
    __device__ TileFetcher(const AttendLaunch& launch, int warp, const Ring& ring)
        : params_(launch.params),
          deal_(launch.plan),
          warp_(warp),
          whole_tiles_(launch.params.pool.token_stride == Shape::row_bytes &&
                       launch.params.pool.block_size % Shape::tile_tokens == 0),
          ring_(ring) {
        round_ = -1;
        unit_.round_bits = -1;
        findNext();
        turnToNext();
    }

    // Starts as many tiles as the ring holds beside the one that is worked on. Tokens of this step
    // may be being written by the launch before.
    __device__ void fillRing() {
        static_assert(most_stages <= 2 * Shape::tiles, "no further than the first leaf");
        if (leaf_.is_new) waitForLaunchBefore();
#pragma unroll 1
        for (int i = 1; i < ring_.stages; ++i)
            fetch();
    }

    // Starts the next tile, into the stage after the last one's; nothing after the last leaf.
    __device__ __forceinline__ void fetch() {
        // What is seldom lies out of the way: the loop that this is in must stay in the instruction
        // cache.
        if (__builtin_expect(leaf_.there && step_ == 2 * Shape::tiles, 0)) turnToNext();
        if (leaf_.there) {
            if (__builtin_expect(whole_tiles_, 1))
                fetchWholeTile();
            else
                fetchTile();
            ++step_;
        }
#if __CUDA_ARCH__ < 900
        commitCopies();
#endif
        stage_ = stage_ + 1 == ring_.stages ? 0 : stage_ + 1;
    }

    // Waits for the oldest tile that was not waited for; returns its stage.
    __device__ __forceinline__ int wait() {
        const int stage = waited_;
#if __CUDA_ARCH__ >= 900
        waitBarrier(ring_.barriers + static_cast<std::uint32_t>(stage * 8), phase_);
#else
        waitCopiesUpTo(ring_.stages - 2);
#endif
        __syncwarp();
        if (++waited_ == ring_.stages) {
            waited_ = 0;
            phase_ ^= 1;
        }
        return stage;
    }

    // The oldest tile that was not taken, once it is there; starts another. Returns which of its
    // tokens there are.
    __device__ __forceinline__ std::uint32_t take(std::uint32_t& tile) {
        const int stage = wait();
        tile = ring_.tiles + static_cast<std::uint32_t>(stage * Shape::tile_bytes);
        const std::uint32_t present = ring_.present[stage];
        fetch();
        return present;
    }

private:
    __device__ void turnToNext() {
        leaf_ = next_;
        step_ = 0;
        if (!leaf_.there) return;
        if (whole_tiles_) {
            if (leaf_.block == no_block)
                leaf_.rows = 0;
            else
                leaf_.source =
                    keyRow(params_.pool, params_.layer, leaf_.block, leaf_.kv_head, leaf_.offset);
        }
        findNext();
    }

    __device__ void findNext() {
        const PoolView& pool = params_.pool;
        next_.there = false;
        while (true) {
            ++round_;
            if (unit_.round_bits < 0 || round_ >> unit_.round_bits != 0) {
                if (!deal_.next(unit_)) return;
                round_ = 0;
            }
            const std::int64_t stripe = unit_.stripeAt(
                (unit_.first_round + round_) * attend_warps + warp_, params_.context_ranks);
            if (stripe >= unit_.stripes()) continue;
            const std::int64_t position = stripe * stripe_tokens;
            const std::int64_t left = unit_.last_position - position + 1;
            next_.there = true;
            next_.is_new = position + stripe_tokens > unit_.first_position;
            next_.kv_head = unit_.kv_head;
            next_.slot = unit_.slot;
            next_.logical = position / pool.block_size;
            next_.within = position - next_.logical * pool.block_size;
            next_.tokens = static_cast<int>(left < stripe_tokens ? left : stripe_tokens);
#if __CUDA_ARCH__ >= 900
            // Read once, it must not drive out code, tables and states. Tiles of one KV head read
            // it together.
            next_.policy = unit_.shape.tiles == 1 ? evictFirst() : evictNormally();
#endif
            next_.block = no_block;
            const int lane = static_cast<int>(threadIdx.x) % warp_size;
            int before = lane;
            if (whole_tiles_) {
                const int token = lane * Shape::tile_tokens;
                const int rows = next_.tokens - token;
                next_.rows = min(max(rows, 0), Shape::tile_tokens);
                before = next_.rows > 0 ? blocksBefore(next_, token) : 0;
                next_.offset = next_.within + token - before * pool.block_size;
            }
            if (before <= blocksBefore(next_, next_.tokens - 1))
                next_.block = findBlock(params_.tables, next_.slot, next_.logical + before,
                                        pool.max_num_blocks);
            return;
        }
    }

    // Of a tile that lies in one run. Tokens past the end are the last rows.
    __device__ __forceinline__ void fetchWholeTile() {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const int tile = step_ >> 1;
        const int rows = __shfl_sync(all_lanes, leaf_.rows, tile);
        const auto address =
            __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(leaf_.source), tile);
        const bool is_value = (step_ & 1) != 0;
        const std::byte* const source = reinterpret_cast<const std::byte*>(address) +
                                        (is_value ? params_.pool.value_offset : 0);
        const std::uint32_t present = rows == warp_size ? all_lanes : (1U << rows) - 1;
        const std::uint32_t to =
            ring_.tiles + static_cast<std::uint32_t>(stage_ * Shape::tile_bytes);
#if __CUDA_ARCH__ >= 900
        if (__builtin_expect(rows != Shape::tile_tokens && rows != 0 && is_value && lane >= rows &&
                                 lane < Shape::tile_tokens,
                             0))
            clearRow(to, lane);
        if (lane == 0) {
            ring_.present[stage_] = present;
            const std::uint32_t barrier = ring_.barriers + static_cast<std::uint32_t>(stage_ * 8);
            expectBytes(barrier, rows * Shape::row_bytes);
            if (rows != 0) copyBulk(to, source, rows * Shape::row_bytes, barrier, leaf_.policy);
        }
#else
        if (lane == 0) ring_.present[stage_] = present;
        if (rows == 0) return;
        constexpr int copies = Shape::tile_tokens * Shape::row_chunks / warp_size;
#pragma unroll 4
        for (int i = 0; i < copies; ++i) {
            const int index = i * warp_size + lane;
            const bool there = index < rows * Shape::row_chunks;
            copyAsync(to + static_cast<std::uint32_t>(index * 16),
                      there ? source + index * 16 : source, there ? 16 : 0);
        }
#endif
    }

    // How many blocks after the leaf's first one its token `token` lies.
    __device__ int blocksBefore(const LeafSource& leaf, int token) const {
        const std::int64_t block_size = params_.pool.block_size;
        const std::int64_t within = leaf.within + token;
        if (within < block_size) return 0;
        // A leaf is shorter than two blocks, unless blocks are small.
        if (block_size >= stripe_tokens) return 1;
        return static_cast<int>(static_cast<std::uint32_t>(within) /
                                static_cast<std::uint32_t>(block_size));
    }

    // K of the leaf's token `token`; null when it is past the end or its block is absent. Called by
    // all lanes.
    __device__ const std::byte* keyOf(int token) const {
        const PoolView& pool = params_.pool;
        const bool valid = token < leaf_.tokens;
        const int before = blocksBefore(leaf_, valid ? token : 0);
        std::int64_t block = __shfl_sync(all_lanes, leaf_.block, before % warp_size);
        if (!valid) return nullptr;
        if (before >= warp_size)
            block =
                findBlock(params_.tables, leaf_.slot, leaf_.logical + before, pool.max_num_blocks);
        if (block == no_block) return nullptr;
        return keyRow(pool, params_.layer, block, leaf_.kv_head,
                      leaf_.within + token - before * pool.block_size);
    }

    __device__ void fetchTile() {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const bool is_value = (step_ & 1) != 0;
        const int row = lane % Shape::tile_tokens;
        const std::byte* source = keyOf((step_ >> 1) * Shape::tile_tokens + row);
        constexpr std::uint32_t tile_mask =
            Shape::tile_tokens == warp_size ? all_lanes : (1U << Shape::tile_tokens) - 1;
        const std::uint32_t present = __ballot_sync(all_lanes, source != nullptr) & tile_mask;
        if (lane == 0) ring_.present[stage_] = present;
        if (source != nullptr && is_value) source += params_.pool.value_offset;
        const std::uint32_t to =
            ring_.tiles + static_cast<std::uint32_t>(stage_ * Shape::tile_bytes);
#if __CUDA_ARCH__ >= 900
        copyRuns(source, present, to, is_value);
#else
        copyRows(source, present, to);
#endif
    }

#if __CUDA_ARCH__ >= 900
    // 0 x NaN is NaN, so rows of V that no copy writes must be numbers.
    static __device__ void clearRow(std::uint32_t tile, int row) {
        for (int chunk = 0; chunk < Shape::row_chunks; ++chunk)
            storeZeros(tile + static_cast<std::uint32_t>(row * Shape::row_bytes + chunk * 16));
        fenceBulkCopies();
    }

    // A run of rows that lie behind each other is one copy, issued by the lane of its first row.
    __device__ void copyRuns(const std::byte* source, std::uint32_t present, std::uint32_t to,
                             bool is_value) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const auto address = reinterpret_cast<unsigned long long>(source);
        const unsigned long long before = __shfl_up_sync(all_lanes, address, 1);
        const bool here = lane < Shape::tile_tokens && source != nullptr;
        const bool first = here && (lane == 0 || before + Shape::row_bytes != address);
        const std::uint32_t ends = __ballot_sync(all_lanes, first || !here);
        if (is_value && !here && lane < Shape::tile_tokens && present != 0) clearRow(to, lane);
        const std::uint32_t barrier = ring_.barriers + static_cast<std::uint32_t>(stage_ * 8);
        if (lane == 0) expectBytes(barrier, __popc(present) * Shape::row_bytes);
        __syncwarp();
        if (!first) return;
        const std::uint32_t later = lane + 1 == warp_size ? 0 : ends >> (lane + 1);
        const int rows = later == 0 ? warp_size - lane : __ffs(static_cast<int>(later));
        copyBulk(to + static_cast<std::uint32_t>(lane * Shape::row_bytes), source,
                 rows * Shape::row_bytes, barrier, leaf_.policy);
    }
#else
    __device__ void copyRows(const std::byte* source, std::uint32_t present, std::uint32_t to) {
        if (present == 0) return;
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        // Some address that may be read, for rows of which nothing is.
        if (source == nullptr) source = params_.pool.data;
        constexpr int copies = Shape::tile_tokens * Shape::row_chunks / warp_size;
#pragma unroll 4
        for (int i = 0; i < copies; ++i) {
            const int index = i * warp_size + lane;
            const int row = index / Shape::row_chunks;
            const auto address =
                __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(source), row);
            copyAsync(to + static_cast<std::uint32_t>(index * 16),
                      reinterpret_cast<const std::byte*>(address) + index % Shape::row_chunks * 16,
                      (present >> row & 1) != 0 ? 16 : 0);
        }
    }
#endif

    const AttendParams& params_;
    UnitDeal deal_;
    Unit unit_;  // of next_
    std::int64_t round_;
    LeafSource leaf_;
    LeafSource next_;
    int step_ = 0;  // of leaf_: two a tile, K and V
    int warp_;
    bool whole_tiles_;  // each lies in one run of memory
    Ring ring_;
    int stage_ = 0;
    int waited_ = 0;
    unsigned phase_ = 0;
};

}  // namespace kvgrid::cuda
