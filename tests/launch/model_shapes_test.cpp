// Shapes of config.json that a reader meets in the wild, and files that are wrong.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "launch/model_config.h"

namespace kvgrid::launch {
namespace {

using nlohmann::json;

// A plain model; `changes` are members to set, or, when discarded, to leave out.
json config(const json& changes = json::object()) {
    json base{{"model_type", "llama"},    {"num_hidden_layers", 4},
              {"num_attention_heads", 8}, {"num_key_value_heads", 2},
              {"hidden_size", 1024},      {"max_position_embeddings", 8192},
              {"torch_dtype", "bfloat16"}};
    base.update(changes);
    return base;
}

json without(const std::string& key, const json& changes = json::object()) {
    json base = config(changes);
    base.erase(key);
    return base;
}

Result<ModelConfig> parse(const json& value) {
    return parseModelConfig(value.dump(), "m.json");
}

int kvHeads(const json& value) {
    return parse(value).value().geometry.groups.front().kv_heads;
}
int headDim(const json& value) {
    return parse(value).value().geometry.groups.front().head_dim;
}

std::string messageOf(const Result<ModelConfig>& result) {
    if (result) return "(no error)";
    EXPECT_EQ(result.error().code, ErrorCode::invalid_argument);
    return result.error().message;
}

std::string message(const json& value) {
    return messageOf(parse(value));
}

TEST(ModelShapes, KvHeads) {
    EXPECT_EQ(kvHeads(config()), 2);
    EXPECT_EQ(kvHeads(without("num_key_value_heads")), 8);
    EXPECT_EQ(kvHeads(config({{"num_key_value_heads", nullptr}})), 8);
    EXPECT_EQ(kvHeads(without("num_key_value_heads", {{"n_head_kv", 4}})), 4);
    EXPECT_EQ(kvHeads(without("num_key_value_heads", {{"n_head_kv", nullptr}})), 8);
    EXPECT_EQ(kvHeads(without("num_key_value_heads", {{"multi_query", true}})), 1);
    EXPECT_EQ(kvHeads(without("num_key_value_heads", {{"multi_query", true}, {"num_kv_heads", 8}})),
              1);
    EXPECT_EQ(kvHeads(without("num_key_value_heads", {{"multi_query", false}})), 8);
    EXPECT_EQ(kvHeads(without("num_key_value_heads", {{"multi_query", true},
                                                      {"new_decoder_architecture", true},
                                                      {"num_kv_heads", 4}})),
              4);
    EXPECT_EQ(kvHeads(without("num_key_value_heads", {{"model_type", "gpt_bigcode"}})), 1);
    EXPECT_EQ(kvHeads(without("num_key_value_heads", {{"attn_config", {{"kv_n_heads", 4}}}})), 4);
}

TEST(ModelShapes, HeadDim) {
    EXPECT_EQ(headDim(config()), 128);
    EXPECT_EQ(headDim(config({{"head_dim", 64}})), 64);
    EXPECT_EQ(headDim(config({{"head_dim", nullptr}})), 128);
    EXPECT_EQ(headDim(without("hidden_size", {{"kv_channels", 96}})), 96);
}

TEST(ModelShapes, TheLanguageModelMayBeInside) {
    const json inner = config();
    for (const char* key : {"text_config", "llm_config", "language_config"}) {
        const auto model = parse({{"model_type", "wrapper"}, {key, inner}});
        ASSERT_TRUE(model) << model.error().message;
        EXPECT_EQ(model->model_type, "llama");
        EXPECT_EQ(model->geometry.layers, 4);
    }
    EXPECT_EQ(parse({{"thinker_config", {{"text_config", inner}}}})->geometry.layers, 4);
    // An inner object that says nothing of layers gives way to the outer one.
    EXPECT_EQ(parse(config({{"text_config", {{"model_type", "x"}}}}))->geometry.layers, 4);
    EXPECT_EQ(message({{"text_config", 7}}), "m.json: text_config: is a number, not an object");
}

TEST(ModelShapes, Dtype) {
    EXPECT_EQ(parse(config())->dtype, NumberFormat::bf16);
    EXPECT_EQ(parse(without("torch_dtype", {{"dtype", "float16"}}))->dtype, NumberFormat::fp16);
    EXPECT_EQ(parse(without("torch_dtype"))->dtype, std::nullopt);
    EXPECT_EQ(parse(config({{"torch_dtype", "float8_e4m3fn"}}))->dtype, std::nullopt);
}

TEST(ModelShapes, Windows) {
    const auto windows = [](const json& value) {
        std::vector<std::pair<std::int64_t, std::size_t>> found;
        const auto model = parse(value);
        EXPECT_TRUE(model) << model.error().message;
        for (const LayerGroup& group : model->geometry.groups) {
            found.emplace_back(group.window, group.layers.size());
        }
        return found;
    };
    using Windows = std::vector<std::pair<std::int64_t, std::size_t>>;
    EXPECT_EQ(windows(config({{"sliding_window", nullptr}})), (Windows{{0, 4}}));
    EXPECT_EQ(windows(config({{"sliding_window", 100}})), (Windows{{100, 4}}));
    EXPECT_EQ(windows(config({{"sliding_window", 8192}})), (Windows{{0, 4}}));
    EXPECT_EQ(windows(config({{"sliding_window", 8191}})), (Windows{{8191, 4}}));
    EXPECT_EQ(windows(config({{"sliding_window", 100}, {"use_sliding_window", false}})),
              (Windows{{0, 4}}));
    // Off unless switched on, and then from max_window_layers on.
    EXPECT_EQ(windows(config({{"model_type", "qwen2"}, {"sliding_window", 100}})),
              (Windows{{0, 4}}));
    EXPECT_EQ(windows(config({{"model_type", "qwen2"},
                              {"sliding_window", 100},
                              {"use_sliding_window", true},
                              {"max_window_layers", 3}})),
              (Windows{{0, 3}, {100, 1}}));
    EXPECT_EQ(windows(config({{"sliding_window", 100}, {"sliding_window_pattern", 2}})),
              (Windows{{0, 2}, {100, 2}}));
    // The class's own window, where the file has none.
    EXPECT_EQ(windows(config({{"model_type", "mistral"}})), (Windows{{4096, 4}}));
    EXPECT_EQ(windows(config({{"model_type", "mistral"}, {"sliding_window", nullptr}})),
              (Windows{{0, 4}}));
}

TEST(ModelShapes, LayerTypes) {
    const json types = {"sliding_attention", "full_attention", "linear_attention", "mamba"};
    const auto model = parse(config({{"layer_types", types}, {"sliding_window", 100}}));
    ASSERT_TRUE(model) << model.error().message;
    ASSERT_EQ(model->geometry.groups.size(), 2U);
    EXPECT_EQ(model->geometry.groups[0].layers, (std::vector<int>{1}));
    EXPECT_EQ(model->geometry.groups[1].layers, (std::vector<int>{0}));

    EXPECT_EQ(message(config({{"layer_types", types}})),
              "m.json: sliding_window: is missing, but layer_types[0] slides");
    EXPECT_EQ(message(config({{"layer_types", {"full_attention"}}})),
              "m.json: layer_types: 1 entries for 4 layers");
    EXPECT_EQ(message(config({{"layer_types", {"mamba", "conv", "warp", "mamba"}}})),
              "m.json: layer_types[2]: 'warp' is not a kind of layer that is known");
    EXPECT_EQ(message(config({{"layer_types", {"mamba", "mamba", "mamba", "mamba"}}})),
              "m.json: layer_types: no layer has KV");
    EXPECT_EQ(message(config({{"layer_types", {"mamba", 3, "mamba", "mamba"}}})),
              "m.json: layer_types[1]: is a number, not a string");
    EXPECT_EQ(message(config({{"layer_types", "mamba"}})),
              "m.json: layer_types: is a string, not a list");
}

TEST(ModelShapes, Rotary) {
    EXPECT_EQ(parse(config())->rotary.dim, 128);
    EXPECT_EQ(parse(config())->rotary.theta, 10000.0);
    EXPECT_EQ(parse(config({{"rope_theta", 7}}))->rotary.theta, 7.0);
    EXPECT_EQ(parse(config({{"rotary_emb_base", 9.5}}))->rotary.theta, 9.5);
    EXPECT_EQ(parse(config({{"rotary_dim", 32}}))->rotary.dim, 32);
    EXPECT_EQ(parse(config({{"partial_rotary_factor", 0.25}}))->rotary.dim, 32);
    EXPECT_EQ(parse(config({{"rotary_pct", 0.5}}))->rotary.dim, 64);
    EXPECT_EQ(parse(config({{"model_type", "gpt_neox"}}))->rotary.dim, 32);
    EXPECT_EQ(parse(config({{"model_type", "gpt2"}}))->rotary.dim, 0);
    EXPECT_EQ(parse(config({{"position_embedding_type", "nope"}}))->rotary.dim, 0);
    const auto renewed =
        parse(config({{"rope_parameters", {{"rope_theta", 5e5}, {"rope_type", "default"}}}}));
    ASSERT_TRUE(renewed);
    EXPECT_EQ(renewed->rotary.theta, 5e5);
    EXPECT_TRUE(renewed->obstacles.empty());

    EXPECT_EQ(message(config({{"rotary_dim", 33}})), "m.json: rotary_dim: 33 is odd");
    EXPECT_EQ(message(config({{"rotary_dim", 130}})),
              "m.json: rotary_dim: 130 is out of range: 2 to 128");
    EXPECT_EQ(message(config({{"partial_rotary_factor", 1.5}})),
              "m.json: partial_rotary_factor: 1.5 is above 1");
    EXPECT_EQ(message(config({{"partial_rotary_factor", 0.001}})),
              "m.json: partial_rotary_factor: 0.001 of head_dim 128 is 0, not an even number of "
              "elements");
    EXPECT_EQ(message(config({{"rope_theta", -1}})), "m.json: rope_theta: -1 is not above 0");
    EXPECT_EQ(message(config({{"rope_theta", "1e6"}})),
              "m.json: rope_theta: is a string, not a number");
}

// Layers with a window may have an embedding of their own.
TEST(ModelShapes, RotaryOfLayersWithAWindow) {
    const auto groups = [](const json& changes) {
        const auto model = parse(config(changes));
        EXPECT_TRUE(model) << model.error().message;
        EXPECT_TRUE(model->obstacles.empty());
        return model->geometry.groups;
    };
    const json gemma{{"model_type", "gemma3_text"}, {"sliding_window", 100}, {"rope_theta", 5e5}};
    json given = gemma;
    given["rope_local_base_freq"] = 7;
    ASSERT_EQ(groups(gemma).size(), 1U);  // of 4 layers none is full
    EXPECT_EQ(groups(gemma)[0].rotary->theta, 1e4);
    EXPECT_EQ(groups(given)[0].rotary->theta, 7);
    EXPECT_EQ(parse(config(gemma))->rotary.theta, 5e5);
    // A scaling is that of the others.
    json scaled = gemma;
    scaled["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", 8.0},
                              {"low_freq_factor", 1.0},
                              {"high_freq_factor", 4.0},
                              {"original_max_position_embeddings", 8192}};
    EXPECT_EQ(groups(scaled)[0].rotary->scaling, RotaryScaling{});
    EXPECT_TRUE(std::holds_alternative<Llama3Scaling>(parse(config(scaled))->rotary.scaling));
    // The window is no window, the embedding is still another.
    json wide = gemma;
    wide["sliding_window"] = 8192;
    wide["num_hidden_layers"] = 6;
    ASSERT_EQ(groups(wide).size(), 2U);
    EXPECT_EQ(groups(wide)[1].window, 0);
    EXPECT_EQ(groups(wide)[1].layers.size(), 5U);

