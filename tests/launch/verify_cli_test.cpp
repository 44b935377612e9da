// kvgrid verify as its users run it: one digest however the work is spread, and wrong values seen.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "tests/launch/run_ranks.h"
#include "tests/launch/safetensors_file.h"

namespace kvgrid::test {
namespace {

using Arguments = std::vector<std::string>;

Finished verify(int ranks, const Arguments& arguments, const Arguments& environment = {}) {
    return runRanks(ranks, joined({"verify", "--device", "cpu"}, arguments), environment);
}

// The digest of a run that is right.
std::string digestOf(int ranks, const Arguments& arguments) {
    const Finished finished = verify(ranks, arguments);
    EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
    EXPECT_EQ(finished.lastLine(), "OK");
    const std::string error = valueOf(finished.out, "\nmax_rel_error: ");
    EXPECT_GT(std::strtod(error.c_str(), nullptr), 0) << finished.out;
    EXPECT_LE(std::strtod(error.c_str(), nullptr), 1e-5) << finished.out;
    const std::string digest = valueOf(finished.out, "\noutput_digest: ");
    EXPECT_EQ(digest.size(), 16U) << finished.out;
    EXPECT_EQ(digest.find_first_not_of("0123456789abcdef"), std::string::npos);
    return digest;
}

// 600 tokens: stripes that are whole, and one that is not.
const Arguments llama{"--model", "llama-3.1-8b", "--layers", "2",       "--context",
                      "600",     "--batch",      "3",        "--steps", "4"};

class VerifyDigest : public testing::Test {
protected:
    static void SetUpTestSuite() { expected = digestOf(1, llama); }
    static std::string expected;
};
std::string VerifyDigest::expected;

TEST_F(VerifyDigest, IsTheSameForAllRankCounts) {
    for (const int ranks : {2, 4, 8})
        EXPECT_EQ(digestOf(ranks, llama), expected) << ranks;
}

TEST_F(VerifyDigest, IsTheSameForAllBlockSizes) {
    for (const char* size : {"1", "16", "256"})
        EXPECT_EQ(digestOf(2, joined(llama, {"--block-size", size})), expected) << size;
}

TEST_F(VerifyDigest, IsTheSameForAllLayouts) {
    for (const char* layout : {"layer-major", "contiguous"})
        EXPECT_EQ(digestOf(2, joined(llama, {"--layout", layout})), expected) << layout;
}

TEST_F(VerifyDigest, IsTheSameForAllThreads) {
    for (const char* threads : {"1", "2", "5"})
        EXPECT_EQ(digestOf(1, joined(llama, {"--threads", threads})), expected) << threads;
}

TEST_F(VerifyDigest, DependsOnTheSeed) {
    EXPECT_NE(digestOf(1, joined(llama, {"--seed", "1"})), expected);
}

TEST_F(VerifyDigest, DependsOnTheKvFormat) {
    EXPECT_NE(digestOf(2, joined(llama, {"--kv-dtype", "fp16"})), expected);
}

TEST_F(VerifyDigest, OfASequenceAloneIsThatAmongOthers) {
    const Arguments base{"--model", "llama-3.1-8b", "--layers", "1", "--context", "600"};
    const std::string alone = digestOf(2, joined(base, {"--batch", "1"}));
    const Finished among = verify(2, joined(base, {"--batch", "5"}));
    EXPECT_EQ(valueOf(among.out, "the outputs of sequence 0 digest to "), alone) << among.out;
}

TEST_F(VerifyDigest, CoversAllContextsOnce) {
    const Arguments base{"--model", "llama-3.1-8b", "--layers", "1", "--batch", "2"};
    const std::string one = digestOf(1, joined(base, {"--context", "300"}));
    const Finished both = verify(2, joined(base, {"--context", "300,512"}));
    EXPECT_EQ(both.code, 0) << both.out;
    EXPECT_EQ(countOf(both.out, "output_digest:"), 1);
    EXPECT_NE(valueOf(both.out, "output_digest: "), one);
    EXPECT_TRUE(contains(both.out, one + "\n")) << both.out;  // in the row of 300
}

class VerifyLowBit : public testing::TestWithParam<const char*> {};

TEST_P(VerifyLowBit, OneDigestHoweverItIsSpread) {
    const Arguments low = joined(llama, {"--kv-dtype", GetParam()});
    const std::string expected = digestOf(1, low);
    for (const int ranks : {2, 8})
        EXPECT_EQ(digestOf(ranks, low), expected) << ranks;
    for (const char* size : {"1", "4", "256"})
        EXPECT_EQ(digestOf(2, joined(low, {"--block-size", size})), expected) << size;
    for (const char* layout : {"layer-major", "contiguous"})
        EXPECT_EQ(digestOf(2, joined(low, {"--layout", layout})), expected) << layout;
    EXPECT_NE(digestOf(2, llama), expected);
}

INSTANTIATE_TEST_SUITE_P(Formats, VerifyLowBit, testing::Values("fp8", "int8"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST(Verify, SaysWhatLowBitNumbersCost) {
    const auto row_of = [](const char* format) {
        const Finished finished =
            verify(2, {"--layers", "1", "--context", "128", "--kv-dtype", format, "--json", "-"});
        EXPECT_EQ(finished.code, 0) << finished.err;
        return nlohmann::json::parse(finished.out)["rows"][0];
    };
    EXPECT_FALSE(row_of("bf16").contains("unquantised_rel_error"));
    // Half a unit is up to 2^-4 of an e4m3 number, and 1 / 254 of the largest of an int8 row.
    const auto fp8 = row_of("fp8");
    EXPECT_LT(fp8["unquantised_rel_error"], 0.1);
    const auto int8 = row_of("int8");
    EXPECT_LT(int8["unquantised_rel_error"], fp8["unquantised_rel_error"]);
    EXPECT_GT(int8["unquantised_rel_error"], 1e-3);
    EXPECT_EQ(int8["stored_wrong"], 0);
}

// Of 32 layers, whose scales a checkpoint has, 2 run.
const Arguments scaled{
    "--model", "llama-3.1-8b", "--layers", "2",        "--context", "300", "--batch",
    "2",       "--steps",      "2",        "--warmup", "1"};

TEST_P(VerifyLowBit, FixedScalesGiveOneDigestToo) {
    const TempFolder folder;
    const std::string file = folder / "model.safetensors";
    writeText(file, safetensors(layerScales(32, 0.02F, 0.01F)));
    const Arguments low = joined(scaled, {"--kv-dtype", GetParam()});
    const Arguments fixed = joined(low, {"--kv-scales", file});
    const std::string expected = digestOf(1, fixed);
    for (const int ranks : {2, 4})
        EXPECT_EQ(digestOf(ranks, fixed), expected) << ranks;
    EXPECT_EQ(digestOf(2, joined(fixed, {"--block-size", "4"})), expected);
    EXPECT_EQ(digestOf(1, joined(low, {"--kv-scales", folder.path()})), expected);
    EXPECT_NE(digestOf(2, low), expected);
    // Far from what the data need, they still are what is stored. (int8 would make all of 50 zero.)
    for (const float scale : {1e-3F, GetParam() == std::string("fp8") ? 50.0F : 1.0F}) {
        writeText(file, safetensors(layerScales(32, scale, scale)));
        EXPECT_NE(digestOf(2, fixed), expected) << scale;
    }
}

TEST(Verify, FixedScalesOfEachHead) {
    const TempFolder folder;
    std::vector<TensorInFile> tensors = layerScales(32, 0.02F, 0.01F);
    for (TensorInFile& tensor : tensors) {
        tensor.shape = {8};
        tensor.dtype = "BF16";
        for (int head = 1; head < 8; ++head)
            tensor.values.push_back(tensor.values.front() * static_cast<float>(1 + head));
    }
    writeText(folder / "scales", safetensors(tensors));
    const Arguments fixed = joined(scaled, {"--kv-dtype", "fp8", "--kv-scales", folder / "scales"});
    EXPECT_EQ(digestOf(4, fixed), digestOf(1, fixed));
    const Finished json = verify(2, joined(fixed, {"--share-of", "2", "--json", "-"}));
    EXPECT_EQ(json.code, 0) << json.err;
    const auto report = nlohmann::json::parse(json.out);
    EXPECT_EQ(report["kv_scales"], folder / "scales");
    EXPECT_EQ(report["rows"][0]["stored_wrong"], 0);
    EXPECT_TRUE(contains(json.err, "# KV scales: fixed, from " + (folder / "scales") + "; K "))
        << json.err;
}

TEST(Verify, RefusesScalesThatAreNotThere) {
    const TempFolder folder;
    const std::string file = folder / "model.safetensors";
    const auto refused = [&](const Arguments& arguments, const std::string& why) {
        const Finished finished =
            verify(1, joined(joined(scaled, {"--kv-scales", file}), arguments));
        EXPECT_EQ(finished.code, 2) << finished.out << finished.err;
        EXPECT_TRUE(contains(finished.err, why)) << finished.err;
    };
    refused({"--kv-dtype", "fp8"}, "--kv-scales: " + file + ": no such file");
    writeText(file, safetensors(layerScales(32, 0.02F, 0.01F)));
    refused({}, "--kv-scales: bf16 has no scales");
    refused({"--kv-dtype", "fp16"}, "--kv-scales: fp16 has no scales");
    writeText(file, safetensors(layerScales(31, 0.02F, 0.01F)));
    refused({"--kv-dtype", "fp8"}, "--kv-scales: " + file + ": no k_scale of layer 31");
    writeText(file, safetensors(layerScales(80, 0.02F, 0.01F)));
    refused({"--kv-dtype", "int8"}, "model.layers.32.self_attn.k_scale: the model has no layer 32");
    writeText(file, safetensors(layerScales(32, 0.0F, 0.01F)));
    refused({"--kv-dtype", "int8"}, "model.layers.0.self_attn.k_scale: 0 is not in");
}

TEST(Verify, SmolLm2OnOneAndThreeRanks) {
    const Arguments arguments{"--model", "smollm2-135m", "--context", "300", "--steps", "2"};
    EXPECT_EQ(digestOf(1, arguments), digestOf(3, arguments));
}

TEST(Verify, FalconGroupOf71) {
    digestOf(1, {"--model", "falcon-7b", "--layers", "1", "--context", "1K", "--steps", "2"});
}

TEST(Verify, Phi3HeadDim96) {
    const Arguments arguments{"--model", "phi-3-mini-4k", "--layers", "1", "--context",
                              "1K",      "--steps",       "2"};
    EXPECT_EQ(digestOf(1, arguments), digestOf(4, arguments));
}

// The same digest on 1, 2 and 4 ranks.
void expectRightOnAnyRanks(const std::string& model, const std::string& context) {
    const Arguments arguments{"--model", model,       "--layers", "2",       "--batch",
                              "2",       "--context", context,    "--steps", "2"};
    const std::string digest = digestOf(1, arguments);
    for (const int ranks : {2, 4})
        EXPECT_EQ(digestOf(ranks, arguments), digest) << ranks;
}

TEST(Verify, Gemma2SoftcapsScores) {
    expectRightOnAnyRanks("gemma-2-9b", "600");
}

TEST(Verify, GptOssHasSinksAndYarn) {
    expectRightOnAnyRanks("gpt-oss-120b", "128");
}

TEST(Verify, Phi2RotatesAPartOfAHead) {
    expectRightOnAnyRanks("phi-2-msft", "300");
}

// As Qwen 2.5 is told to read longer contexts; the positions go beyond the original ones.
TEST(Verify, YarnBeyondTheOriginalContext) {
    const TempFolder folder;
    const std::string path = folder / "yarn.json";
    writeText(path, R"({"model_type": "qwen2", "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584,
        "rope_theta": 1000000.0, "max_position_embeddings": 1024, "rope_scaling":
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}})");
    expectRightOnAnyRanks(path, "600");
}

TEST(Verify, LanesOfSeveralStripes) {
    const Arguments arguments{
        "--model", "llama-3.2-1b", "--share-of", "8",       "--layers", "1", "--batch",
        "1",       "--context",    "17000",      "--steps", "2"};
    EXPECT_EQ(digestOf(1, arguments),
              digestOf(1, joined(arguments, {"--layout", "contiguous", "--threads", "2"})));
}

TEST(Verify, OffloadsAndRestores) {
    const TempFolder folder;
    const std::string json = folder / "v.json";
    // 6 sequences of 32 blocks; a device pool of 48.
    digestOf(2, {"--model", "llama-3.1-8b", "--layers", "1", "--context", "512", "--batch", "6",
                 "--block-size", "16", "--device-blocks", "48", "--json", json});
    const auto row = nlohmann::json::parse(readText(json))["rows"][0];
    EXPECT_GE(row["offloaded_blocks"], 900);
    EXPECT_GE(row["restored_blocks"], 900);
    EXPECT_EQ(row["distinct_offloaded_blocks"], 6 * 32);
    EXPECT_GE(row["replayed"], 60);  // 10 tokens of 6 sequences, at least
    EXPECT_EQ(row["replayed_different"], 0);
}

// A small model of two layer groups: of six layers, two see all and four see 100 tokens, with a
// rotary embedding of their own.
class VerifyWindows : public testing::Test {
protected:
    void SetUp() override {
        writeText(model_,
                  R"({"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 64,
                      "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 100,
                      "sliding_window_pattern": 3, "max_position_embeddings": 8192})");
    }

