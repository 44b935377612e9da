#include "comm/affinity.h"

#include <sched.h>

#include <algorithm>

namespace kvgrid::comm {

CpuSet affinityMask() {
    // A fixed cpu_set_t holds 1024, and the kernel refuses sets smaller than its own.
    cpu_set_t* set = CPU_ALLOC(CpuSet{}.size());
    const std::size_t bytes = CPU_ALLOC_SIZE(CpuSet{}.size());
    CpuSet mask;
    if (set != nullptr && ::sched_getaffinity(0, bytes, set) == 0) {
        for (std::size_t cpu = 0; cpu < mask.size(); ++cpu) {
            mask[cpu] = CPU_ISSET_S(cpu, bytes, set) != 0;
        }
    }
    CPU_FREE(set);
    return mask;
}

int shareOfMask(std::span<const CpuSet> masks, std::size_t node_rank) {
    const CpuSet& mine = masks[node_rank];
    double share = 0;
    for (std::size_t cpu = 0; cpu < mine.size(); ++cpu) {
        if (!mine[cpu]) continue;
        share += 1.0 / static_cast<double>(std::count_if(
                           masks.begin(), masks.end(), [cpu](const CpuSet& m) { return m[cpu]; }));
    }
    constexpr double rounding = 1e-6;  // 3 thirds make 1
    return std::max(1, static_cast<int>(share + rounding));
}

}  // namespace kvgrid::comm