    const json types = {"sliding_attention", "full_attention", "sliding_attention",
                        "full_attention"};
    json kinds{{"layer_types", types},
               {"sliding_window", 100},
               {"rope_parameters",
                {{"full_attention", {{"rope_type", "default"}, {"rope_theta", 1e6}}},
                 {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 2e4}}}}}};
    EXPECT_EQ(parse(config(kinds))->rotary.theta, 1e6);
    EXPECT_EQ(groups(kinds)[1].rotary->theta, 2e4);
    kinds["rope_parameters"]["sliding_attention"]["rope_theta"] = 1e6;
    EXPECT_FALSE(groups(kinds)[1].rotary);
}

json llama3() {
    return {{"rope_type", "llama3"},
            {"factor", 8.0},
            {"low_freq_factor", 1.0},
            {"high_freq_factor", 4.0},
            {"original_max_position_embeddings", 8192}};
}

TEST(ModelShapes, RopeScaling) {
    const auto scaled = parse(config({{"rope_scaling", llama3()}}));
    ASSERT_TRUE(scaled) << scaled.error().message;
    const auto* read = std::get_if<Llama3Scaling>(&scaled->rotary.scaling);
    ASSERT_NE(read, nullptr);
    EXPECT_EQ(read->factor, 8.0);
    EXPECT_EQ(read->original_max_position, 8192.0);
    for (const char* type : {"dynamic", "longrope", "su", "mrope", "unheard-of"}) {
        const auto model = parse(config({{"rope_scaling", {{"type", type}, {"factor", 2.0}}}}));
        ASSERT_TRUE(model) << type;
        ASSERT_EQ(model->obstacles.size(), 1U) << type;
        EXPECT_EQ(model->obstacles.front().key, "rope_scaling.type");
    }
    EXPECT_TRUE(parse(config({{"rope_scaling", {{"type", "default"}}}}))->obstacles.empty());

    EXPECT_EQ(message(config({{"rope_scaling", {{"factor", 2.0}}}})),
              "m.json: rope_scaling: rope_type: is missing");
    json incomplete = llama3();
    incomplete.erase("high_freq_factor");
    EXPECT_EQ(message(config({{"rope_scaling", incomplete}})),
              "m.json: rope_scaling: high_freq_factor: is missing");
    json inverted = llama3();
    inverted["high_freq_factor"] = 1.0;
    EXPECT_EQ(message(config({{"rope_scaling", inverted}})),
              "m.json: rope_scaling: high_freq_factor: is not above low_freq_factor");
    EXPECT_EQ(message(config({{"rope_scaling", "llama3"}})),
              "m.json: rope_scaling: is a string, not an object");
}

