#include "shard/pool_layout.h"

#include <map>
#include <set>
#include <string>

#include <gtest/gtest.h>

namespace kvgrid {
namespace {

constexpr BlockShape shape{
    .layers = 3, .kv_heads = 2, .head_dim = 80, .block_size = 8, .format = NumberFormat::fp16};
constexpr std::int64_t blocks = 5;

std::int64_t keyRow(const PoolView& view, std::int64_t layer, std::int64_t block, std::int64_t head,
                    std::int64_t within) {
    return layer * view.layer_stride + block * view.block_stride + head * view.head_stride +
           within * view.token_stride;
}

class PoolLayouts : public testing::TestWithParam<PoolLayout> {};

TEST_P(PoolLayouts, EveryRowHasItsOwnBytesAndTheyFillThePool) {
    const PoolView view = poolView(GetParam(), shape, blocks, nullptr);
    const std::int64_t row_bytes = 80 * 2;
    std::set<std::int64_t> rows;
    for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
        for (std::int64_t block = 0; block < blocks; ++block) {
            for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
                for (std::int64_t within = 0; within < shape.block_size; ++within) {
                    const std::int64_t key = keyRow(view, layer, block, head, within);
                    EXPECT_TRUE(rows.insert(key).second);
                    EXPECT_TRUE(rows.insert(key + view.value_offset).second);
                }
            }
        }
    }
    const std::int64_t pool_bytes = blocks * blockBytes(shape).value();
    EXPECT_EQ(*rows.begin(), 0);
    EXPECT_EQ(*rows.rbegin(), pool_bytes - row_bytes);
    EXPECT_EQ(static_cast<std::int64_t>(rows.size()) * row_bytes, pool_bytes);
    for (const std::int64_t row : rows)
        EXPECT_EQ(row % row_bytes, 0);
}

TEST_P(PoolLayouts, TheRunsOfABlockAreItsRowsAndNoOthers) {
    const PoolView view = poolView(GetParam(), shape, blocks, nullptr);
    const BlockRuns runs = blockRuns(GetParam(), shape, blocks, nullptr);
    EXPECT_EQ(runs.outer * runs.inner * runs.run_bytes, blockBytes(shape).value());
    for (std::int64_t block = 0; block < blocks; ++block) {
        std::set<std::int64_t> copied;
        for (std::int64_t outer = 0; outer < runs.outer; ++outer) {
            for (std::int64_t inner = 0; inner < runs.inner; ++inner) {
                const std::int64_t start = block * runs.block_stride + outer * runs.outer_stride +
                                           inner * runs.inner_stride;
                for (std::int64_t at = 0; at < runs.run_bytes; at += 160)
                    copied.insert(start + at);
            }
        }
        std::set<std::int64_t> rows;
        for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
            for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
                for (std::int64_t within = 0; within < shape.block_size; ++within) {
                    const std::int64_t key = keyRow(view, layer, block, head, within);
                    rows.insert(key);
                    rows.insert(key + view.value_offset);
                }
            }
        }
        EXPECT_EQ(copied, rows);
    }
}

// Rows and scales of every token, each with its own bytes and all starts aligned; what is left of
// the pool is padding of scales.
TEST_P(PoolLayouts, ScalesLieBesideTheirRows) {
    for (const NumberFormat format : {NumberFormat::fp8_e4m3, NumberFormat::int8})
        for (const int head_dim : {64, 80, 96})
            for (const std::int64_t block_size : {1, 2, 4, 8, 16, 256}) {
                BlockShape low = shape;
                low.format = format;
                low.head_dim = head_dim;
                low.block_size = block_size;
                const PoolView view = poolView(GetParam(), low, blocks, nullptr);
                std::map<std::int64_t, std::int64_t> ends;  // begin -> end of what was seen
                const auto see = [&ends](std::int64_t begin, std::int64_t bytes) {
                    EXPECT_TRUE(ends.emplace(begin, begin + bytes).second);
                };
                for (std::int64_t layer = 0; layer < low.layers; ++layer)
                    for (std::int64_t block = 0; block < blocks; ++block)
                        for (std::int64_t head = 0; head < low.kv_heads; ++head)
                            for (const std::int64_t kind : {std::int64_t{0}, view.value_offset}) {
                                const std::int64_t first =
                                    layer * view.layer_stride + block * view.block_stride + kind;
                                const std::int64_t scales =
                                    first + view.scale_offset + head * view.scale_head_stride;
                                EXPECT_EQ(scales % 16, 0);
                                const std::int64_t padded = (2 * block_size + 15) / 16 * 16;
                                see(scales, padded);
                                for (std::int64_t within = 0; within < block_size; ++within) {
                                    const std::int64_t row = first + head * view.head_stride +
                                                             within * view.token_stride;
                                    EXPECT_EQ(row % 16, 0);
                                    see(row, head_dim);
                                }
                            }
                std::int64_t at = 0;
                for (const auto& [begin, end] : ends) {
                    EXPECT_EQ(begin, at);
                    at = end;
                }
                EXPECT_EQ(at, blocks * blockBytes(low).value());
            }
}

