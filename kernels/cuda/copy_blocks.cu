// Copies blocks by a kernel, because a copy call a block reaches 1.4 GB/s at 4 KB where a kernel
// reaches 50: page-locked host memory is read and written in place, over the link.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/operations.h"

namespace kvgrid::cuda {
namespace {

constexpr int threads = 512;
// As many as saturate the host link; more would only take multiprocessors from attention.
constexpr int blocks = 16;
// A team of threads copies this much of one image at a time.
constexpr std::int64_t piece_bytes = std::int64_t{128} << 10;
// Pairs travel as a parameter of the launch, so that the caller's list may be reused at once.
constexpr int pairs_per_launch = 256;

struct CopyLaunch {
    BlockRuns source;
    BlockRuns destination;
    int team;  // threads that copy a piece together
    int count;
    BlockPair pairs[pairs_per_launch];
};
static_assert(sizeof(CopyLaunch) <= 4096, "a launch has 4 KB of parameters on every GPU");

// Walks the runs of one block in order of its image.
class RunCursor {
public:
    __device__ RunCursor(const BlockRuns& runs, std::int64_t block, std::int64_t offset)
        : runs_(runs),
          block_(runs.data + block * runs.block_stride),
          run_(offset / runs.run_bytes),
          offset_(offset % runs.run_bytes) {}

    __device__ std::byte* data() const {
        return block_ + run_ / runs_.inner * runs_.outer_stride +
               run_ % runs_.inner * runs_.inner_stride + offset_;
    }
    __device__ std::int64_t contiguous() const { return runs_.run_bytes - offset_; }
    __device__ void advance(std::int64_t bytes) {
        offset_ += bytes;
        if (offset_ == runs_.run_bytes) {
            ++run_;
            offset_ = 0;
        }
    }

private:
    const BlockRuns& runs_;
    std::byte* block_;
    std::int64_t run_;
    std::int64_t offset_;
};

// `bytes` bytes by `team` threads, of which this is `member`; a Unit at a time, several in flight.
template <typename Unit>
__device__ void copySpan(std::byte* to, const std::byte* from, std::int64_t bytes, int member,
                         int team) {
    constexpr int in_flight = sizeof(Unit) == sizeof(uint4) ? 8 : 4;
    const auto* const source = reinterpret_cast<const Unit*>(from);
    auto* const destination = reinterpret_cast<Unit*>(to);
    const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(Unit));
    for (std::int64_t first = member; first < count; first += in_flight * team) {
        Unit units[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; ++i)
            if (first + i * team < count) units[i] = source[first + i * team];
#pragma unroll
        for (int i = 0; i < in_flight; ++i)
            if (first + i * team < count) destination[first + i * team] = units[i];
    }
}

template <typename Unit>
__global__ void __launch_bounds__(threads)
    copy_blocks_kernel(const __grid_constant__ CopyLaunch launch) {
    const std::int64_t bytes = launch.source.outer * launch.source.inner * launch.source.run_bytes;
    const std::int64_t pieces = (bytes + piece_bytes - 1) / piece_bytes;
    const int member = static_cast<int>(threadIdx.x) % launch.team;
    const std::int64_t teams = static_cast<std::int64_t>(gridDim.x) * (threads / launch.team);
    for (std::int64_t index = (std::int64_t{blockIdx.x} * threads + threadIdx.x) / launch.team;
         index < launch.count * pieces; index += teams) {
        const BlockPair pair = launch.pairs[index / pieces];
        const std::int64_t begin = index % pieces * piece_bytes;
        std::int64_t left = min(piece_bytes, bytes - begin);
        RunCursor from(launch.source, pair.source, begin);
        RunCursor to(launch.destination, pair.destination, begin);
        while (left > 0) {
            const std::int64_t step = min(left, min(from.contiguous(), to.contiguous()));
            copySpan<Unit>(to.data(), from.data(), step, member, launch.team);
            from.advance(step);
            to.advance(step);
            left -= step;
        }
    }
}

// Small blocks are copied by small teams, because each waits for its own loads.
int teamFor(std::int64_t bytes) {
    if (bytes >= (std::int64_t{32} << 10)) return threads;
    return bytes >= (std::int64_t{8} << 10) ? 128 : 32;
}

// The numbers that decide how many bytes one access may have, or'ed.
std::uintptr_t alignmentOf(const BlockRuns& runs) {
    return reinterpret_cast<std::uintptr_t>(runs.data) |
           static_cast<std::uintptr_t>(runs.block_stride | runs.run_bytes |
                                       (runs.outer > 1 ? runs.outer_stride : 0) |
                                       (runs.inner > 1 ? runs.inner_stride : 0));
}

}  // namespace

void prepareCopyBlocks() {
    load(copy_blocks_kernel<uint4>);
    load(copy_blocks_kernel<std::uint32_t>);
    load(copy_blocks_kernel<std::uint8_t>);
}

void copyBlocks(const CopyBlocksParams& params, StreamView stream) {
    if (params.count == 0) return;
    useDevice(stream);
    const std::uintptr_t alignment = alignmentOf(params.source) | alignmentOf(params.destination);
    CopyLaunch launch{};
    launch.source = params.source;
    launch.destination = params.destination;
    launch.team = teamFor(params.source.outer * params.source.inner * params.source.run_bytes);
    for (std::int64_t first = 0; first < params.count; first += pairs_per_launch) {
        launch.count =
            static_cast<int>(std::min<std::int64_t>(pairs_per_launch, params.count - first));
        std::copy_n(params.pairs + first, launch.count, launch.pairs);
        if (alignment % sizeof(uint4) == 0)
            copy_blocks_kernel<uint4><<<blocks, threads, 0, handleOf(stream)>>>(launch);
        else if (alignment % sizeof(std::uint32_t) == 0)
            copy_blocks_kernel<std::uint32_t><<<blocks, threads, 0, handleOf(stream)>>>(launch);
        else
            copy_blocks_kernel<std::uint8_t><<<blocks, threads, 0, handleOf(stream)>>>(launch);
        checkLaunch("copy_blocks_kernel");
    }
}

}  // namespace kvgrid::cuda
