// The fixed scales of a checkpoint: what is read, and what is refused, naming file and tensor.
#include "launch/kv_scales.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "launch/safetensors.h"
#include "tests/launch/safetensors_file.h"

namespace kvgrid::launch {
namespace {

using test::safetensors;
using test::TensorInFile;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

using Tensors = std::vector<TensorInFile>;

const Geometry two_layers = Geometry::uniform(2, 8, 4, 64);

// Of both layers: K of layer 0 first.
Tensors good() {
    return {{"model.layers.0.self_attn.k_scale", {1}, {0.25F}},
            {"model.layers.0.self_attn.v_scale", {1}, {0.5F}},
            {"model.layers.1.self_attn.k_scale", {1}, {0.01F}},
            {"model.layers.1.self_attn.v_scale", {1}, {2.0F}}};
}

class KvScalesTest : public testing::Test {
protected:
    std::string write(const std::string& bytes, const std::string& name = "model.safetensors") {
        test::writeText(folder_ / name, bytes);
        return folder_ / name;
    }
    std::vector<KvScales> read(const Tensors& tensors, const Geometry& geometry = two_layers) {
        const auto scales = readKvScales(write(safetensors(tensors)), geometry);
        if (!scales) ADD_FAILURE() << scales.error().message;
        return scales.value_or(std::vector<KvScales>());
    }
    // Why a file is refused; it always says which file.
    std::string refused(const std::string& bytes, const Geometry& geometry = two_layers) {
        const std::string path = write(bytes);
        const auto scales = readKvScales(path, geometry);
        if (scales) return "(no error)";
        EXPECT_EQ(scales.error().code, ErrorCode::invalid_argument);
        EXPECT_EQ(scales.error().message.find(path + ": "), 0U) << scales.error().message;
        return scales.error().message;
    }
    std::string refusedTensors(const Tensors& tensors, const Geometry& geometry = two_layers) {
        return refused(safetensors(tensors), geometry);
    }