TEST(ModelShapes, LinearScalings) {
    const auto linear = parse(config({{"rope_scaling", {{"type", "linear"}, {"factor", 8}}}}));
    ASSERT_TRUE(linear) << linear.error().message;
    EXPECT_TRUE(linear->obstacles.empty());
    ASSERT_TRUE(std::holds_alternative<LinearScaling>(linear->rotary.scaling));
    EXPECT_EQ(std::get<LinearScaling>(linear->rotary.scaling).factor, 8.0);
    EXPECT_EQ(message(config({{"rope_scaling", {{"type", "linear"}}}})),
              "m.json: rope_scaling: factor: is missing");
}

TEST(ModelShapes, Yarn) {
    const auto yarn = [](const json& changes) {
        json scaling{{"rope_type", "yarn"}, {"factor", 4.0}};
        scaling.update(changes);
        return scaling;
    };
    const auto read = [&](const json& changes) {
        const auto model = parse(config({{"rope_scaling", yarn(changes)}}));
        EXPECT_TRUE(model) << model.error().message;
        EXPECT_TRUE(model->obstacles.empty());
        return std::get<YarnScaling>(model->rotary.scaling);
    };
    const YarnScaling least = read(json::object());
    EXPECT_EQ(least.factor, 4.0);
    EXPECT_EQ(least.original_max_position, 8192.0);  // the model's max_position_embeddings
    EXPECT_EQ(least.beta_fast, 32.0);
    EXPECT_EQ(least.beta_slow, 1.0);
    EXPECT_TRUE(least.truncate);
    EXPECT_EQ(least.attention_factor, 0.0);
    const YarnScaling all = read({{"original_max_position_embeddings", 4096},
                                  {"beta_fast", 64},
                                  {"beta_slow", 2},
                                  {"truncate", false},
                                  {"attention_factor", 1.5},
                                  {"mscale", 1.0},
                                  {"mscale_all_dim", 0.5}});
    EXPECT_EQ(all.original_max_position, 4096.0);
    EXPECT_EQ(all.beta_fast, 64.0);
    EXPECT_EQ(all.beta_slow, 2.0);
    EXPECT_FALSE(all.truncate);
    EXPECT_EQ(all.attention_factor, 1.5);
    // DeepSeek's: two mscales, of which one alone says nothing.
    EXPECT_DOUBLE_EQ(read({{"mscale", 1.0}, {"mscale_all_dim", 0.5}}).attention_factor,
                     (0.1 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1));
    EXPECT_EQ(read({{"mscale", 0.707}, {"mscale_all_dim", 0.707}}).attention_factor, 1.0);
    EXPECT_EQ(read({{"mscale", 0.707}}).attention_factor, 0.0);
    EXPECT_EQ(read({{"mscale", 0.707}, {"mscale_all_dim", 0}}).attention_factor, 0.0);

    const auto refusal = [&](const json& changes) {
        return message(config({{"rope_scaling", yarn(changes)}}));
    };
    EXPECT_EQ(refusal({{"factor", nullptr}}), "m.json: rope_scaling: factor: is missing");
    EXPECT_EQ(refusal({{"beta_slow", 32}}),
              "m.json: rope_scaling: beta_fast: is not above beta_slow");
    EXPECT_EQ(refusal({{"truncate", 1}}),
              "m.json: rope_scaling: truncate: is a number, not true or false");
    EXPECT_EQ(refusal({{"attention_factor", -1}}),
              "m.json: rope_scaling: attention_factor: -1 is not above 0");
    EXPECT_EQ(refusal({{"mscale", -100}, {"mscale_all_dim", 1}}),
              "m.json: rope_scaling: mscale: gives no factor above 0");
    EXPECT_EQ(message(without("max_position_embeddings", {{"rope_scaling", yarn(json::object())}})),
              "m.json: rope_scaling: original_max_position_embeddings: is missing");
}

