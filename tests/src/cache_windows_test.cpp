// Layer groups that differ in KV heads, head dim, window and rotary embedding, on 1, 2 and 4 ranks.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/oracle.h"
#include "launch/reference.h"
#include "tests/src/cache_fixture.h"

namespace kvgrid {
namespace {

constexpr int layers = 5;

// Full attention in layers 0 and 3; windows of 50 tokens in 1 and 4, with more and larger heads and
// an embedding of their own; 200 in 2.
CacheConfig mixedConfig() {
    CacheConfig config = smallConfig();
    config.geometry = {
        .layers = layers,
        .query_heads = query_heads,
        .groups = {{.layers = {0, 3}, .kv_heads = 4, .head_dim = 64},
                   {.layers = {1, 4},
                    .kv_heads = 8,
                    .head_dim = 128,
                    .window = 50,
                    .rotary = RotaryEmbedding{.dim = 96, .theta = 1e6, .scaling = {}}},
                   {.layers = {2}, .kv_heads = 4, .head_dim = 64, .window = 200}}};
    config.max_sequences = 3;
    config.max_step_tokens = 300;
    return config;
}

const LayerGroup& groupOf(const CacheConfig& config, int layer) {
    return *std::find_if(config.geometry.groups.begin(), config.geometry.groups.end(),
                         [layer](const LayerGroup& group) {
                             return std::count(group.layers.begin(), group.layers.end(), layer) > 0;
                         });
}

float sinkOf(int layer, int head) {
    return 0.5F * static_cast<float>((3 * layer + head) % 7) - 0.5F;
}

class CacheWindowsTest : public CacheTest {
protected:
    // One step of all layers; the outputs of each.
    static std::vector<std::vector<float>> runAll(Cache& cache, const Requests& requests) {
        const Step step = cache.begin(requests).value();
        for (const Answer& answer : step.answers())
            EXPECT_EQ(answer.status, Answer::Status::done) << answer.why;
        std::vector<std::vector<float>> outputs;
        for (int layer = 0; layer < cache.config().geometry.layers; ++layer) {
            const CacheHeads heads = cache.heads(layer);
            const auto of = [&](int what, int first, int count) {
                std::vector<float> values;
                for (const TokenRow& row : step.rows())
                    for (int head = first; head < first + count; ++head)
                        for (int element = 0; element < heads.head_dim; ++element)
                            values.push_back(valueAt(3 * layer + what, row.sequence, row.position,
                                                     head, element));
                return FloatsOnDevice(*process, values);
            };
            const FloatsOnDevice q = of(0, heads.first_query_head, heads.query_heads);
            const FloatsOnDevice k = of(1, heads.first_kv_head, heads.kv_heads);
            const FloatsOnDevice v = of(2, heads.first_kv_head, heads.kv_heads);
            EXPECT_TRUE(cache.append(step, layer, q.data(), k.data(), v.data()));
            const FloatsOnDevice out(*process, step.rows().size() * query_heads *
                                                   static_cast<std::size_t>(heads.head_dim));
            EXPECT_TRUE(cache.attend(step, layer, out.data(), Output::gathered));
            outputs.push_back(out.download());
        }
        EXPECT_TRUE(cache.advance(step));
        return outputs;
    }