    [[nodiscard]] Arguments arguments(const Arguments& more = {}) const {
        return argumentsOf(model_, more);
    }
    static Arguments argumentsOf(const std::string& model, const Arguments& more = {}) {
        return joined({"--model", model, "--context", "600", "--batch", "3", "--steps", "4"}, more);
    }

    const TempFolder folder_;
    const std::string model_ = folder_ / "windows.json";
};

TEST_F(VerifyWindows, OneDigestHoweverTheWorkIsSpread) {
    const std::string expected = digestOf(1, arguments());
    for (const int ranks : {2, 8})
        EXPECT_EQ(digestOf(ranks, arguments()), expected) << ranks;
    for (const char* size : {"1", "16", "256"})
        EXPECT_EQ(digestOf(2, arguments({"--block-size", size})), expected) << size;
    for (const char* layout : {"layer-major", "contiguous"})
        EXPECT_EQ(digestOf(2, arguments({"--layout", layout})), expected) << layout;
    EXPECT_EQ(digestOf(1, arguments({"--threads", "5"})), expected);
}

TEST_F(VerifyWindows, AreMoreThanNone) {
    std::string whole = readText(model_);
    whole.replace(whole.find("100"), 3, "600");
    const std::string wide = folder_ / "wide.json";
    writeText(wide, whole);
    EXPECT_NE(digestOf(1, argumentsOf(wide)), digestOf(1, arguments()));
}

TEST_F(VerifyWindows, DecodeInPoolsThatHoldLittleMore) {
    const std::string json = folder_ / "v.json";
    // 600 tokens are 38 blocks of 16; the window is 8 of them, and 40 while a step fills 512.
    EXPECT_EQ(
        digestOf(2, arguments({"--block-size", "16", "--device-blocks", "40", "--json", json})),
        digestOf(1, arguments()));
    const auto report = nlohmann::json::parse(readText(json));
    EXPECT_GE(report["rows"][0]["restored_blocks"], 300);
    EXPECT_EQ(report["rows"][0]["replayed_different"], 0);
    ASSERT_EQ(report["layer_groups"].size(), 2U);
    EXPECT_TRUE(report["layer_groups"][0]["window_tokens"].is_null());
    EXPECT_EQ(report["layer_groups"][1]["window_tokens"], 100);
    EXPECT_EQ(report["layer_groups"][1]["layers"], 4);
}

// Beyond their windows of 512, 2047 and 4096 tokens.
TEST(Verify, ShippedModelsWithWindows) {
    const Arguments gemma{"--model", "gemma-3-1b", "--layers", "6",       "--context",
                          "1K",      "--batch",    "2",        "--steps", "2"};
    EXPECT_EQ(digestOf(1, gemma), digestOf(1, joined(gemma, {"--block-size", "256"})));
    const Arguments phi{"--model", "phi-3-mini-4k", "--layers", "1",       "--context",
                        "2500",    "--batch",       "1",        "--steps", "2"};
    EXPECT_EQ(digestOf(1, phi), digestOf(4, phi));
    const Arguments mistral{"--model", "mistral-7b-v0.1", "--layers", "1",       "--context",
                            "4500",    "--batch",         "1",        "--steps", "2"};
    EXPECT_EQ(digestOf(1, mistral), digestOf(2, joined(mistral, {"--layout", "contiguous"})));
}

TEST(Verify, SaysInJsonWhatItSays) {
    const Finished finished = verify(2, {"--layers", "1", "--context", "128", "--json", "-"});
    EXPECT_EQ(finished.code, 0) << finished.err;
    const auto json = nlohmann::json::parse(finished.out);
    EXPECT_EQ(json["schema_version"], 1);
    EXPECT_EQ(json["command"], "verify");
    EXPECT_EQ(json["ok"], true);
    EXPECT_EQ(json["ranks"].size(), 2U);
    EXPECT_EQ(json["output_digest"], json["rows"][0]["output_digest"]);
    EXPECT_EQ(json["rows"][0]["vectors_checked"], 1 * 4 * 32 * 8);
    EXPECT_EQ(json["rows"][0]["stored_wrong"], 0);
    EXPECT_TRUE(contains(finished.err, "output_digest: "));
    EXPECT_TRUE(contains(finished.err, "\nOK\n"));
}

struct Planted {
    const char* fault;
    const char* reason;
};

void PrintTo(const Planted& planted, std::ostream* out) {
    *out << planted.fault;
}

class VerifySees : public testing::TestWithParam<Planted> {};

TEST_P(VerifySees, APlantedFault) {
#ifndef KVGRID_FAULT_INJECTION
    GTEST_SKIP() << "built without KVGRID_FAULT_INJECTION";
#endif
    const Finished finished = verify(2, {"--layers", "1", "--context", "128"},
                                     {std::string("KVGRID_PLANT=") + GetParam().fault});
    EXPECT_EQ(finished.code, 1) << finished.out;
    EXPECT_TRUE(contains(finished.lastLine(), "FAILED: ")) << finished.out;
    EXPECT_TRUE(contains(finished.lastLine(), GetParam().reason)) << finished.out;
}

INSTANTIATE_TEST_SUITE_P(Faults, VerifySees,
                         testing::Values(Planted{"value", "max_rel_error"},
                                         Planted{"replay", "changed in turns with offload"},
                                         Planted{"digest", "other gathered outputs"}),
                         [](const auto& tested) { return std::string(tested.param.fault); });

struct Refused {
    const char* name;
    int ranks;
    Arguments arguments;
    int code;
    std::string reason;
};

void PrintTo(const Refused& refused, std::ostream* out) {
    *out << refused.name;
}

class VerifyRefuses : public testing::TestWithParam<Refused> {};

TEST_P(VerifyRefuses, WithAReasonAndACode) {
    const Refused& refused = GetParam();
    const Finished finished = verify(refused.ranks, refused.arguments);
    EXPECT_EQ(finished.code, refused.code) << finished.out;
    EXPECT_TRUE(contains(finished.lastLine(), "FAILED: ")) << finished.out;
    EXPECT_TRUE(contains(finished.lastLine(), refused.reason)) << finished.out;
    EXPECT_EQ(countOf(finished.out, "FAILED"), 1) << finished.out;
}

INSTANTIATE_TEST_SUITE_P(
    BadInput, VerifyRefuses,
    testing::Values(
        Refused{"Ranks", 3, {}, 2, "3 does not divide the 8 KV heads; 1, 2, 4 or 8 would do"},
        Refused{"Grid", 2, {"--grid", "4x1"}, 2, "grid 4x1 has 4 ranks, not 2"},
        Refused{"Mla", 1, {"--model", "deepseek-v3"}, 2, "kv_lora_rank"},
        Refused{"Positions", 1, {"--context", "1M"}, 2, "max_position_embeddings 131072"},
        Refused{"Missing", 1, {"--model", "no/such.json"}, 2, "no/such.json"},
        Refused{"Layers", 1, {"--layers", "33"}, 2, "the model has 32"},
        Refused{"Share", 1, {"--share-of", "3"}, 2, "1, 2, 4 or 8 would do"},
        Refused{"BlockSize0", 1, {"--block-size", "0"}, 2, "block size 0"},
        Refused{"BlockSize3", 1, {"--block-size", "3"}, 2, "block size 3"},
        Refused{"BlockSize512", 1, {"--block-size", "512"}, 2, "block size 512"},
        Refused{"Negative", 2, {"--steps", "-1"}, 2, "--steps: '-1' is negative"},
        Refused{"Beyond", 1, {"--context", "99999999999999999999"}, 2, "beyond 64 bits"},
        Refused{"Threads", 1, {"--threads", "0"}, 2, "--threads: '0' is out of range"},
        Refused{"Short", 1, {"--context", "9"}, 2, "shorter than the 10 tokens"},
        Refused{"Unknown", 1, {"--contexts", "9"}, 2, "--contexts"},
        Refused{"Output", 2, {"--json", "/no/such/folder/x.json"}, 2, "cannot write"},
        Refused{"TooLarge", 1, {"--batch", "1000000"}, 3, "bytes"},
        Refused{"DevicePool",
                2,
                {"--layers", "1", "--context", "256", "--device-blocks", "3"},
                3,
                "needs 4, 1 is missing"},
        Refused{
            "HostPool", 1, {"--layers", "1", "--context", "256", "--host-blocks", "3"}, 3, "host"},
        Refused{"ShareGpu", 2, {"--share-gpu"}, 2, "--share-gpu"},
        Refused{"Cuda", 2, {"--transport", "nccl"}, 4, "nccl"}),
    [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace kvgrid::test