TEST(PoolLayout, ScalesFollowTheRowsOfTheirHead) {
    const BlockShape low{.layers = 3,
                         .kv_heads = 2,
                         .head_dim = 128,
                         .block_size = 4,
                         .format = NumberFormat::fp8_e4m3};
    const PoolView major = poolView(PoolLayout::block_major, low, blocks, nullptr);
    EXPECT_EQ(major.scale_offset, 4 * 128);
    EXPECT_EQ(major.value_offset, 4 * 128 + 16);
    EXPECT_EQ(major.head_stride, 2 * (4 * 128 + 16));
    EXPECT_EQ(major.scale_head_stride, major.head_stride);
    const PoolView classic = poolView(PoolLayout::layer_major, low, blocks, nullptr);
    EXPECT_EQ(classic.scale_offset, 4 * 2 * 128);
    EXPECT_EQ(classic.scale_head_stride, 16);
    EXPECT_EQ(classic.block_stride, 4 * 2 * 128 + 2 * 16);
    EXPECT_EQ(blockBytes(low).value(), 3 * 2 * 2 * (4 * 128 + 16));
}

std::string layoutName(const testing::TestParamInfo<PoolLayout>& layout) {
    std::string text(name(layout.param));
    std::erase(text, '-');
    return text;
}

INSTANTIATE_TEST_SUITE_P(All, PoolLayouts,
                         testing::Values(PoolLayout::block_major, PoolLayout::layer_major,
                                         PoolLayout::contiguous),
                         layoutName);

// pool[(layer * max_num_blocks + block) * block_size + within] * kv_dim, K and V apart.
TEST(PoolLayout, LayerMajorIsTheClassicFormula) {
    const PoolView view = poolView(PoolLayout::layer_major, shape, blocks, nullptr);
    const std::int64_t kv_dim = 2 * 80;
    for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
        for (std::int64_t block = 0; block < blocks; ++block) {
            for (std::int64_t within = 0; within < shape.block_size; ++within) {
                const std::int64_t element =
                    ((layer * blocks + block) * shape.block_size + within) * kv_dim;
                EXPECT_EQ(keyRow(view, layer, block, 0, within), 2 * element);
                EXPECT_EQ(keyRow(view, layer, block, 1, within), 2 * (element + 80));
            }
        }
    }
    EXPECT_EQ(view.value_offset, 2 * shape.layers * blocks * shape.block_size * kv_dim);
}

TEST(PoolLayout, StridesBeyond32Bits) {
    const BlockShape large{.layers = 80,
                           .kv_heads = 8,
                           .head_dim = 128,
                           .block_size = 1,
                           .format = NumberFormat::bf16};
    const std::int64_t many = std::int64_t{1} << 22;
    const PoolView view = poolView(PoolLayout::layer_major, large, many, nullptr);
    EXPECT_EQ(view.layer_stride, many * 8 * 128 * 2);
    EXPECT_EQ(view.value_offset, 80 * many * 8 * 128 * 2);
}

TEST(PoolLayout, RefusesABlockBeyond64Bits) {
    BlockShape huge = shape;
    huge.block_size = std::int64_t{1} << 60;
    const Result<std::int64_t> bytes = blockBytes(huge);
    ASSERT_FALSE(bytes);
    EXPECT_EQ(bytes.error().code, ErrorCode::does_not_fit);
}

}  // namespace
}  // namespace kvgrid
