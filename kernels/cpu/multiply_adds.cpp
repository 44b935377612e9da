#include "kernels/cpu/multiply_adds.h"

#include <atomic>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/multiply_adds.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// `rounds` times a step of as many chains as hide the latency of one and fit into registers, of
// which AVX2 has 16 and the others 32. Returns how many multiply-adds that were; `sink` keeps the
// compiler from leaving them out.
std::int64_t multiplyAddRounds(std::int64_t rounds, float* sink) {
    const hn::ScalableTag<float> tag;
    constexpr auto lanes = static_cast<int>(HWY_LANES(float));
    constexpr int chains = lanes == 8 ? 12 : 20;
    // Numbers that stay normal: each chain tends to 1.
    const auto factor = hn::Set(tag, 0.5F);
    const auto addend = hn::Set(tag, 0.5F + *sink);
    hn::Vec<decltype(tag)> sums[chains];
    float start = 0.0F;
    HWY_UNROLL(20)
    for (auto& sum : sums)
        sum = hn::Set(tag, start += 1.0F);
    for (std::int64_t round = 0; round < rounds; ++round) {
        HWY_UNROLL(20)
        for (auto& sum : sums)
            sum = hn::MulAdd(sum, factor, addend);
    }
    HWY_UNROLL(20)
    for (int i = 1; i < chains; ++i)
        sums[0] = hn::Add(sums[0], sums[i]);
    *sink = hn::GetLane(hn::SumOfLanes(tag, sums[0]));
    return rounds * chains * lanes;
}

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvgrid::cpu {
namespace {

HWY_EXPORT(multiplyAddRounds);

// About 50 microseconds a task.
constexpr std::int64_t rounds_per_task = 10'000;
constexpr std::int64_t tasks_per_thread = 64;

}  // namespace

std::int64_t multiplyAdds(Device& device) {
    std::atomic<std::int64_t> total{0};
    cpuDevice(device.defaultStream())
        .pool()
        .parallelFor(device.threads() * tasks_per_thread, [&total](std::int64_t, int) {
            float sink = 0.0F;
            total.fetch_add(HWY_DYNAMIC_DISPATCH(multiplyAddRounds)(rounds_per_task, &sink),
                            std::memory_order_relaxed);
        });
    return total.load(std::memory_order_relaxed);
}

}  // namespace kvgrid::cpu
#endif
