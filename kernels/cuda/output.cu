#include "kernels/attention_state.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/operations.h"
#include "kernels/cuda/ptx.cuh"

namespace kvgrid::cuda {
namespace {

constexpr int threads = 256;
constexpr std::int64_t most_blocks = 1 << 20;

// Merges numbers [at, at + count) of a row of one part with the sink of their head.
template <int count>
__device__ void mergeSink(const OutputParams& params, std::int64_t state, std::int64_t part,
                          std::int64_t at, Pack<float, count>& numbers) {
    const std::int64_t head = at / params.head_dim;
    const MergeWeights weights = mergeWeights(params.lse[state * params.heads + head],
                                              params.sinks[part * params.heads + head]);
#pragma unroll
    for (int i = 0; i < count; ++i)
        numbers.values[i] = mergeOut(weights, numbers.values[i], 0.0F);
}

// Copies or converts `count` numbers a thread; a block of threads does one row of one part.
template <int count>
__global__ void __launch_bounds__(threads)
    output_kernel(const __grid_constant__ OutputParams params) {
    // The launch behind it, often NCCL's, starts when this is over.
    waitForLaunchBefore();
    const std::int64_t numbers = params.heads * params.head_dim;
    const std::int64_t states = params.rows * params.parts;
    for (std::int64_t state = blockIdx.x; state < states; state += gridDim.x) {
        const std::int64_t part = state / params.rows;
        const std::int64_t row = state - part * params.rows;
        const std::int64_t from = state * numbers;
        const std::int64_t to = (row * params.parts + part) * numbers;
        for (std::int64_t i = std::int64_t{threadIdx.x} * count; i < numbers;
             i += threads * count) {
            if (params.source_format == NumberFormat::fp32) {
                auto numbers = loadNumbers<count>(NumberFormat::fp32, params.source, from + i);
                if (params.sinks != nullptr) mergeSink<count>(params, state, part, i, numbers);
                storeNumbers<count>(params.destination_format, params.destination, to + i, numbers);
            } else {
                using Bits = Pack<std::uint16_t, count>;
                *reinterpret_cast<Bits*>(static_cast<std::uint16_t*>(params.destination) + to + i) =
                    *reinterpret_cast<const Bits*>(
                        static_cast<const std::uint16_t*>(params.source) + from + i);
            }
        }
    }
}

}  // namespace

void prepareOutput() {
    load(output_kernel<1>);
    load(output_kernel<4>);
}

void output(const OutputParams& params, StreamView stream) {
    if (params.source_format != NumberFormat::fp32 &&
        params.source_format != params.destination_format)
        throw Error(ErrorCode::internal, "output: the source is neither fp32 nor as wanted");
    if (params.sinks != nullptr && params.source_format != NumberFormat::fp32)
        throw Error(ErrorCode::internal, "output: sinks, but the source is not fp32");
    if (bytesPerElement(params.destination_format) < 2)
        throw Error(ErrorCode::internal, "output: the destination is not fp32, fp16 or bf16");
    if (params.rows * params.parts * params.heads == 0) return;
    const CudaDevice& device = useDevice(stream);
    const unsigned grid = gridFor(params.rows * params.parts, most_blocks);
    const auto either = reinterpret_cast<std::uintptr_t>(params.source) |
                        reinterpret_cast<std::uintptr_t>(params.destination);
    const bool wide = params.head_dim % 4 == 0 && either % 16 == 0;
    launchOverlapping(device, wide ? output_kernel<4> : output_kernel<1>, grid, threads, 0, stream,
                      params);
    checkLaunch("output_kernel");
}

}  // namespace kvgrid::cuda
