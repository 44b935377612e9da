#include <algorithm>
#include <atomic>
#include <numeric>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/operations.h"
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/read_runs.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The sum of `bytes` (a multiple of 256) as 64-bit numbers.
std::uint64_t sumOfRun(const std::byte* data, std::int64_t bytes) {
    const hn::ScalableTag<std::uint64_t> tag;
    constexpr int accumulators = 4;
    constexpr auto step = static_cast<std::int64_t>(HWY_LANES(std::uint64_t));
    static_assert(256 % (accumulators * step * sizeof(std::uint64_t)) == 0);
    const auto* const numbers = reinterpret_cast<const std::uint64_t*>(data);
    const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(std::uint64_t));
    auto a = hn::Zero(tag);
    auto b = a;
    auto c = a;
    auto d = a;
    for (std::int64_t i = 0; i < count; i += accumulators * step) {
        a = hn::Add(a, hn::LoadU(tag, numbers + i));
        b = hn::Add(b, hn::LoadU(tag, numbers + i + step));
        c = hn::Add(c, hn::LoadU(tag, numbers + i + 2 * step));
        d = hn::Add(d, hn::LoadU(tag, numbers + i + 3 * step));
    }
    HWY_ALIGN std::uint64_t lanes[step];
    hn::StoreU(hn::Add(hn::Add(a, b), hn::Add(c, d)), tag, lanes);
    return std::accumulate(lanes, lanes + step, std::uint64_t{0});
}

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvgrid::cpu {
namespace {

HWY_EXPORT(sumOfRun);

constexpr std::int64_t bytes_per_task = std::int64_t{1} << 20;

}  // namespace

void readRuns(const ReadRunsParams& params, StreamView stream) {
    const std::int64_t step = std::max<std::int64_t>(1, bytes_per_task / params.run_bytes);
    const std::int64_t tasks = (params.count + step - 1) / step;
    std::atomic<std::uint64_t> total{0};
    cpuDevice(stream).pool().parallelFor(tasks, [&](std::int64_t task, int) {
        std::uint64_t sum = 0;
        const std::int64_t end = std::min(params.count, (task + 1) * step);
        for (std::int64_t i = task * step; i < end; ++i)
            sum += HWY_DYNAMIC_DISPATCH(sumOfRun)(params.data + params.order[i] * params.run_bytes,
                                                  params.run_bytes);
        total.fetch_add(sum, std::memory_order_relaxed);
    });
    *params.sink = total.load(std::memory_order_relaxed);
}

}  // namespace kvgrid::cpu
#endif
