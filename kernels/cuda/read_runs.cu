// The ceiling for a paged kernel: how fast runs come from scattered places into the
// multiprocessors. From sm_90 on by bulk copies into shared memory, which are then added up from
// there; before, by vector loads.
#include <atomic>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/operations.h"
#include "kernels/cuda/ptx.cuh"

namespace kvgrid::cuda {
namespace {

constexpr int threads = 256;
constexpr int stages = 3;
constexpr int stage_bytes = 32768;
constexpr int shared_bytes = stages * stage_bytes;
constexpr int blocks_per_multiprocessor = 2;  // two with three stages streamed best on an H200

// Where the sums of a launch meet. Launches take turns, so that launches that overlap do not share
// one; the last block of threads of a launch leaves zeros.
struct Meeting {
    unsigned long long sum;
    unsigned arrived;
};
constexpr int meetings = 256;
__device__ Meeting meeting_of_launch[meetings];

struct ReadLaunch {
    ReadRunsParams params;
    int meeting;
};

// A stage holds as many whole runs as fit, or a piece of one.
struct Stages {
    std::int64_t runs_per_stage;
    std::int64_t pieces_per_run;
    std::int64_t count;

    __device__ explicit Stages(const ReadRunsParams& params)
        : runs_per_stage(params.run_bytes < stage_bytes ? stage_bytes / params.run_bytes : 1),
          pieces_per_run((params.run_bytes + stage_bytes - 1) / stage_bytes),
          count(pieces_per_run > 1 ? params.count * pieces_per_run
                                   : (params.count + runs_per_stage - 1) / runs_per_stage) {}

    // Runs of stage `index`, and bytes of each that are in it.
    __device__ int runs(const ReadRunsParams& params, std::int64_t index) const {
        return pieces_per_run > 1
                   ? 1
                   : static_cast<int>(min(runs_per_stage, params.count - index * runs_per_stage));
    }
    __device__ int bytes(const ReadRunsParams& params, std::int64_t index) const {
        if (pieces_per_run == 1) return static_cast<int>(params.run_bytes);
        const std::int64_t left = params.run_bytes - index % pieces_per_run * stage_bytes;
        return static_cast<int>(min(left, std::int64_t{stage_bytes}));
    }
    __device__ const std::byte* source(const ReadRunsParams& params, std::int64_t index,
                                       int run) const {
        if (pieces_per_run > 1)
            return params.data + params.order[index / pieces_per_run] * params.run_bytes +
                   index % pieces_per_run * stage_bytes;
        return params.data + params.order[index * runs_per_stage + run] * params.run_bytes;
    }
};

__device__ __forceinline__ unsigned long long sumOf(const uint4& numbers) {
    return (static_cast<unsigned long long>(numbers.y) << 32 | numbers.x) +
           (static_cast<unsigned long long>(numbers.w) << 32 | numbers.z);
}

#if __CUDA_ARCH__ >= 900

__device__ unsigned long long readAll(const ReadRunsParams& params, std::byte* shared) {
    __shared__ std::uint64_t barriers[stages];
    const Stages work(params);
    const std::uint64_t policy = evictFirst();
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const bool fetches = threadIdx.x < warp_size;
    const auto barrierOf = [&](int stage) { return sharedAddress(&barriers[stage]); };
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < stages; ++stage)
            initBarrier(barrierOf(stage), 1);
        fenceBarriers();
    }
    __syncthreads();

    // Each block of threads has neighbouring stages, whose run numbers are neighbours too.
    const std::int64_t begin = work.count * blockIdx.x / gridDim.x;
    const std::int64_t end = work.count * (blockIdx.x + 1) / gridDim.x;
    const auto fetch = [&](std::int64_t index, int stage) {
        if (!fetches || index >= end) return;
        const int runs = work.runs(params, index);
        const int bytes = work.bytes(params, index);
        if (lane == 0) expectBytes(barrierOf(stage), runs * bytes);
        __syncwarp();
        const auto to = sharedAddress(shared + stage * stage_bytes);
        for (int run = lane; run < runs; run += warp_size)
            copyBulk(to + static_cast<std::uint32_t>(run * bytes), work.source(params, index, run),
                     bytes, barrierOf(stage), policy);
    };
    for (int stage = 0; stage < stages; ++stage)
        fetch(begin + stage, stage);
    unsigned long long sum = 0;
    int stage = 0;
    unsigned parity = 0;
    for (std::int64_t index = begin; index < end; ++index) {
        waitBarrier(barrierOf(stage), parity);
        const int packs = work.runs(params, index) * work.bytes(params, index) / 16;
        const auto* const data = reinterpret_cast<const uint4*>(shared + stage * stage_bytes);
#pragma unroll 8
        for (int i = static_cast<int>(threadIdx.x); i < packs; i += threads)
            sum += sumOf(data[i]);
        __syncthreads();
        fetch(index + stages, stage);
        if (++stage == stages) {
            stage = 0;
            parity ^= 1U;
        }
    }
    return sum;
}

#else

__device__ unsigned long long readAll(const ReadRunsParams& params, std::byte*) {
    const Stages work(params);
    unsigned long long sum = 0;
    for (std::int64_t index = blockIdx.x; index < work.count; index += gridDim.x)
        for (int run = 0; run < work.runs(params, index); ++run) {
            const int packs = work.bytes(params, index) / 16;
            const auto* const data =
                reinterpret_cast<const uint4*>(work.source(params, index, run));
#pragma unroll 8
            for (int i = static_cast<int>(threadIdx.x); i < packs; i += threads)
                sum += sumOf(data[i]);
        }
    return sum;
}

#endif

__global__ void __launch_bounds__(threads)
    read_runs_kernel(const __grid_constant__ ReadLaunch launch) {
    extern __shared__ __align__(128) std::byte shared[];
    unsigned long long sum = readAll(launch.params, shared);
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(all_lanes, sum, distance);
    __shared__ unsigned long long sums[threads / warp_size];
    if (isFirstLane()) sums[threadIdx.x / warp_size] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < threads / warp_size; ++i)
        sum += sums[i];
    Meeting& meeting = meeting_of_launch[launch.meeting];
    atomicAdd(&meeting.sum, sum);
    __threadfence();
    if (atomicAdd(&meeting.arrived, 1U) != gridDim.x - 1) return;
    *launch.params.sink = atomicExch(&meeting.sum, 0ULL);
    atomicExch(&meeting.arrived, 0U);
}

}  // namespace

void prepareReadRuns() {
    load(read_runs_kernel, shared_bytes);
}

void readRuns(const ReadRunsParams& params, StreamView stream) {
    static std::atomic<unsigned> launches{0};
    if (params.run_bytes <= 0 || params.run_bytes % 256 != 0)
        throw Error(ErrorCode::internal,
                    "readRuns: runs of " + std::to_string(params.run_bytes) + " bytes");
    const CudaDevice& device = useDevice(stream);
    const ReadLaunch launch{
        params, static_cast<int>(launches.fetch_add(1, std::memory_order_relaxed) % meetings)};
    const auto grid = static_cast<unsigned>(blocks_per_multiprocessor * device.multiprocessors());
    read_runs_kernel<<<grid, threads, shared_bytes, handleOf(stream)>>>(launch);
    checkLaunch("read_runs_kernel");
}

}  // namespace kvgrid::cuda
