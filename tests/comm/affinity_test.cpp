#include "comm/affinity.h"

#include <vector>

#include <gtest/gtest.h>

namespace kvgrid::comm {
namespace {

CpuSet range(std::size_t first, std::size_t count) {
    CpuSet mask;
    for (std::size_t cpu = first; cpu < first + count; ++cpu)
        mask.set(cpu);
    return mask;
}

std::vector<int> shares(const std::vector<CpuSet>& masks) {
    std::vector<int> all;
    for (std::size_t rank = 0; rank < masks.size(); ++rank)
        all.push_back(shareOfMask(masks, rank));
    return all;
}

using Shares = std::vector<int>;

TEST(Affinity, UnboundRanksDivideTheNode) {
    EXPECT_EQ(shares({range(0, 8)}), Shares({8}));
    EXPECT_EQ(shares({range(0, 8), range(0, 8)}), Shares({4, 4}));
    EXPECT_EQ(shares({range(0, 8), range(0, 8), range(0, 8)}), Shares({2, 2, 2}));
}

TEST(Affinity, BoundRanksKeepWhatTheyAreBoundTo) {
    EXPECT_EQ(shares({range(0, 1), range(1, 1)}), Shares({1, 1}));
    EXPECT_EQ(shares({range(0, 6), range(6, 2)}), Shares({6, 2}));
}

TEST(Affinity, NobodyGetsNothing) {
    EXPECT_EQ(shares(std::vector<CpuSet>(5, range(0, 2))), Shares(5, 1));
    EXPECT_EQ(shares({CpuSet()}), Shares({1}));
}

TEST(Affinity, ThirdsAddUp) {
    EXPECT_EQ(shares(std::vector<CpuSet>(3, range(0, 3))), Shares(3, 1));
    EXPECT_EQ(shares(std::vector<CpuSet>(7, range(0, 49))), Shares(7, 7));
}

TEST(Affinity, PartlySharedMasksCountInParts) {
    // Hardware threads 4 to 7 are shared: 4 + 4 / 2 each.
    EXPECT_EQ(shares({range(0, 8), range(4, 8)}), Shares({6, 6}));
}

TEST(Affinity, NumbersBeyondAThousandCount) {
    EXPECT_EQ(shares({range(2000, 96)}), Shares({96}));
}

TEST(Affinity, ThisProcessMayRunSomewhere) {
    EXPECT_GE(affinityMask().count(), 1U);
}

}  // namespace
}  // namespace kvgrid::comm
