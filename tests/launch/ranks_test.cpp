#include "launch/ranks.h"

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace kvgrid::launch {
namespace {

const std::string first = "cuda NVIDIA H200 (0000:1b:00.0), sm_90";
const std::string second = "cuda NVIDIA H200 (0000:43:00.0), sm_90";

std::vector<RankDescription> ranksOn(const std::vector<std::pair<std::string, std::string>>& all) {
    std::vector<RankDescription> ranks;
    for (const auto& [host, device] : all) {
        const auto rank = static_cast<int>(ranks.size());
        ranks.push_back({.rank = rank, .host = host, .pid = 100 + rank, .device = device});
    }
    return ranks;
}

TEST(Ranks, ShareAGpuOfOneHost) {
    EXPECT_FALSE(shareAGpu(ranksOn({{"a", first}})));
    EXPECT_FALSE(shareAGpu(ranksOn({{"a", first}, {"a", second}, {"b", first}, {"b", second}})));
    EXPECT_TRUE(shareAGpu(ranksOn({{"a", first}, {"a", second}, {"a", first}})));
    EXPECT_TRUE(shareAGpu(ranksOn({{"b", first}, {"a", second}, {"a", first}, {"a", second}})));
    const std::string cpu = "cpu AVX2, 2 threads";
    EXPECT_FALSE(shareAGpu(ranksOn({{"a", cpu}, {"a", cpu}})));
}

}  // namespace
}  // namespace kvgrid::launch