// Ministral 3's: 1 up to the original context.
TEST(ModelShapes, AQueryScaleThatGrows) {
    const auto model = parse(config({{"rope_parameters",
                                      {{"rope_type", "yarn"},
                                       {"factor", 16},
                                       {"original_max_position_embeddings", 4096},
                                       {"llama_4_scaling_beta", 0.1}}}}));
    ASSERT_TRUE(model) << model.error().message;
    ASSERT_EQ(model->obstacles.size(), 1U);
    EXPECT_EQ(model->obstacles.front().key, "rope_parameters.llama_4_scaling_beta");
    EXPECT_TRUE(decodableGeometry(*model, 4096));
    EXPECT_FALSE(decodableGeometry(*model, 4097));
}

TEST(ModelShapes, Softcap) {
    const auto softcap = [](const json& changes) {
        const auto model = parse(config(changes));
        EXPECT_TRUE(model) << model.error().message;
        return model->logit_softcap;
    };
    EXPECT_EQ(softcap(json::object()), 0.0);
    EXPECT_EQ(softcap({{"attn_logit_softcapping", 30.5}}), 30.5);
    EXPECT_EQ(softcap({{"attn_logit_softcapping", nullptr}}), 0.0);
    // The class's own, where the file has none.
    EXPECT_EQ(softcap({{"model_type", "gemma2"}}), 50.0);
    EXPECT_EQ(softcap({{"model_type", "gemma2"}, {"attn_logit_softcapping", nullptr}}), 0.0);

    EXPECT_EQ(message(config({{"attn_logit_softcapping", 0}})),
              "m.json: attn_logit_softcapping: 0 is not above 0");
    EXPECT_EQ(message(config({{"attn_logit_softcapping", -50}})),
              "m.json: attn_logit_softcapping: -50 is not above 0");
}

