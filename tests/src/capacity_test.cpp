#include <kvgrid/capacity.h>

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace kvgrid {
namespace {

constexpr std::int64_t gib = 1LL << 30;

Capacity compute(const CapacityRequest& request) {
    const auto capacity = computeCapacity(request);
    EXPECT_TRUE(capacity) << capacity.error().message;
    return capacity.value_or(Capacity{});
}

std::string errorOf(const CapacityRequest& request) {
    const auto capacity = computeCapacity(request);
    if (capacity) return "(no error)";
    EXPECT_EQ(capacity.error().code, ErrorCode::invalid_argument);
    return capacity.error().message;
}

// 8 layers, 32 query heads, 8 KV heads, head dim 128: 32768 bytes a token in 16 bits.
CapacityRequest request() {
    return {.geometry = Geometry::uniform(8, 32, 8, 128), .ranks = 2, .grid = {}, .context = 1000};
}

TEST(Capacity, SevenBillionAtFourThousandTokensIsTwoGigabytes) {
    const Capacity capacity = compute({.geometry = Geometry::uniform(32, 32, 32, 128),
                                       .grid = {},
                                       .context = 4096,
                                       .kv_format = NumberFormat::fp16});
    EXPECT_EQ(capacity.total_bytes, 2 * gib);
    EXPECT_EQ(capacity.rank_bytes, 2 * gib);
}

TEST(Capacity, EightyLayersOfSixtyFourHeadsAreTwoAndAHalfMegabytesAToken) {
    const Capacity capacity = compute({.geometry = Geometry::uniform(80, 64, 64, 128),
                                       .grid = {},
                                       .context = 1,
                                       .kv_format = NumberFormat::fp16});
    EXPECT_EQ(capacity.bytes_per_token, 2621440);
}

TEST(Capacity, AnEighthOfSeventyBillion) {
    const Capacity capacity = compute({.geometry = Geometry::uniform(80, 64, 8, 128),
                                       .ranks = 8,
                                       .grid = {},
                                       .context = 131072,
                                       .batch = 8});
    EXPECT_EQ(capacity.grid, (Grid{.heads = 8, .context = 1}));
    ASSERT_EQ(capacity.groups.size(), 1U);
    EXPECT_EQ(capacity.groups.front().block_bytes, 2621440);
    EXPECT_EQ(capacity.groups.front().blocks_per_sequence, 2048);
    EXPECT_EQ(capacity.rank_bytes, 40 * gib);
    EXPECT_EQ(capacity.total_bytes, 320 * gib);
    EXPECT_EQ(capacity.duplication_factor, 1.0);
}

TEST(Capacity, RoundsUpToBlocks) {
    CapacityRequest odd = request();
    for (const auto& [context, blocks] :
         {std::pair{1, 1}, {63, 1}, {64, 1}, {65, 2}, {1000, 16}, {1024, 16}, {1025, 17}}) {
        odd.context = context;
        const Capacity capacity = compute(odd);
        EXPECT_EQ(capacity.groups.front().blocks_per_sequence, blocks) << context;
        EXPECT_EQ(capacity.rank_bytes, blocks * 64 * 16384LL);
    }
    odd.block_size = 1;
    odd.context = 1000;
    EXPECT_EQ(compute(odd).rank_bytes, 1000 * 16384);
}

TEST(Capacity, AWindowBoundsItsGroup) {
    CapacityRequest windows = request();
    windows.geometry.groups = {
        {.layers = {0, 2}, .kv_heads = 8, .head_dim = 128, .window = 0},
        {.layers = {1, 3, 4}, .kv_heads = 8, .head_dim = 128, .window = 100}};
    const Capacity capacity = compute(windows);
    ASSERT_EQ(capacity.groups.size(), 2U);
    EXPECT_EQ(capacity.bytes_per_token, 5 * 4096);
    EXPECT_EQ(capacity.groups[0].blocks_per_sequence, 16);
    EXPECT_EQ(capacity.groups[1].blocks_per_sequence, 3);  // ceil(99 / 64) + 1
    EXPECT_EQ(capacity.groups[1].window, 100);
    EXPECT_EQ(capacity.groups[1].layers, 3);
    EXPECT_EQ(capacity.rank_bytes, capacity.groups[0].rank_bytes + capacity.groups[1].rank_bytes);
    for (const auto& [window, blocks] :
         {std::pair{1, 1}, {2, 2}, {65, 2}, {66, 3}, {129, 3}, {960, 16}, {1 << 20, 16}}) {
        windows.geometry.groups[1].window = window;
        EXPECT_EQ(compute(windows).groups[1].blocks_per_sequence, blocks) << window;
    }
    windows.context = 64;
    EXPECT_EQ(compute(windows).groups[1].blocks_per_sequence, 1);
}

TEST(Capacity, LowBitFormatsCarryScales) {
    const LayerGroup group = Geometry::uniform(3, 8, 2, 128).groups.front();
    EXPECT_EQ(blockBytes(group, 2, 16, NumberFormat::bf16), 3 * 2 * 16 * 2 * 256);
    EXPECT_EQ(blockBytes(group, 2, 16, NumberFormat::fp8_e4m3), 3 * 2 * 16 * 2 * (128 + 2));
    EXPECT_EQ(blockBytes(group, 1, 16, NumberFormat::int8), 3 * 1 * 16 * 2 * (128 + 2));
    EXPECT_EQ(blockBytes(group, 1, 16, NumberFormat::fp32), 3 * 1 * 16 * 2 * 512);
    // The scales of a head's K or V are padded to 16 bytes, as much as 8 of them.
    EXPECT_EQ(blockBytes(group, 1, 8, NumberFormat::int8), 3 * 1 * 2 * (8 * 128 + 16));
    EXPECT_EQ(blockBytes(group, 1, 4, NumberFormat::int8), 3 * 1 * 2 * (4 * 128 + 16));
    EXPECT_EQ(blockBytes(group, 2, 1, NumberFormat::int8), 3 * 2 * 2 * (1 * 128 + 16));
}

TEST(Capacity, PaddingOfScalesIsCounted) {
    CapacityRequest low = request();
    low.kv_format = NumberFormat::fp8_e4m3;
    for (const auto& [block_size, scale] :
         {std::pair{1, 16}, {2, 8}, {4, 4}, {8, 2}, {64, 2}, {256, 2}}) {
        low.block_size = block_size;
        const Capacity capacity = compute(low);
        EXPECT_EQ(capacity.bytes_per_token, 8 * 8 * 2 * (128 + scale)) << block_size;
        EXPECT_EQ(capacity.groups.front().block_bytes * 2, capacity.bytes_per_token * block_size);
    }
}

TEST(Capacity, BlockBytesRefuses) {
    const LayerGroup group = Geometry::uniform(3, 8, 2, 128).groups.front();
    EXPECT_FALSE(blockBytes(group, 0, 16, NumberFormat::bf16));
    EXPECT_FALSE(blockBytes(group, 3, 16, NumberFormat::bf16));
    EXPECT_FALSE(blockBytes(group, 1, 0, NumberFormat::bf16));
    EXPECT_FALSE(blockBytes(LayerGroup{}, 1, 16, NumberFormat::bf16));
    LayerGroup huge = Geometry::uniform(1 << 20, 1 << 20, 1 << 20, 1 << 20).groups.front();
    const auto bytes = blockBytes(huge, 1 << 20, 256, NumberFormat::fp32);
    ASSERT_FALSE(bytes);
    EXPECT_EQ(bytes.error().message, "bytes of a block is beyond 64 bits");
}

TEST(Capacity, JudgesTheMemory) {
    CapacityRequest fits = request();
    EXPECT_TRUE(compute(fits).fits);
    EXPECT_EQ(compute(fits).spare_bytes, 0);
    const std::int64_t need = compute(fits).rank_bytes;
    fits.memory_bytes = need;
    EXPECT_TRUE(compute(fits).fits);
    EXPECT_EQ(compute(fits).spare_bytes, 0);
    fits.memory_bytes = need - 1;
    EXPECT_FALSE(compute(fits).fits);
    EXPECT_EQ(compute(fits).spare_bytes, -1);
}

TEST(Capacity, NamesTheArgument) {
    CapacityRequest bad = request();
    bad.context = 0;
    EXPECT_EQ(errorOf(bad), "context 0: at least 1 token");
    bad = request();
    bad.batch = -1;
    EXPECT_EQ(errorOf(bad), "batch -1: at least 1 sequence");
    bad = request();
    bad.block_size = 3;
    EXPECT_EQ(errorOf(bad), "block size 3: a power of two from 1 to 256");
    bad = request();
    bad.ranks = 3;
    EXPECT_EQ(errorOf(bad), "ranks: 3 does not divide the 8 KV heads; 1, 2, 4 or 8 would do");
    bad = request();
    bad.memory_bytes = -5;
    EXPECT_EQ(errorOf(bad), "memory bytes -5 are negative");
}

TEST(Capacity, SixtyFourBitsAreTheLimit) {
    CapacityRequest large = request();
    large.context = std::numeric_limits<std::int64_t>::max();
    EXPECT_EQ(errorOf(large),
              "context 9223372036854775807 x batch 1: bytes a rank is beyond 64 bits");
    large.context = 1LL << 40;
    large.batch = 1LL << 40;
    EXPECT_NE(errorOf(large).find("is beyond 64 bits"), std::string::npos);
    // 2^48 tokens of 16384 bytes a rank: 2^62 bytes fit, twice as many do not.
    large.batch = 1;
    large.context = 1LL << 48;
    large.ranks = 2;
    EXPECT_EQ(errorOf(large), "bytes of all ranks is beyond 64 bits");
    large.context = 1LL << 47;
    EXPECT_EQ(compute(large).total_bytes, 1LL << 62);
}

}  // namespace
}  // namespace kvgrid