    test::TempFolder folder_;
};

TEST_F(KvScalesTest, AScaleOfALayerIsThatOfAllItsHeads) {
    const auto scales = read(good());
    ASSERT_EQ(scales.size(), 2U);
    EXPECT_EQ(scales[0].k, std::vector<float>(4, 0.25F));
    EXPECT_EQ(scales[0].v, std::vector<float>(4, 0.5F));
    EXPECT_EQ(scales[1].k, std::vector<float>(4, 0.01F));
    EXPECT_EQ(scales[1].v, std::vector<float>(4, 2.0F));
}

TEST_F(KvScalesTest, DtypesAndShapes) {
    Tensors tensors = good();
    tensors[0] = {"model.layers.0.self_attn.k_scale", {4}, {1e-3F, 50.0F, 0.3F, 1.0F}};
    tensors[1] = {"model.layers.0.self_attn.v_scale", {}, {0.3F}, "F16"};
    tensors[2] = {"model.layers.1.self_attn.k_scale", {4, 1, 1}, {1.0F, 2.0F, 0.3F, 3.0F}, "BF16"};
    tensors[3] = {"model.layers.1.self_attn.v_scale", {1, 1}, {0.3F}};
    const auto scales = read(tensors);
    EXPECT_THAT(scales[0].k, ElementsAre(1e-3F, 50.0F, 0.3F, 1.0F));
    EXPECT_EQ(scales[0].v, std::vector<float>(4, 0.300048828125F));
    EXPECT_THAT(scales[1].k, ElementsAre(1.0F, 2.0F, 0.30078125F, 3.0F));
    EXPECT_EQ(scales[1].v, std::vector<float>(4, 0.3F));
}

// Names that checkpoints have, among tensors that are none of these.
TEST_F(KvScalesTest, Names) {
    for (const auto& [k, v] : std::vector<std::pair<std::string, std::string>>{
             {"model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"},
             {"layers.0.k_scale", "layers.0.v_scale"},
             {"model.layers.0.self_attn.attn.k_scale", "model.layers.0.self_attn.attn.v_scale"},
             {"model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale"},
             {"language_model.model.layers.0.self_attn.qkv_proj.k_scale",
              "language_model.model.layers.0.self_attn.qkv_proj.v_scale"},
             {"model.layers.0.self_attn.k_proj.output_scale",
              "model.layers.0.self_attn.v_proj.output_scale"}}) {
        const auto scales =
            read({{k, {1}, {0.25F}},
                  {"model.layers.0.self_attn.q_scale", {1}, {7.0F}},
                  {"model.layers.0.self_attn.k_proj.weight_scale", {2}, {7.0F, 8.0F}},
                  {"model.layers.0.self_attn.q_proj.output_scale", {1}, {7.0F}},
                  {"model.layers.9.mlp.input_scale", {1}, {0.0F}},
                  {"model.layers.0.notk_scale", {1}, {7.0F}},
                  {"model.layers.x.k_scale", {1}, {7.0F}},
                  {"model.norm.k_scale", {1}, {7.0F}},
                  {v, {1}, {0.5F}}},
                 Geometry::uniform(1, 8, 4, 64));
        ASSERT_EQ(scales.size(), 1U) << k;
        EXPECT_EQ(scales[0].k, std::vector<float>(4, 0.25F)) << k;
        EXPECT_EQ(scales[0].v, std::vector<float>(4, 0.5F)) << k;
    }
    const auto both =
        read({{"model.layers.0.self_attn.kv_scale", {}, {0.25F}}}, Geometry::uniform(1, 8, 4, 64));
    ASSERT_EQ(both.size(), 1U);
    EXPECT_EQ(both[0].k, std::vector<float>(4, 0.25F));
    EXPECT_EQ(both[0].v, both[0].k);
}

TEST_F(KvScalesTest, LayersMayDifferInKvHeadsAndHaveNone) {
    Geometry geometry = Geometry::uniform(3, 8, 4, 64);
    geometry.groups[0].layers = {0};
    geometry.groups.push_back({.layers = {2}, .kv_heads = 2, .head_dim = 64});
    const Tensors tensors{{"model.layers.0.attn.kv_scale", {4}, {1.0F, 2.0F, 3.0F, 4.0F}},
                          {"model.layers.2.attn.kv_scale", {2}, {5.0F, 6.0F}}};
    const auto scales = read(tensors, geometry);
    ASSERT_EQ(scales.size(), 3U);
    EXPECT_THAT(scales[0].v, ElementsAre(1.0F, 2.0F, 3.0F, 4.0F));
    EXPECT_TRUE(scales[1].k.empty() && scales[1].v.empty());
    EXPECT_THAT(scales[2].k, ElementsAre(5.0F, 6.0F));

    Geometry part = Geometry::uniform(1, 4, 2, 64);
    const auto first = scalesOf(part, scales);
    ASSERT_EQ(first.size(), 1U);
    EXPECT_THAT(first[0].k, ElementsAre(1.0F, 2.0F));

    Tensors of_none = tensors;
    of_none.push_back({"model.layers.1.attn.k_scale", {1}, {1.0F}});
    EXPECT_THAT(refusedTensors(of_none, geometry),
                HasSubstr("model.layers.1.attn.k_scale: the model has no layer 1 with KV"));
}

// TensorRT-LLM#16916: what is missing must not be made up.
TEST_F(KvScalesTest, MissingScalesAreRefused) {
    for (std::size_t missing = 0; missing < 4; ++missing) {
        Tensors tensors = good();
        tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(missing));
        EXPECT_THAT(refusedTensors(tensors),
                    HasSubstr(std::string(missing % 2 == 0 ? "no k_scale" : "no v_scale") +
                              " of layer " + std::to_string(missing / 2)));
    }
    EXPECT_THAT(refusedTensors({}), HasSubstr("no k_scale of layer 0"));
    EXPECT_THAT(refusedTensors(good(), Geometry::uniform(1, 8, 4, 64)),
                HasSubstr("model.layers.1.self_attn.k_scale: the model has no layer 1"));
    Tensors twice = good();
    twice.push_back({"model.layers.1.self_attn.attn.v_scale", {1}, {2.0F}});
    EXPECT_THAT(refusedTensors(twice), AllOf(HasSubstr("the layer has a scale already"),
                                             HasSubstr("model.layers.1.self_attn.attn.v_scale"),
                                             HasSubstr("model.layers.1.self_attn.v_scale")));
}

TEST_F(KvScalesTest, ValuesThatAreNoScaleAreRefused) {
    using Limits = std::numeric_limits<float>;
    for (const std::string dtype : {"F32", "F16", "BF16"})
        for (const float wrong :
             {0.0F, -0.0F, -0.25F, Limits::quiet_NaN(), Limits::infinity(), 1e-5F, 2000.0F}) {
            Tensors tensors = good();
            tensors[3] = {tensors[3].name, {4}, {1.0F, 1.0F, wrong, 1.0F}, dtype};
            EXPECT_THAT(refusedTensors(tensors),
                        AllOf(HasSubstr("model.layers.1.self_attn.v_scale, KV head 2: "),
                              HasSubstr("is not in [2^-14, 1000]")));
            tensors[3] = {tensors[3].name, {}, {wrong}, dtype};
            EXPECT_THAT(refusedTensors(tensors), HasSubstr("self_attn.v_scale: "));
        }
    Tensors shifted = good();
    shifted.push_back({"model.layers.0.self_attn.k_zero_point", {1}, {0.0F}});
    EXPECT_THAT(refusedTensors(shifted), HasSubstr("k_zero_point: zero points are not supported"));
}

TEST_F(KvScalesTest, OtherShapesAreRefused) {
    for (const std::vector<std::int64_t>& shape :
         std::vector<std::vector<std::int64_t>>{{0}, {2}, {8}, {1, 4}, {2, 2}, {4, 0}, {1, 1, 2}}) {
        std::size_t count = 1;
        for (const std::int64_t dimension : shape)
            count *= static_cast<std::size_t>(dimension);
        Tensors tensors = good();
        tensors[2] = {tensors[2].name, shape, std::vector<float>(count, 1.0F)};
        EXPECT_THAT(refusedTensors(tensors), AllOf(HasSubstr("model.layers.1.self_attn.k_scale: "),
                                                   HasSubstr("its shape is not [], [1] or [4]")));
    }
    // The bytes are of another count, or of a format that holds no scales.
    Tensors tensors = good();
    tensors[2] = {tensors[2].name, {4}, {1.0F}};
    EXPECT_THAT(refusedTensors(tensors), HasSubstr("k_scale: 4 bytes for 4 values of F32"));
    tensors[2] = {tensors[2].name, {1}, {1.0F, 1.0F}};
    EXPECT_THAT(refusedTensors(tensors), HasSubstr("k_scale: 8 bytes for 1 values of F32"));
    tensors[2] = {tensors[2].name, {1}, {1.0F}, "F8_E4M3"};
    EXPECT_THAT(refusedTensors(tensors), HasSubstr("k_scale: dtype F8_E4M3, not F32, F16 or BF16"));
}

TEST_F(KvScalesTest, FilesThatAreNotWholeAreRefused) {
    const std::string whole = safetensors(good());
    for (std::size_t bytes = 0; bytes < whole.size(); ++bytes)
        EXPECT_NE(refused(whole.substr(0, bytes)), "(no error)") << bytes;
    EXPECT_THAT(refused(whole + "1"), HasSubstr("bytes behind the last tensor"));
    EXPECT_THAT(refused("12"), HasSubstr("shorter than 8 bytes"));
    EXPECT_THAT(refused(std::string(100, '\xff')), HasSubstr("a header of 18446744073709551615"));

    const auto header = [&](const std::string& text, std::size_t data_bytes = 8) {
        return refused(safetensors(text, std::string(data_bytes, '\0')));
    };
    const std::string a = R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
    const auto b = [](const std::string& from, const std::string& to) {
        return R"("b":{"dtype":"F32","shape":[1],"data_offsets":[)" + from + "," + to + "]}";
    };
    EXPECT_THAT(header("{"), HasSubstr("the header is no JSON"));
    EXPECT_THAT(header("[]"), HasSubstr("the header is no object"));
    EXPECT_THAT(header("{" + a + "," + b("2", "8") + "}"), HasSubstr("b: overlaps"));
    EXPECT_THAT(header("{" + a + "," + b("6", "8") + "}"), HasSubstr("b: bytes before it"));
    // The same bytes twice would leave no hole.
    EXPECT_THAT(header("{" + a + "," + a + "}", 4), HasSubstr("the header a is there twice"));
    EXPECT_THAT(
        header(R"({"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,4]}})", 4),
        HasSubstr("dtype is there twice"));
    EXPECT_THAT(header("{" + a + "," + b("4", "12") + "}"), HasSubstr("b: data_offsets"));
    EXPECT_THAT(header("{" + a + "," + b("8", "4") + "}"), HasSubstr("b: data_offsets"));
    EXPECT_THAT(header("{" + a + "," + b("-4", "8") + "}"), HasSubstr("b: data_offsets"));
    EXPECT_THAT(header("{" + a + "," + b("4.5", "8") + "}"), HasSubstr("b: data_offsets"));
    EXPECT_THAT(header(R"({"a":null})"), HasSubstr("a: "));
    EXPECT_THAT(header(R"({"a":{"shape":[1],"data_offsets":[0,8]}})"), HasSubstr("a: dtype"));
    EXPECT_THAT(header(R"({"a":{"dtype":"F32","shape":null,"data_offsets":[0,8]}})"),
                HasSubstr("a: shape"));
    EXPECT_THAT(header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})"),
                HasSubstr("a: data_offsets"));
}