TEST(ModelShapes, WhatIsNotDecodedYet) {
    const auto keys = [](const json& changes) {
        std::vector<std::string> found;
        const auto model = parse(config(changes));
        EXPECT_TRUE(model) << model.error().message;
        for (const Obstacle& obstacle : model->obstacles)
            found.push_back(obstacle.key);
        return found;
    };
    using Found = std::vector<std::string>;
    EXPECT_EQ(keys(json::object()), Found{});
    EXPECT_EQ(keys({{"alibi", true}}), Found{"alibi"});
    EXPECT_EQ(keys({{"alibi", false}}), Found{});
    EXPECT_EQ(keys({{"model_type", "bloom"}}), Found{"model_type"});
    EXPECT_EQ(keys({{"rope_ratio", 2}}), Found{"rope_ratio"});
    EXPECT_EQ(keys({{"head_dim", 192}}), Found{"head_dim"});
    EXPECT_EQ(keys({{"num_attention_heads", 256}, {"num_key_value_heads", 1}, {"head_dim", 64}}),
              Found{"num_attention_heads"});
    EXPECT_EQ(keys({{"no_rope_layers", {1, 1, 1, 0}}}), Found{"no_rope_layers"});
    EXPECT_EQ(keys({{"no_rope_layers", {1, 1, 1, 1}}}), Found{});
    EXPECT_EQ(keys({{"attention_chunk_size", 64}}), Found{"attention_chunk_size"});

    const auto chunked = parse(config({{"attention_chunk_size", 64}}));
    EXPECT_TRUE(decodableGeometry(*chunked, 64));
    EXPECT_FALSE(decodableGeometry(*chunked, 65));
}

