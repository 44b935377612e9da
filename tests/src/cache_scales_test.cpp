// Fixed scales on 1, 2 and 4 ranks: each layer, K and V, and KV head has its own, whichever rank
// and layer group it is on. They are far from 1, so that one that is not used shows
// (TensorRT-LLM#16916).
#include <kvgrid/cache.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/oracle.h"
#include "tests/src/cache_fixture.h"

namespace kvgrid {
namespace {

using testing::HasSubstr;

constexpr int layers = 3;
constexpr int tokens = 40;

enum Kind : int { k = 1, v = 2 };

float scaleOf(int layer, Kind kind, int head) {
    constexpr float scales[] = {1e-3F, 50.0F, 0.0071F, 0.3F, 0.02F};
    return scales[(layer * 3 + kind * 2 + head) % 5];
}

CacheConfig scaledConfig(NumberFormat format) {
    CacheConfig config = smallConfig();
    config.geometry = Geometry::uniform(layers, query_heads, kv_heads, head_dim);
    config.geometry.groups.push_back(config.geometry.groups.front());
    config.geometry.groups[0].layers = {0, 2};
    config.geometry.groups[1].layers = {1};
    config.kv_format = format;
    for (int layer = 0; layer < layers; ++layer) {
        KvScales scales;
        for (int head = 0; head < kv_heads; ++head) {
            scales.k.push_back(scaleOf(layer, Kind::k, head));
            scales.v.push_back(scaleOf(layer, Kind::v, head));
        }
        config.kv_scales.push_back(scales);
    }
    return config;
}

// What a row of K or V is worth once it is stored.
std::vector<double> worth(NumberFormat format, SequenceId sequence, int layer, Kind kind,
                          std::int64_t position, int head) {
    std::vector<float> row;
    for (int element = 0; element < head_dim; ++element)
        row.push_back(valueAt(3 * layer + kind, sequence, position, head, element));
    if (kind == Kind::k) oracle::rotate(row, position, {.dim = head_dim});
    const oracle::ScaledRow stored = oracle::quantised(
        row, format == NumberFormat::int8 ? oracle::Format::int8 : oracle::Format::e4m3,
        scaleOf(layer, kind, head));
    std::vector<double> worth;
    for (std::size_t i = 0; i < row.size(); ++i)
        worth.push_back(stored.worth(i));
    return worth;
}

class CacheScalesTest : public CacheTest {
protected:
    static void expectStored(Cache& cache, SequenceId sequence, int layer) {
        const NumberFormat format = cache.config().kv_format;
        const CacheHeads heads = cache.heads(layer);
        const auto numbers =
            std::size_t{tokens} * static_cast<std::size_t>(heads.kv_heads) * head_dim;
        const FloatsOnDevice stored_k(*process, numbers);
        const FloatsOnDevice stored_v(*process, numbers);
        ASSERT_TRUE(cache.gather(sequence, layer, stored_k.data(), stored_v.data()));
        std::vector<float> expected_k, expected_v;
        for (int position = 0; position < tokens; ++position) {
            for (int i = 0; i < heads.kv_heads; ++i) {
                const int head = heads.first_kv_head + i;
                for (const double x : worth(format, sequence, layer, Kind::k, position, head))
                    expected_k.push_back(static_cast<float>(x));
                for (const double x : worth(format, sequence, layer, Kind::v, position, head))
                    expected_v.push_back(static_cast<float>(x));
            }
        }
        EXPECT_EQ(stored_k.download(), expected_k) << "layer " << layer;
        EXPECT_EQ(stored_v.download(), expected_v) << "layer " << layer;
    }

    // Of the last token, layer 0.
    static void expectOutputs(NumberFormat format, SequenceId sequence,
                              const std::vector<float>& out) {
        for (int head = 0; head < query_heads; ++head) {
            std::vector<float> row;
            for (int element = 0; element < head_dim; ++element)
                row.push_back(valueAt(0, sequence, tokens - 1, head, element));
            oracle::rotate(row, tokens - 1, {.dim = head_dim});
            std::vector<double> keys, values;
            for (int position = 0; position < tokens; ++position) {
                const int kv_head = head / (query_heads / kv_heads);
                for (const double x : worth(format, sequence, 0, Kind::k, position, kv_head))
                    keys.push_back(x);
                for (const double x : worth(format, sequence, 0, Kind::v, position, kv_head))
                    values.push_back(x);
            }
            const oracle::State expected =
                oracle::attention(std::vector<double>(row.begin(), row.end()), keys, values, 0.125);
            const std::size_t at =
                (std::size_t{tokens - 1} * query_heads + static_cast<std::size_t>(head)) * head_dim;
            EXPECT_LE(oracle::relativeError(std::span(out).subspan(at, head_dim), expected.out),
                      test::output_bound)
                << "head " << head;
        }
    }
};

TEST_F(CacheScalesTest, EveryLayerAndHeadHasItsOwn) {
    for (const NumberFormat format : {NumberFormat::fp8_e4m3, NumberFormat::int8}) {
        SCOPED_TRACE(name(format));
        Cache cache = make(scaledConfig(format));
        const SequenceId a = allocate(cache, 100);
        const Step step = cache.begin(Requests().run(a, tokens)).value();
        ASSERT_TRUE(append(cache, step, 0));
        const std::vector<float> out = attend(cache, step);
        for (int layer = 1; layer < layers; ++layer)
            ASSERT_TRUE(append(cache, step, layer));
        ASSERT_TRUE(cache.advance(step));
        for (int layer = 0; layer < layers; ++layer)
            expectStored(cache, a, layer);
        expectOutputs(format, a, out);
    }
}

TEST_F(CacheScalesTest, AreRefusedByNameOnEveryRank) {
    const auto refused = [&](const std::function<void(CacheConfig&)>& change,
                             const std::string& why) {
        CacheConfig config = scaledConfig(NumberFormat::int8);
        change(config);
        const Result<Cache> cache = Cache::create(*process, config);
        ASSERT_FALSE(cache) << why;
        EXPECT_EQ(cache.error().code, ErrorCode::invalid_argument);
        EXPECT_THAT(cache.error().message, HasSubstr(why));
    };
    refused([](CacheConfig& config) { config.kv_format = NumberFormat::fp16; },
            "KV scales: fp16 has none");
    refused([](CacheConfig& config) { config.kv_scales.resize(2); }, "KV scales: of 2 layers");
    refused([](CacheConfig& config) { config.kv_scales[1].k[3] = 0.0F; },
            "K scales of layer 1, KV head 3: 0 is not in");
    if (process->size() == 1) return;
    refused([](CacheConfig& config) { config.kv_scales[2].v[0] += 0.25F * process->rank(); },
            "differs between ranks");
    refused(
        [](CacheConfig& config) {
            if (process->rank() == 1) config.kv_scales.clear();
        },
        "differs between ranks");
}

}  // namespace
}  // namespace kvgrid
