// Every shipped model against the figures of its source: shape, layers by kind, bytes a token.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <variant>
#include <vector>

#include <kvgrid/capacity.h>

#include "launch/model_config.h"
#include "tests/paths.h"

namespace kvgrid::launch {
namespace {

constexpr int none = 0;

// One row of the table. Bytes are of 16-bit K and V.
struct Expected {
    std::string name;
    int layers;
    int query_heads;
    int kv_heads;
    int head_dim;
    std::int64_t max_positions;
    double theta;
    double rope_factor;  // of its rope_scaling; 0: none
    int rotary_dim;      // 0: no rotary embedding
    int full_layers;
    int sliding_layers;
    std::int64_t window;
    const char* dtype;
    std::int64_t full_bytes;
    std::int64_t sliding_bytes;
    std::vector<std::string> obstacles;  // keys, in the order of the reader
};

// clang-format off
const std::vector<Expected> table{
    {"llama-2-7b",               32,  32, 32, 128, 4096,     1e4,    none, 128, 32, 0,  none, "fp16", 524288, 0, {}},
    {"llama-3.1-8b",             32,  32,  8, 128, 131072,   5e5,    8,    128, 32, 0,  none, "bf16", 131072, 0, {}},
    {"llama-3.1-70b",            80,  64,  8, 128, 131072,   5e5,    8,    128, 80, 0,  none, "bf16", 327680, 0, {}},
    {"llama-3.1-405b",           126, 128, 8, 128, 131072,   5e5,    8,    128, 126, 0, none, "bf16", 516096, 0, {}},
    {"llama-3.2-1b",             16,  32,  8, 64,  131072,   5e5,    32,   64,  16, 0,  none, "bf16", 32768,  0, {}},
    {"mistral-7b-v0.1",          32,  32,  8, 128, 32768,    1e4,    none, 128, 0,  32, 4096, "bf16", 0, 131072, {}},
    {"mistral-7b-instruct-v0.2", 32,  32,  8, 128, 32768,    1e6,    none, 128, 32, 0,  none, "bf16", 131072, 0, {}},
    {"mixtral-8x7b",             32,  32,  8, 128, 32768,    1e6,    none, 128, 32, 0,  none, "bf16", 131072, 0, {}},
    {"qwen2.5-7b",               28,  28,  4, 128, 131072,   1e6,    none, 128, 28, 0,  none, "bf16", 57344,  0, {}},
    {"qwen2.5-72b",              80,  64,  8, 128, 131072,   1e6,    none, 128, 80, 0,  none, "bf16", 327680, 0, {}},
    {"qwen3-8b",                 36,  32,  8, 128, 40960,    1e6,    none, 128, 36, 0,  none, "bf16", 147456, 0, {}},
    {"qwen3-32b",                64,  64,  8, 128, 40960,    1e6,    none, 128, 64, 0,  none, "bf16", 262144, 0, {}},
    {"qwen3-235b-a22b",          94,  64,  4, 128, 40960,    1e6,    none, 128, 94, 0,  none, "bf16", 192512, 0, {}},
    {"gemma-2-9b",               42,  16,  8, 256, 8192,     1e4,    none, 256, 21, 21, 4096, "fp32", 172032, 172032, {}},
    {"gemma-3-27b",              62,  32, 16, 128, none,     1e6,    8,    128, 10, 52, 1024, "bf16", 81920, 425984, {}},
    {"falcon-7b",                32,  71,  1, 64,  none,     1e4,    none, 64,  32, 0,  none, "bf16", 8192,   0, {}},
    {"phi-3-mini-4k",            32,  32, 32, 96,  4096,     1e4,    none, 96,  0,  32, 2047, "bf16", 0, 393216, {}},
    {"phi-3-mini-128k",          32,  32, 32, 96,  131072,   1e4,    none, 96,  32, 0,  none, "bf16", 393216, 0, {"rope_scaling.type"}},
    {"starcoder-15b",            40,  48,  1, 128, 8192,     1e4,    none, none, 40, 0, none, "",     20480,  0, {}},
    {"gpt2",                     12,  12, 12, 64,  1024,     1e4,    none, none, 12, 0, none, "",     36864,  0, {}},
    {"smollm2-135m",             30,  9,   3, 64,  8192,     1e5,    none, 64,  30, 0,  none, "bf16", 23040,  0, {}},
    {"gpt-oss-120b",             36,  64,  8, 64,  131072,   1.5e5,  32,   64,  18, 18, 128,  "bf16", 36864,  36864, {}},
    {"qwen3-next-80b-a3b",       48,  16,  2, 256, 262144,   1e7,    none, 64,  12, 0,  none, "",     24576,  0, {}},
    {"gemma-3-1b",               26,  4,   1, 256, 32768,    1e6,    none, 256, 4,  22, 512,  "bf16", 4096,   22528, {}},
    {"qwen-7b-v1",               32,  32, 32, 128, 32768,    1e4,    none, 128, 32, 0,  none, "",     524288, 0, {}},
    {"phi-2-msft",               32,  32, 32, 80,  2048,     1e4,    none, 32,  32, 0,  none, "fp16", 327680, 0, {}},
    {"redpajama-3b",             32,  32, 32, 80,  2048,     1e4,    none, 80,  32, 0,  none, "fp16", 327680, 0, {}},
    {"gpt-j-6b",                 28,  16, 16, 256, 2048,     1e4,    none, 64,  28, 0,  none, "",     458752, 0, {"model_type"}},
    {"llama-4-scout",            48,  40,  8, 128, 10485760, 5e5,    8,    128, 48, 0,  none, "bf16", 196608, 0, {"model_type", "attention_chunk_size", "no_rope_layers"}},
};
// clang-format on

struct Refused {
    std::string name;
    std::string key;
};
const std::vector<Refused> refused{
    {"deepseek-v3", "kv_lora_rank"},
    {"minicpm3-4b", "kv_lora_rank"},
    {"llava-1.5-7b", "text_config: no num_hidden_layers"},
};

std::string pathOf(const std::string& name) {
    return (std::filesystem::path(test::models_dir) / (name + ".json")).string();
}

double factorOf(const RotaryScaling& scaling) {
    if (const auto* linear = std::get_if<LinearScaling>(&scaling)) return linear->factor;
    if (const auto* llama3 = std::get_if<Llama3Scaling>(&scaling)) return llama3->factor;
    if (const auto* yarn = std::get_if<YarnScaling>(&scaling)) return yarn->factor;
    return 0;
}

class ShippedModel : public testing::TestWithParam<Expected> {
protected:
    void SetUp() override {
        const auto loaded = loadModelConfig(pathOf(GetParam().name));
        ASSERT_TRUE(loaded) << loaded.error().message;
        model_ = *loaded;
    }
    ModelConfig model_;
};

TEST_P(ShippedModel, HasTheShapeOfItsSource) {
    const Expected& expected = GetParam();
    EXPECT_EQ(model_.name, expected.name);
    EXPECT_EQ(model_.geometry.layers, expected.layers);
    EXPECT_EQ(model_.geometry.query_heads, expected.query_heads);
    EXPECT_EQ(model_.max_positions, expected.max_positions);
    EXPECT_EQ(model_.dtype ? name(*model_.dtype) : "", expected.dtype);
    int full = 0;
    int sliding = 0;
    for (const LayerGroup& group : model_.geometry.groups) {
        EXPECT_EQ(group.kv_heads, expected.kv_heads);
        EXPECT_EQ(group.head_dim, expected.head_dim);
        EXPECT_TRUE(group.window == 0 || group.window == expected.window) << group.window;
        (group.window == 0 ? full : sliding) += static_cast<int>(group.layers.size());
    }
    EXPECT_EQ(full, expected.full_layers);
    EXPECT_EQ(sliding, expected.sliding_layers);
}

TEST_P(ShippedModel, HasTheRotaryEmbeddingOfItsSource) {
    const Expected& expected = GetParam();
    EXPECT_EQ(model_.rotary.dim, expected.rotary_dim);
    EXPECT_EQ(model_.rotary.theta, expected.theta);
    EXPECT_EQ(factorOf(model_.rotary.scaling), expected.rope_factor);
}

TEST_P(ShippedModel, TakesTheBytesATokenOfItsSource) {
    const Expected& expected = GetParam();
    const auto capacity = computeCapacity({.geometry = model_.geometry, .grid = {}, .context = 1});
    ASSERT_TRUE(capacity) << capacity.error().message;
    EXPECT_EQ(capacity->bytes_per_token, expected.full_bytes + expected.sliding_bytes);
    for (const GroupCapacity& group : capacity->groups) {
        EXPECT_EQ(group.bytes_per_token,
                  group.window == 0 ? expected.full_bytes : expected.sliding_bytes);
    }
}

TEST_P(ShippedModel, NamesTheKeysThatAreNotDecodedYet) {
    std::vector<std::string> keys;
    for (const Obstacle& obstacle : model_.obstacles)
        keys.push_back(obstacle.key);
    EXPECT_EQ(keys, GetParam().obstacles);

    constexpr std::int64_t longer_than_any_window = 1 << 24;
    const auto decodable = decodableGeometry(model_, longer_than_any_window);
    EXPECT_EQ(decodable.has_value(), keys.empty());
    if (!decodable) {
        EXPECT_NE(decodable.error().message.find(keys.front()), std::string::npos)
            << decodable.error().message;
    }
}

INSTANTIATE_TEST_SUITE_P(Table, ShippedModel, testing::ValuesIn(table), [](const auto& row) {
    std::string name = row.param.name;
    std::replace_if(
        name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
    return name;
});

TEST(ShippedModels, WithoutAGeometryToCountAreRefusedByKey) {
    for (const Refused& model : refused) {
        const auto loaded = loadModelConfig(pathOf(model.name));
        ASSERT_FALSE(loaded) << model.name;
        EXPECT_EQ(loaded.error().code, ErrorCode::invalid_argument);
        EXPECT_NE(loaded.error().message.find(model.name + ".json: " + model.key),
                  std::string::npos)
            << loaded.error().message;
    }
}

TEST(ShippedModels, AreAllInTheTables) {
    std::size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(test::models_dir)) {
        files += entry.path().extension() == ".json" ? 1 : 0;
    }
    EXPECT_EQ(files, 32U);
    EXPECT_EQ(table.size() + refused.size(), files);
}

TEST(ShippedModels, ShareLayersAsTheirFamilyDoes) {
    const auto layersWithWindow = [](const std::string& name, std::int64_t window) {
        const auto model = loadModelConfig(pathOf(name));
        for (const LayerGroup& group : model.value().geometry.groups) {
            if (group.window == window) return group.layers;
        }
        return std::vector<int>{};
    };
    EXPECT_EQ(layersWithWindow("gemma-2-9b", 4096).front(), 0);
    EXPECT_EQ(layersWithWindow("gemma-2-9b", 0).back(), 41);
    EXPECT_EQ(layersWithWindow("gemma-3-1b", 0), (std::vector<int>{5, 11, 17, 23}));
    EXPECT_EQ(layersWithWindow("gemma-3-27b", 0).front(), 5);
    EXPECT_EQ(layersWithWindow("gemma-3-27b", 0).back(), 59);
    EXPECT_EQ(layersWithWindow("gpt-oss-120b", 128).front(), 0);
    EXPECT_EQ(layersWithWindow("qwen3-next-80b-a3b", 0).front(), 3);
    EXPECT_EQ(layersWithWindow("qwen3-next-80b-a3b", 0).back(), 47);
}

TEST(ShippedModels, ScaleRotaryEmbeddingsAsTheirFilesSay) {
    const auto scalingOf = [](const std::string& name) {
        return loadModelConfig(pathOf(name)).value().rotary.scaling;
    };
    EXPECT_TRUE(std::holds_alternative<Llama3Scaling>(scalingOf("llama-3.1-8b")));
    EXPECT_TRUE(std::holds_alternative<LinearScaling>(scalingOf("gemma-3-27b")));
    const auto yarn = std::get<YarnScaling>(scalingOf("gpt-oss-120b"));
    EXPECT_EQ(yarn.original_max_position, 4096.0);
    EXPECT_FALSE(yarn.truncate);
    EXPECT_EQ(yarn.attention_factor, 0.0);
}

TEST(ShippedModels, RotateInWindowsAsTheirFamilyDoes) {
    for (const char* name : {"gemma-3-1b", "gemma-3-27b"}) {
        const auto model = loadModelConfig(pathOf(name)).value();
        EXPECT_EQ(model.rotary.theta, 1e6) << name;
        ASSERT_EQ(model.geometry.groups.size(), 2U);
        EXPECT_FALSE(model.geometry.groups[0].rotary) << name;
        const auto& sliding = model.geometry.groups[1].rotary;
        ASSERT_TRUE(sliding) << name;
        EXPECT_EQ(sliding->theta, 1e4) << name;
        EXPECT_EQ(sliding->dim, model.rotary.dim) << name;
    }
    const auto gemma2 = loadModelConfig(pathOf("gemma-2-9b")).value();
    for (const LayerGroup& group : gemma2.geometry.groups)
        EXPECT_FALSE(group.rotary);
}

TEST(ShippedModels, ScaleScoresAsTheirFamilyDoes) {
    EXPECT_EQ(loadModelConfig(pathOf("gemma-2-9b"))->logit_softcap, 50.0);
    EXPECT_EQ(loadModelConfig(pathOf("llama-3.1-8b"))->logit_softcap, 0.0);
    EXPECT_TRUE(loadModelConfig(pathOf("gpt-oss-120b"))->attention_sinks);
    EXPECT_FALSE(loadModelConfig(pathOf("llama-3.1-8b"))->attention_sinks);
    EXPECT_DOUBLE_EQ(loadModelConfig(pathOf("gemma-3-27b"))->softmax_scale, 1.0 / std::sqrt(168.0));
    EXPECT_DOUBLE_EQ(loadModelConfig(pathOf("gemma-2-9b"))->softmax_scale, 1.0 / 16.0);
    EXPECT_EQ(loadModelConfig(pathOf("llama-3.1-8b"))->softmax_scale, 0.0);
}

// Each member of each file, replaced by each kind of wrong value: read or refused, never worse, and
// what is read can be counted.
TEST(ShippedModels, WithAnyMemberWrongAreReadOrRefused) {
    const std::vector<nlohmann::json> values{nullptr,
                                             true,
                                             -1,
                                             0,
                                             1,
                                             1.5,
                                             1e30,
                                             18446744073709551615U,
                                             "x",
                                             "",
                                             nlohmann::json::array(),
                                             nlohmann::json::object(),
                                             {1, 2},
                                             {"full_attention"},
                                             {{"type", "llama3"}}};
    int refusals = 0;
    int readings = 0;
    const auto read = [&](const nlohmann::json& file) {
        const auto model = parseModelConfig(file.dump(), "m.json");
        if (!model) {
            EXPECT_EQ(model.error().code, ErrorCode::invalid_argument);
            EXPECT_EQ(model.error().message.find("m.json: "), 0U);
            ++refusals;
            return;
        }
        ++readings;
        const auto capacity =
            computeCapacity({.geometry = model->geometry, .grid = {}, .context = 1000});
        EXPECT_TRUE(capacity) << capacity.error().message << "\n" << file;
        static_cast<void>(decodableGeometry(*model, 1000));
    };
    for (const auto& entry : std::filesystem::directory_iterator(test::models_dir)) {
        std::ifstream stream(entry.path());
        const auto file = nlohmann::json::parse(stream);
        const nlohmann::json members = file.flatten();
        for (const auto& item : members.items()) {
            const nlohmann::json::json_pointer member(item.key());
            for (const nlohmann::json& value : values) {
                nlohmann::json changed = file;
                changed[member] = value;
                read(changed);
                if (member.parent_pointer().empty()) continue;
                changed = file;
                changed[member.parent_pointer()] = value;
                read(changed);
            }
        }
    }
    EXPECT_GT(refusals, 1000);
    EXPECT_GT(readings, 1000);
}

TEST(DecodableGeometry, AWindowNoShorterThanTheRunIsNone) {
    const auto model = loadModelConfig(pathOf("phi-3-mini-4k"));
    ASSERT_TRUE(model);
    const auto within = decodableGeometry(*model, 2047);
    ASSERT_TRUE(within) << within.error().message;
    ASSERT_EQ(within->groups.size(), 1U);
    EXPECT_EQ(within->groups.front().window, 0);
    EXPECT_EQ(within->groups.front().layers.size(), 32U);

    const auto beyond = decodableGeometry(*model, 2048);
    ASSERT_TRUE(beyond) << beyond.error().message;
    EXPECT_EQ(beyond->groups.front().window, 2047);
}

TEST(DecodableGeometry, GroupsThatBecomeAlikeAreOne) {
    auto model = loadModelConfig(pathOf("gemma-3-1b")).value();
    ASSERT_EQ(model.geometry.groups.size(), 2U);
    // Their rotary embeddings keep them apart.
    const auto apart = decodableGeometry(model, 512);
    ASSERT_TRUE(apart) << apart.error().message;
    ASSERT_EQ(apart->groups.size(), 2U);
    EXPECT_EQ(apart->groups[1].window, 0);

    model.geometry.groups[1].rotary.reset();
    const auto joined = decodableGeometry(model, 512);
    ASSERT_TRUE(joined) << joined.error().message;
    ASSERT_EQ(joined->groups.size(), 1U);
    std::vector<int> all(26);
    for (int layer = 0; layer < 26; ++layer)
        all[static_cast<std::size_t>(layer)] = layer;
    EXPECT_EQ(joined->groups.front().layers, all);
    EXPECT_EQ(decodableGeometry(model, 513)->groups.size(), 2U);
}

TEST(FirstLayers, CutsEveryGroup) {
    const Geometry gemma = loadModelConfig(pathOf("gemma-3-1b"))->geometry;
    const auto six = firstLayers(gemma, 6);
    ASSERT_TRUE(six);
    EXPECT_EQ(six->layers, 6);
    ASSERT_EQ(six->groups.size(), 2U);
    EXPECT_EQ(six->groups[0].layers, (std::vector<int>{5}));
    EXPECT_EQ(six->groups[1].layers, (std::vector<int>{0, 1, 2, 3, 4}));
    EXPECT_EQ(firstLayers(gemma, 5)->groups.size(), 1U);
    EXPECT_FALSE(firstLayers(gemma, 0));
    EXPECT_FALSE(firstLayers(gemma, 27));
    const auto without_kv = firstLayers(loadModelConfig(pathOf("qwen3-next-80b-a3b"))->geometry, 3);
    ASSERT_FALSE(without_kv);
    EXPECT_NE(without_kv.error().message.find("none of the first 3 has KV"), std::string::npos);
}

TEST(ShareOf, DividesHeads) {
    const Geometry llama = loadModelConfig(pathOf("llama-3.1-70b"))->geometry;
    const auto share = shareOf(llama, 8);
    ASSERT_TRUE(share);
    EXPECT_EQ(share->query_heads, 8);
    EXPECT_EQ(share->groups.front().kv_heads, 1);
    EXPECT_EQ(share->groups.front().layers.size(), 80U);
    const auto uneven = shareOf(llama, 3);
    ASSERT_FALSE(uneven);
    EXPECT_NE(uneven.error().message.find("1, 2, 4 or 8 would do"), std::string::npos);
}

}  // namespace
}  // namespace kvgrid::launch
