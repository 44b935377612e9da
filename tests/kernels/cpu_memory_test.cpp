// Where the memory of the CPU device lies.
#include <gtest/gtest.h>
#include <numa.h>
#include <numaif.h>

#include <set>

#include "kernels/device.h"

namespace kvgrid::test {
namespace {

TEST(CpuMemory, LiesOnAllNodesThatTheProcessRunsOn) {
    if (numa_available() < 0) GTEST_SKIP() << "this kernel has no NUMA";
    bitmask* const nodes = numa_get_run_node_mask();
    const unsigned count = numa_bitmask_weight(nodes);
    numa_bitmask_free(nodes);
    if (count < 2) GTEST_SKIP() << "one NUMA node";

    constexpr std::size_t bytes = std::size_t{64} << 20;
    const std::unique_ptr<Device> device = makeCpuDevice(2);
    const Buffer buffer = orThrow(Buffer::onDevice(*device, bytes));
    std::set<int> found;
    for (std::size_t at = 0; at < bytes; at += std::size_t{2} << 20) {
        int node = -1;
        ASSERT_EQ(get_mempolicy(&node, nullptr, 0, buffer.data() + at, MPOL_F_NODE | MPOL_F_ADDR),
                  0);
        found.insert(node);
    }
    EXPECT_EQ(found.size(), count);
}

}  // namespace
}  // namespace kvgrid::test
