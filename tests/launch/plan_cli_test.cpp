// The program as its users run it: kvgrid plan, exit codes and messages.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/launch/run_program.h"
#include "tests/paths.h"

namespace kvgrid::test {
namespace {

Finished kvgrid(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), cli);
    return run(arguments);
}

Finished plan(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "plan");
    return kvgrid(std::move(arguments));
}

Finished planOf(const std::string& model, const std::string& ranks, const std::string& context,
                std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"--model", model, "--ranks", ranks, "--context", context});
    return plan(std::move(more));
}

nlohmann::json planJson(const std::string& model, const std::string& ranks,
                        const std::string& context, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--json", "-"});
    const Finished result = planOf(model, ranks, context, std::move(more));
    EXPECT_EQ(result.code, 0) << result.err;
    return nlohmann::json::parse(result.out);
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

std::string uniformConfig(int layers, int heads, int head_dim) {
    return nlohmann::json{{"num_hidden_layers", layers},
                          {"num_attention_heads", heads},
                          {"num_key_value_heads", heads},
                          {"head_dim", head_dim},
                          {"hidden_size", heads * head_dim}}
        .dump();
}

TEST(Plan, GivesTheFiguresEveryoneKnows) {
    const TempFolder folder;
    writeText(folder / "seven.json", uniformConfig(32, 32, 128));
    const auto seven = planJson(folder / "seven.json", "1", "4096", {"--kv-dtype", "fp16"});
    EXPECT_EQ(seven["total_bytes"], 2147483648);  // 2 GB
    EXPECT_EQ(seven["kv_dtype"], "fp16");

    // 128 numbers and a scale where there were 256 bytes.
    const auto low = planJson(folder / "seven.json", "1", "4096", {"--kv-dtype", "fp8"});
    EXPECT_EQ(low["total_bytes"], 2147483648 / 256 * 130);
    EXPECT_EQ(low["kv_dtype"], "fp8-e4m3");

    writeText(folder / "seventy.json", uniformConfig(80, 64, 128));
    EXPECT_EQ(
        planJson(folder / "seventy.json", "1", "1", {"--kv-dtype", "fp16"})["bytes_per_token"],
        2621440);  // 2.5 MB
    const Finished table = planOf(folder / "seventy.json", "1", "1", {"--kv-dtype", "fp16"});
    EXPECT_TRUE(contains(table.out, "# bytes a token: 2621440 (2.5 MiB)\n")) << table.out;
}

TEST(Plan, SaysThatItFits) {
    const Finished result =
        planOf("llama-3.1-70b", "8", "128K", {"--batch", "8", "--gpu-memory", "80G"});
    EXPECT_EQ(result.code, 0);
    EXPECT_EQ(result.lastLine(), "OK");
    EXPECT_EQ(result.err, "");
    EXPECT_TRUE(contains(result.out, "2621440 (2.5 MiB)")) << "a block of a rank";
    EXPECT_TRUE(contains(result.out, "# bytes a rank: 42949672960 (40 GiB)\n"));
    EXPECT_TRUE(contains(result.out, "# bytes in all: 343597383680 (320 GiB)\n"));
    EXPECT_TRUE(contains(result.out, "# bytes to spare a rank: 42949672960 (40 GiB)\n"));
    EXPECT_TRUE(contains(result.out, "# duplication factor: 1\n"));
    EXPECT_TRUE(contains(result.out, "8x1"));
}

TEST(Plan, SaysHowMuchIsMissing) {
    const Finished result =
        planOf("llama-3.1-70b", "8", "128K", {"--batch", "8", "--gpu-memory", "32G"});
    EXPECT_EQ(result.code, 3);
    EXPECT_EQ(result.lastLine(),
              "FAILED: does not fit: 42949672960 bytes (40 GiB) a rank, 8589934592 (8 GiB) missing "
              "of 32 GiB");
    const Finished json = planOf("llama-3.1-70b", "8", "128K",
                                 {"--batch", "8", "--gpu-memory", "32G", "--json", "-"});
    EXPECT_EQ(json.code, 3);
    const auto parsed = nlohmann::json::parse(json.out);
    EXPECT_EQ(parsed["fits"], false);
    EXPECT_EQ(parsed["spare_bytes"], -8589934592);
    EXPECT_TRUE(contains(json.err, "FAILED: does not fit"));
}

TEST(Plan, CountsWindowsByGroup) {
    const auto json = planJson("gemma-3-27b", "8", "128K");
    ASSERT_EQ(json["rows"].size(), 2U);
    EXPECT_TRUE(json["rows"][0]["window_tokens"].is_null());
    EXPECT_EQ(json["rows"][0]["blocks_per_sequence"], 2048);
    EXPECT_EQ(json["rows"][1]["window_tokens"], 1024);
    EXPECT_EQ(json["rows"][1]["blocks_per_sequence"], 17);
    EXPECT_EQ(json["bytes_per_token"], 81920 + 425984);
    EXPECT_EQ(json["total_bytes"], 81920 * 131072LL + 425984 * 17 * 64LL);
    EXPECT_TRUE(json["fits"].is_null());
    EXPECT_TRUE(json["spare_bytes"].is_null());
    EXPECT_EQ(json["not_decoded_yet"].size(), 0U);
}

TEST(Plan, CountsOnlyLayersWithKv) {
    const auto json = planJson("qwen3-next-80b-a3b", "2", "1M");
    EXPECT_EQ(json["layers_without_kv"], 36);
    EXPECT_EQ(json["bytes_per_token"], 24576);
    EXPECT_EQ(json["total_bytes"], 24576LL << 20);
}

TEST(Plan, JsonOnStdoutIsAlone) {
    const Finished result = planOf("gpt2", "4", "1K", {"--json=-"});
    EXPECT_EQ(result.code, 0);
    const auto json = nlohmann::json::parse(result.out);
    EXPECT_EQ(json["schema_version"], 1);
    EXPECT_EQ(json["argv"][0], "kvgrid");
    EXPECT_EQ(json["argv"][1], "plan");
    EXPECT_EQ(json["grid"], "4x1");
    EXPECT_TRUE(contains(result.err, "OK\n"));
    const Finished failed = planOf("gpt2", "5", "1K", {"--json", "-"});
    EXPECT_EQ(failed.code, 2);
    EXPECT_EQ(failed.out, "");
    EXPECT_TRUE(contains(failed.err, "FAILED: "));
}

TEST(Plan, JsonFileIsNewOrRefused) {
    const TempFolder folder;
    const std::string path = folder / "plan.json";
    EXPECT_EQ(planOf("gpt2", "4", "1K", {"--json", path}).lastLine(), "OK");
    const std::string first = readText(path);
    EXPECT_EQ(nlohmann::json::parse(first)["model"], "gpt2");

    const Finished again = planOf("gpt2", "4", "1K", {"--json", path});
    EXPECT_EQ(again.code, 2);
    EXPECT_EQ(again.lastLine(), "FAILED: --json: " + path + " exists and is not overwritten");
    EXPECT_EQ(readText(path), first);

    EXPECT_EQ(planOf("no-such-model", "4", "1K", {"--json", folder / "b.json"}).code, 2);
    EXPECT_FALSE(std::filesystem::exists(folder / "b.json"));
    EXPECT_EQ(planOf("gpt2", "4", "1K", {"--json", folder / "no/b.json"}).code, 2);
}

struct BadInput {
    std::vector<std::string> arguments;
    std::string reason;  // the beginning of what follows "FAILED: "
};

TEST(Plan, BadInputIsNamed) {
    const std::string models = models_dir;
    const std::vector<BadInput> cases{
        {{}, "--model is missing"},
        {{"--model", "gpt2"}, "--ranks is missing"},
        {{"--model", "gpt2", "--ranks", "1"}, "--context is missing"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "1K", "--colour", "red"},
         "unknown flag --colour"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "1K", "--ranks", "1"},
         "--ranks is given twice"},
        {{"--model", "llama-3.1-8b", "--ranks", "3", "--context", "1K"},
         "ranks: 3 does not divide the 8 KV heads; 1, 2, 4 or 8 would do"},
        {{"--model", "smollm2-135m", "--ranks", "2", "--context", "1K"},
         "ranks: 2 does not divide the 3 KV heads; 1 or 3 would do"},
        {{"--model", "falcon-7b", "--ranks", "8", "--context", "1K"},
         "ranks: 8 does not divide the 1 KV heads; 1 would do"},
        {{"--model", "llama-3.1-8b", "--ranks", "16", "--context", "1K", "--grid", "8x2"},
         "grid 8x2: the context axis is 1 in this version"},
        {{"--model", "llama-3.1-8b", "--ranks", "8", "--context", "1K", "--grid", "4x1"},
         "grid 4x1 has 4 ranks, not 8"},
        {{"--model", "gpt2", "--ranks", "0", "--context", "1K"}, "--ranks: '0' is out of range"},
        {{"--model", "gpt2", "--ranks", "-1", "--context", "1K"}, "--ranks: '-1' is negative"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "-4K"}, "--context: '-4K' is negative"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "0"}, "--context: '0' is too small"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "4Q"}, "--context: '4Q' is not a size"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "99999999999999999999"},
         "--context: '99999999999999999999' is beyond 64 bits"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "8000000000G"},
         "context 8589934592000000000 x batch 1: bytes a rank"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "4G", "--batch", "4G"},
         "context 4294967296 x batch 4294967296: bytes a rank"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "1K", "--block-size", "0"},
         "block size 0: a power of two from 1 to 256"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "1K", "--block-size", "3"},
         "block size 3: a power of two from 1 to 256"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "1K", "--block-size", "512"},
         "block size 512: a power of two from 1 to 256"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "1K", "--kv-dtype", "fp4"},
         "--kv-dtype: 'fp4' is none of bf16, fp16, fp8, fp8_e4m3, fp8-e4m3 or int8"},
        {{"--model", "gpt2", "--ranks", "1", "--context", "1K", "--gpu-memory", "0"},
         "--gpu-memory: '0' is too small"},
        {{"--model", "no-such-model", "--ranks", "1", "--context", "1K"},
         "model 'no-such-model' is neither shipped nor a file"},
        {{"--model", "/no/such.json", "--ranks", "1", "--context", "1K"},
         "/no/such.json: no such file"},
        {{"--model", "deepseek-v3", "--ranks", "1", "--context", "1K"},
         models + "/deepseek-v3.json: kv_lora_rank: "},
        {{"--model", "llava-1.5-7b", "--ranks", "1", "--context", "1K"},
         models + "/llava-1.5-7b.json: text_config: no num_hidden_layers"},
    };
    for (const BadInput& bad : cases) {
        const Finished result = plan(bad.arguments);
        EXPECT_EQ(result.code, 2) << bad.reason;
        EXPECT_EQ(result.lastLine().find("FAILED: " + bad.reason), 0U) << bad.reason << "\n"
                                                                       << result.out;
        EXPECT_EQ(result.err.find("kvgrid plan: " + bad.reason), 0U) << result.err;
    }
}

TEST(Cli, ListsItsCommands) {
    const Finished help = kvgrid({"--help"});
    EXPECT_EQ(help.code, 0);
    for (const char* part : {"plan", "verify", "bench", "Exit codes", "Examples:"}) {
        EXPECT_TRUE(contains(help.out, part)) << part;
    }
    const Finished version = kvgrid({"--version"});
    EXPECT_EQ(version.code, 0);
    EXPECT_EQ(version.out.find("kvgrid "), 0U);
    EXPECT_EQ(plan({"--version"}).out, version.out);
    EXPECT_EQ(plan({"--help"}).code, 0);
    EXPECT_TRUE(contains(plan({"--help"}).out, "Examples:"));
}

TEST(Cli, RefusesWhatItDoesNotKnow) {
    EXPECT_EQ(kvgrid({}).code, 2);
    EXPECT_EQ(kvgrid({}).lastLine(), "FAILED: no command");
    EXPECT_EQ(kvgrid({"plain"}).code, 2);
    EXPECT_EQ(kvgrid({"plain"}).lastLine(), "FAILED: unknown command 'plain'");
    EXPECT_EQ(kvgrid({"--verbose"}).code, 2);
}

}  // namespace
}  // namespace kvgrid::test