    static void expectOracle(const CacheConfig& config, int layer, SequenceId sequence,
                             std::int64_t position, std::span<const float> row) {
        const LayerGroup& group = groupOf(config, layer);
        const auto rotary = launch::oracleRotary(group.rotary.value_or(config.rotary));
        const auto head_of = [&](int what, std::int64_t at, int which) {
            std::vector<float> values;
            for (int element = 0; element < group.head_dim; ++element)
                values.push_back(valueAt(3 * layer + what, sequence, at, which, element));
            if (what < 2) oracle::rotate(values, at, rotary);
            return values;
        };
        const std::int64_t window = group.window == 0 ? position + 1 : group.window;
        for (int head = 0; head < query_heads; ++head) {
            const int kv_head = head / (query_heads / group.kv_heads);
            std::vector<double> k, v;
            for (std::int64_t at = std::max<std::int64_t>(0, position + 1 - window); at <= position;
                 ++at) {
                for (const float x : head_of(1, at, kv_head))
                    k.push_back(oracle::rounded(x, oracle::Format::bf16));
                for (const float x : head_of(2, at, kv_head))
                    v.push_back(oracle::rounded(x, oracle::Format::bf16));
            }
            const std::vector<float> q = head_of(0, position, head);
            oracle::ScoreTerms terms{.softcap = config.logit_softcap};
            if (config.attention_sinks) terms.sink = sinkOf(layer, head);
            const auto expected = oracle::attention(std::vector<double>(q.begin(), q.end()), k, v,
                                                    1.0 / std::sqrt(group.head_dim), terms);
            const auto width = static_cast<std::size_t>(group.head_dim);
            EXPECT_LE(oracle::relativeError(
                          row.subspan(static_cast<std::size_t>(head) * width, width), expected.out),
                      test::output_bound)
                << "layer " << layer << " position " << position << " head " << head;
        }
    }
};

TEST_F(CacheWindowsTest, EachLayerAttendsAsItsGroupDoes) {
    const CacheConfig config = mixedConfig();
    Cache cache = make(config);
    const SequenceId a = allocate(cache, 700);
    const SequenceId b = allocate(cache, 100);
    runAll(cache, Requests().run(a, 290));
    runAll(cache, Requests().run(a, 280).run(b, 20));
    const auto outputs = runAll(cache, Requests().run(b, 1).run(a, 40));
    for (int layer = 0; layer < layers; ++layer) {
        const std::vector<float>& out = outputs[static_cast<std::size_t>(layer)];
        const std::size_t width = out.size() / 41;
        expectOracle(config, layer, b, 20, std::span(out).first(width));
        for (const std::size_t row : {1, 17, 40})
            expectOracle(config, layer, a, 570 + static_cast<std::int64_t>(row) - 1,
                         std::span(out).subspan(row * width, width));
    }
}

// Every layer has its own sinks, and its group's scaling and attention factor.
TEST_F(CacheWindowsTest, SoftcapSinksAndScalingsOfEachLayer) {
    CacheConfig config = mixedConfig();
    config.logit_softcap = 2;
    config.attention_sinks = true;
    config.rotary.scaling = LinearScaling{.factor = 8};
    config.geometry.groups[1].rotary->scaling =
        YarnScaling{.factor = 16, .original_max_position = 64};
    Cache cache = make(config);
    for (int layer = 0; layer < layers; ++layer) {
        const CacheHeads heads = cache.heads(layer);
        std::vector<float> logits;
        for (int head = 0; head < heads.query_heads; ++head)
            logits.push_back(sinkOf(layer, heads.first_query_head + head));
        ASSERT_TRUE(cache.setSinks(layer, logits));
    }
    const SequenceId a = allocate(cache, 320);
    runAll(cache, Requests().run(a, 290));
    const auto outputs = runAll(cache, Requests().run(a, 2));
    for (int layer = 0; layer < layers; ++layer) {
        const std::vector<float>& out = outputs[static_cast<std::size_t>(layer)];
        for (const std::size_t row : {0, 1})
            expectOracle(config, layer, a, 290 + static_cast<std::int64_t>(row),
                         std::span(out).subspan(row * out.size() / 2, out.size() / 2));
    }
}

// Decodes three sequences in turns to some 300 tokens each; all outputs.
std::vector<std::vector<float>> decodeInTurns(
    Cache& cache, std::vector<std::vector<float>> (*step)(Cache&, const Requests&)) {
    std::vector<SequenceId> ids;
    for (int i = 0; i < 3; ++i)
        ids.push_back(cache.begin(Requests().allocate(400)).value().answers().front().sequence);
    std::vector<std::vector<float>> outputs;
    for (int turn = 0; turn < 15; ++turn) {
        const auto of_turn = step(cache, Requests().run(ids[static_cast<std::size_t>(turn % 3)],
                                                        turn % 2 == 0 ? 1 + turn : 110));
        outputs.insert(outputs.end(), of_turn.begin(), of_turn.end());
    }
    return outputs;
}

TEST_F(CacheWindowsTest, BlocksLayoutsAndOffloadsChangeNoBit) {
    Cache roomy = make(mixedConfig());
    const auto reference = decodeInTurns(roomy, runAll);
    EXPECT_EQ(roomy.stats().offloaded_blocks, 0);
    for (const int block_size : {1, 256}) {
        CacheConfig config = mixedConfig();
        config.block_size = block_size;
        config.device_blocks = 3 * (400 / block_size + 1);
        Cache cache = make(config);
        EXPECT_EQ(decodeInTurns(cache, runAll), reference) << block_size;
    }
    for (const PoolLayout layout : {PoolLayout::layer_major, PoolLayout::contiguous}) {
        CacheConfig config = mixedConfig();
        config.layout = layout;
        Cache cache = make(config);
        EXPECT_EQ(decodeInTurns(cache, runAll), reference) << name(layout);
    }
    CacheConfig config = mixedConfig();
    config.device_blocks = 28;  // little more than one sequence
    config.host_blocks = 80;
    Cache tight = make(config);
    EXPECT_EQ(decodeInTurns(tight, runAll), reference);
    EXPECT_GT(tight.stats().restored_blocks, 50);
}

// 63 blocks without the window.
TEST_F(CacheWindowsTest, DecodesForeverInTheBlocksOfAWindow) {
    CacheConfig config = smallConfig();
    config.geometry.groups.front().window = 33;
    config.device_blocks = 3;
    Cache cache = make(config);
    const SequenceId a = allocate(cache, 1000);
    for (int token = 0; token < 1000; ++token)
        run(cache, Requests().run(a, 1), token % 100 == 0);
    EXPECT_EQ(cache.length(a), 1000);
    config.device_blocks = 2;
    Cache less = make(config);
    const Step step = less.begin(Requests().allocate(1000)).value();
    EXPECT_EQ(step.answers().front().status, Answer::Status::never);
}

TEST_F(CacheWindowsTest, PoolsAreAsLargeAsWindowsNeed) {
    CacheConfig config = mixedConfig();
    config.max_step_tokens = 33;
    config.host_blocks = 100;
    Cache cache = make(config);
    const CacheStats stats = cache.stats();
    ASSERT_EQ(stats.groups.size(), 3U);
    EXPECT_EQ(stats.groups[0].device_blocks, 256);
    // 50 tokens lie in 5 blocks of 16 at most; 32 tokens more fill 2, and begin 2 in the others.
    EXPECT_EQ(stats.groups[1].device_blocks, 3 * 5 + 4);
    EXPECT_EQ(stats.groups[2].device_blocks, 3 * 14 + 4);
    EXPECT_EQ(stats.groups[0].host_blocks, 100);
    EXPECT_EQ(stats.groups[1].host_blocks, 3 * 5 + 4);
    const int ranks = process->size();
    EXPECT_EQ(stats.groups[0].block_bytes, 2 * 4 / ranks * 64 * 16 * 2 * 2);
    EXPECT_EQ(stats.groups[1].block_bytes, 2 * 8 / ranks * 128 * 16 * 2 * 2);

    // So they are never what a step waits for: full attention is.
    std::vector<SequenceId> ids;
    for (int i = 0; i < 3; ++i)
        ids.push_back(allocate(cache, 1024));
    for (int turn = 0; turn < 30; ++turn)
        runAll(cache, Requests().run(ids[0], 31).run(ids[1], 1).run(ids[2], 1));
    const CacheStats after = cache.stats();
    EXPECT_EQ(after.offloaded_blocks, 0);
    EXPECT_EQ(after.groups[0].device_blocks_free, 256 - 59 - 2 - 2);
}

// Each layer from its own group's blocks: those of full attention are in host memory in part, those
// of the windows are not.
TEST_F(CacheWindowsTest, GathersEachLayerFromItsGroup) {
    CacheConfig config = mixedConfig();
    config.device_blocks = 28;
    config.host_blocks = 28;
    Cache cache = make(config);
    const SequenceId a = allocate(cache, 400);
    const SequenceId b = allocate(cache, 400);
    runAll(cache, Requests().run(a, 300));
    runAll(cache, Requests().run(b, 200));
    ASSERT_GT(cache.stats().offloaded_blocks, 0);
    for (int layer = 0; layer < layers; ++layer) {
        const LayerGroup& group = groupOf(config, layer);
        const CacheHeads heads = cache.heads(layer);
        const auto row =
            static_cast<std::size_t>(heads.kv_heads) * static_cast<std::size_t>(heads.head_dim);
        using BitsOnDevice = test::DeviceVector<std::uint16_t>;
        const BitsOnDevice k(*process, 300 * row), v(*process, 300 * row);
        const Result<void> gathered = cache.gather(a, layer, k.data(), v.data());
        if (group.window == 0) {
            ASSERT_FALSE(gathered) << layer;
            EXPECT_EQ(gathered.error().code, ErrorCode::does_not_fit);
            continue;
        }
        ASSERT_TRUE(gathered) << layer << ": " << gathered.error().message;
        const std::vector<std::uint16_t> bits = k.download();
        for (std::int64_t at = 0; at < 300; ++at) {
            for (int head = 0; head < heads.kv_heads; ++head) {
                std::vector<float> key;
                for (int element = 0; element < heads.head_dim; ++element)
                    key.push_back(
                        valueAt(3 * layer + 1, a, at, heads.first_kv_head + head, element));
                oracle::rotate(key, at, launch::oracleRotary(group.rotary.value_or(config.rotary)));
                const std::size_t begin = static_cast<std::size_t>(at) * row +
                                          static_cast<std::size_t>(head * heads.head_dim);
                for (std::size_t i = 0; i < key.size(); ++i) {
                    const double stored =
                        std::bit_cast<float>(std::uint32_t{bits[begin + i]} << 16);
                    // The next token, at 300, sees its window less itself.
                    const bool left = at < 300 - (group.window - 1);
                    ASSERT_EQ(stored, left ? 0.0 : oracle::rounded(key[i], oracle::Format::bf16))
                        << "layer " << layer << " position " << at << " element " << i;
                }
            }
        }
    }
}

TEST_F(CacheWindowsTest, HeadsAreThoseOfTheLayersGroup) {
    const CacheConfig config = mixedConfig();
    Cache cache = make(config);
    const int ranks = process->size();
    for (const int layer : {0, 1, 2, 3, 4}) {
        const LayerGroup& group = groupOf(config, layer);
        const CacheHeads heads = cache.heads(layer);
        EXPECT_EQ(heads.query_heads, query_heads / ranks);
        EXPECT_EQ(heads.kv_heads, group.kv_heads / ranks);
        EXPECT_EQ(heads.first_kv_head, process->rank() * group.kv_heads / ranks);
        EXPECT_EQ(heads.head_dim, group.head_dim);
    }
    EXPECT_EQ(cache.heads(5).kv_heads, 0);
}

}  // namespace
}  // namespace kvgrid