TEST(ModelShapes, RefusedByKey) {
    const auto refused = [](const json& changes, const std::string& key) {
        EXPECT_EQ(message(config(changes)).find("m.json: " + key + ": "), 0U)
            << message(config(changes));
    };
    refused({{"kv_lora_rank", 512}}, "kv_lora_rank");
    refused({{"is_encoder_decoder", true}}, "is_encoder_decoder");
    refused({{"hybrid_override_pattern", "M-M*"}}, "hybrid_override_pattern");
    refused({{"attn_layer_period", 8}}, "attn_layer_period");
    refused({{"num_kv_shared_layers", 2}}, "num_kv_shared_layers");
    refused({{"cross_attention_layers", {3}}}, "cross_attention_layers");
    refused({{"v_head_dim", 64}}, "v_head_dim");
    EXPECT_TRUE(parse(config({{"kv_lora_rank", nullptr}, {"num_kv_shared_layers", 0}})));
}

TEST(ModelShapes, WrongNumbers) {
    EXPECT_EQ(message(without("num_hidden_layers")),
              "m.json: no num_hidden_layers (or n_layer, num_layers, n_layers)");
    EXPECT_EQ(message(without("hidden_size")), "m.json: no hidden_size (or n_embd, d_model)");
    EXPECT_EQ(message(config({{"num_hidden_layers", -4}})),
              "m.json: num_hidden_layers: -4 is out of range: 1 to 16384");
    EXPECT_EQ(message(config({{"num_hidden_layers", 0}})),
              "m.json: num_hidden_layers: 0 is out of range: 1 to 16384");
    EXPECT_EQ(message(config({{"num_hidden_layers", 4.5}})),
              "m.json: num_hidden_layers: 4.5 is not a whole number");
    EXPECT_EQ(message(config({{"num_hidden_layers", "4"}})),
              "m.json: num_hidden_layers: is a string, not a whole number");
    EXPECT_EQ(message(config({{"num_hidden_layers", true}})),
              "m.json: num_hidden_layers: is true or false, not a whole number");
    EXPECT_EQ(message(config({{"num_key_value_heads", {2, 4, 8, 8}}})),
              "m.json: num_key_value_heads: is a list, not a whole number");
    EXPECT_EQ(message(config({{"num_key_value_heads", 3}})),
              "m.json: num_attention_heads: 8 is not a multiple of the 3 KV heads");
    EXPECT_EQ(message(config({{"hidden_size", 1025}})),
              "m.json: hidden_size: 1025 is not a multiple of the 8 query heads, and there is no "
              "head_dim");
    EXPECT_EQ(message(config({{"sliding_window", 0}})),
              "m.json: sliding_window: 0 is too small: at least 1");
    EXPECT_EQ(message(config({{"max_position_embeddings", 18446744073709551615U}})),
              "m.json: max_position_embeddings: 18446744073709551615 is beyond 64 bits");
    EXPECT_EQ(
        messageOf(parseModelConfig(R"({"num_hidden_layers": 10000000000000000000000})", "m.json")),
        "m.json: num_hidden_layers: 1e+22 is beyond 64 bits");
    EXPECT_EQ(
        messageOf(parseModelConfig(R"({"num_hidden_layers": -10000000000000000000000})", "m.json")),
        "m.json: num_hidden_layers: -1e+22 is beyond 64 bits");
}