TEST_F(KvScalesTest, ReadsNoMoreThanWasAskedFor) {
    const std::string path = write(safetensors(Tensors{{"wide", {3, 1 << 20}, {}}}));
    EXPECT_THROW(static_cast<void>(Safetensors(path).read("wide", 1 << 20)), Error);
    EXPECT_THROW(static_cast<void>(Safetensors(path).read("other", 1)), Error);
}

TEST_F(KvScalesTest, FoldersAndIndexes) {
    const Tensors all = good();
    const auto expected = read(all);
    // A folder with one file.
    EXPECT_EQ(readKvScales(folder_.path(), two_layers), expected);
    // With an index the files are those that it names.
    write(safetensors(Tensors{all[0], all[3], {"model.layers.0.mlp.weight", {2}, {1.0F, 2.0F}}}),
          "a");
    write(safetensors(Tensors{all[1], all[2]}), "b");
    nlohmann::json index = {{"weight_map",
                             {{all[0].name, "a"},
                              {all[3].name, "a"},
                              {"model.layers.0.mlp.weight", "a"},
                              {"model.embed_tokens.weight", "not here"},
                              {all[1].name, "b"},
                              {all[2].name, "b"}}}};
    const std::string path = write(index.dump(), "model.safetensors.index.json");
    EXPECT_EQ(readKvScales(path, two_layers), expected);
    std::filesystem::remove(folder_ / "model.safetensors");
    EXPECT_EQ(readKvScales(folder_.path(), two_layers), expected);

    const auto index_refused = [&](const nlohmann::json& changed) {
        write(changed.dump(), "model.safetensors.index.json");
        const auto scales = readKvScales(path, two_layers);
        return scales ? "(no error)" : scales.error().message;
    };
    nlohmann::json changed = index;
    changed["weight_map"][all[1].name] = "a";
    EXPECT_THAT(index_refused(changed), AllOf(HasSubstr(all[1].name + ": is not there"),
                                              HasSubstr("/a: "), HasSubstr("index.json says")));
    for (const nlohmann::json& file : {nlohmann::json("../b"), nlohmann::json("/b"),
                                       nlohmann::json(nullptr), nlohmann::json(3)}) {
        changed = index;
        changed["weight_map"][all[2].name] = file;
        EXPECT_THAT(index_refused(changed),
                    HasSubstr(all[2].name + ": is not in a file of this folder"));
    }
    changed = index;
    changed["weight_map"].erase(all[3].name);
    EXPECT_THAT(index_refused(changed), HasSubstr("no v_scale of layer 1"));
    changed["weight_map"][all[3].name] = "c";
    EXPECT_THAT(index_refused(changed), HasSubstr("/c: no such file"));
    EXPECT_THAT(index_refused({{"weight_map", 1}}), HasSubstr("no weight_map"));
    EXPECT_THAT(index_refused(nlohmann::json::array()), HasSubstr("index.json"));
    EXPECT_THAT(readKvScales(folder_ / "d", two_layers).error().message,
                HasSubstr("/d: no such file"));
    std::filesystem::remove(path);
    EXPECT_THAT(readKvScales(folder_.path(), two_layers).error().message,
                HasSubstr("model.safetensors: no such file"));
}

}  // namespace
}  // namespace kvgrid::launch