TEST(ModelShapes, WrongText) {
    for (const char* text : {"", "{", "{\"a\": 1,}", "[1, 2", "nonsense", "{\"a\": 1} x", "\xff"}) {
        EXPECT_EQ(messageOf(parseModelConfig(text, "m.json")).find("m.json: is no JSON: "), 0U)
            << text;
    }
    EXPECT_EQ(messageOf(parseModelConfig("[]", "m.json")), "m.json: is a list, not an object");
    EXPECT_EQ(messageOf(parseModelConfig("null", "m.json")), "m.json: is null, not an object");
    const std::string deep(200000, '[');
    EXPECT_EQ(messageOf(parseModelConfig(deep, "m.json")).find("m.json: is no JSON: "), 0U);
}

class ModelFiles : public testing::Test {
protected:
    void SetUp() override {
        std::string pattern = testing::TempDir() + "kvgrid_models_XXXXXX";
        ASSERT_NE(mkdtemp(pattern.data()), nullptr);
        folder_ = pattern;
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }

    std::string write(const std::string& name, const std::string& text) const {
        const auto path = folder_ / name;
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << text;
        return path.string();
    }

    std::filesystem::path folder_;
};

TEST_F(ModelFiles, AFolderStandsForItsConfig) {
    const std::string path = write("my-model/config.json", config().dump());
    EXPECT_EQ(loadModelConfig(path)->name, "my-model");
    EXPECT_EQ(loadModelConfig((folder_ / "my-model").string())->name, "my-model");
    EXPECT_EQ(loadModelConfig(write("other.json", config().dump()))->name, "other");
}

TEST_F(ModelFiles, MissingOrNoFile) {
    const std::string missing = (folder_ / "none.json").string();
    EXPECT_EQ(messageOf(loadModelConfig(missing)), missing + ": no such file");
    EXPECT_EQ(messageOf(loadModelConfig("/dev/zero")), "/dev/zero: is not a regular file");
    EXPECT_EQ(messageOf(loadModelConfig("no-such-model"))
                  .find("model 'no-such-model' is neither shipped nor a file"),
              0U);
    EXPECT_EQ(messageOf(loadModelConfig(folder_.string())),
              (folder_ / "config.json").string() + ": no such file");
    const std::string empty = write("empty.json", "");
    EXPECT_EQ(messageOf(loadModelConfig(empty)).find(empty + ": is no JSON: "), 0U);
}

}  // namespace
}  // namespace kvgrid::launch
