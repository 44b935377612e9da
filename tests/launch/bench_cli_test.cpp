// kvgrid bench as its users run it: its three faces, its checks, and what it refuses.
#include <gtest/gtest.h>
#include <filesystem>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/launch/run_ranks.h"
#include "tests/launch/safetensors_file.h"

namespace kvgrid::test {
namespace {

using Arguments = std::vector<std::string>;

Finished bench(int ranks, const Arguments& arguments, const Arguments& environment = {}) {
    return runRanks(ranks, joined({"bench", "--device", "cpu"}, arguments), environment);
}

const Arguments small{"--model", "llama-3.1-8b", "--layers", "2", "--steps", "3"};

TEST(Bench, MeasuresARowForEachContext) {
    const Finished finished = bench(2, joined(small, {"--context", "256,1K", "--json", "-"}));
    ASSERT_EQ(finished.code, 0) << finished.err;
    const auto json = nlohmann::json::parse(finished.out);
    EXPECT_EQ(json["schema_version"], 1);
    EXPECT_EQ(json["argv"][1], "bench");
    EXPECT_EQ(json["ranks"].size(), 2U);
    EXPECT_TRUE(json["ranks"][1]["pid"].is_number());
    EXPECT_FALSE(json["libraries"].empty());
    EXPECT_GT(json["read_ceiling_gb_per_s"], 0);
    EXPECT_GT(json["read_ceiling_at_end_gb_per_s"], 0);
    EXPECT_EQ(json["ok"], true);
    ASSERT_EQ(json["rows"].size(), 2U);
    EXPECT_EQ(json["rows"][0]["context_tokens"], 256);
    EXPECT_EQ(json["rows"][1]["context_tokens"], 1024);
    for (const auto& row : json["rows"]) {
        for (const char* part : {"append", "attend", "join", "other", "step"}) {
            const double p50 = row[std::string(part) + "_p50_us"];
            const double p99 = row[std::string(part) + "_p99_us"];
            EXPECT_GT(p50, 0) << part;
            EXPECT_LE(p50, p99) << part;
        }
        EXPECT_FALSE(row.contains("launch_p50_us")) << "on the CPU device nothing is only enqueued";
        EXPECT_LT(row["attend_p50_us"], row["step_p50_us"]);
        EXPECT_GT(row["kv_read_gb_per_s"], 0);
        const auto& share = row["read_ceiling_share"];  // none where ranks share a core
        EXPECT_TRUE(share.is_null() || share > 0) << share;
        EXPECT_GT(row["tokens_per_s"], 0);
        EXPECT_GE(row["checked"], 64);
        EXPECT_EQ(row["wrong"], 0);
        EXPECT_LE(row["max_rel_error"], 1e-5);
    }
}

TEST(Bench, LowBitFormats) {
    for (const char* format : {"fp8", "int8"}) {
        const Finished finished =
            bench(2, joined(small, {"--context", "256", "--kv-dtype", format, "--json", "-"}));
        ASSERT_EQ(finished.code, 0) << finished.err;
        const auto row = nlohmann::json::parse(finished.out)["rows"][0];
        EXPECT_GE(row["checked"], 64);
        EXPECT_EQ(row["wrong"], 0);
        EXPECT_LE(row["max_rel_error"], 1e-5);
        EXPECT_GT(row["unquantised_rel_error"], 1e-3);
        // Bytes over time: of each KV head's K and V 128 numbers and a scale.
        const double tokens = 4 * (256 - 1);  // of the median step
        const double bytes = tokens * 2 * 4 * 2 * (128 + 2);
        EXPECT_NEAR(row["kv_read_gb_per_s"], bytes / (1e3 * double{row["attend_p50_us"]}),
                    0.02 * double{row["kv_read_gb_per_s"]});
    }
}

TEST(Bench, ChecksFixedScales) {
    const TempFolder folder;
    writeText(folder / "scales", safetensors(layerScales(32, 1e-3F, 50.0F)));
    const Finished finished =
        bench(2, joined(small, {"--context", "256", "--kv-dtype", "fp8", "--kv-scales",
                                folder / "scales", "--json", "-"}));
    ASSERT_EQ(finished.code, 0) << finished.err;
    const auto row = nlohmann::json::parse(finished.out)["rows"][0];
    EXPECT_EQ(row["wrong"], 0);
    EXPECT_LE(row["max_rel_error"], 1e-5);
    EXPECT_GT(row["unquantised_rel_error"], 0.05);  // most of K is beyond 0.45
    EXPECT_EQ(bench(1, joined(small, {"--kv-scales", folder / "scales"})).code, 2);
}

// Of 6 layers, 5 read 512 tokens and 1 all of them: 256 numbers of K and as many of V, 2 bytes
// each.
TEST(Bench, CountsTheBytesThatWindowsSee) {
    const Finished finished = bench(1, {"--model", "gemma-3-1b", "--layers", "6", "--context",
                                        "2000", "--batch", "3", "--steps", "1", "--json", "-"});
    ASSERT_EQ(finished.code, 0) << finished.err;
    const auto row = nlohmann::json::parse(finished.out)["rows"][0];
    EXPECT_EQ(row["wrong"], 0);
    const double attend_us = row["attend_p50_us"];
    const double gb_per_s = row["kv_read_gb_per_s"];
    EXPECT_NEAR(gb_per_s * attend_us * 1e3, 3 * (5 * 512 + 2000) * 2 * 256 * 2.0, 1.0);
}

TEST(Bench, PrintsATable) {
    const TempFolder folder;
    const std::string csv = folder / "rows.csv";
    const Finished finished =
        bench(4, joined(small, {"--context", "256", "--progress", "--csv", csv}));
    EXPECT_EQ(finished.code, 0) << finished.err;
    EXPECT_EQ(finished.lastLine(), "OK");
    EXPECT_EQ(finished.out.substr(0, 9), "# kvgrid ");
    EXPECT_TRUE(contains(finished.out, "# rank 3 host "));
    EXPECT_TRUE(contains(finished.out, "# read ceiling: "));
    // Where the kernel shows its caches: a bare chroot has no /sys.
    const bool shown = std::filesystem::exists("/sys/devices/system/cpu/cpu0/cache/index3/size");
    EXPECT_EQ(contains(finished.out, "fits its last-level cache"), shown);
    EXPECT_TRUE(contains(finished.err, "context 256: filling"));
    const std::string rows = readText(csv);
    EXPECT_EQ(rows.substr(0, 15), "context_tokens,");
    EXPECT_EQ(countOf(rows, "\n"), 2);
}

TEST(Bench, DrawsLengthsFromATrace) {
    const Arguments arguments = joined(
        small, {"--lengths-from", std::string(traces_dir) + "/mooncake_conversation_trace.jsonl",
                "--context", "2K", "--batch", "6", "--json", "-"});
    const auto first = nlohmann::json::parse(bench(2, arguments).out)["rows"][0];
    EXPECT_LE(first["context_tokens"], 2048);
    EXPECT_LT(first["mean_context_tokens"], 2048);
    EXPECT_GE(first["mean_context_tokens"], 891);  // the shortest of the trace
    EXPECT_EQ(first["wrong"], 0);
    const auto other =
        nlohmann::json::parse(bench(1, joined(arguments, {"--seed", "5"})).out)["rows"][0];
    EXPECT_NE(first["mean_context_tokens"], other["mean_context_tokens"]);
}

TEST(Bench, SeesAPlantedWrongValue) {
#ifndef KVGRID_FAULT_INJECTION
    GTEST_SKIP() << "built without KVGRID_FAULT_INJECTION";
#endif
    const TempFolder folder;
    const std::string path = folder / "bench.json";
    const Finished finished =
        bench(2, joined(small, {"--context", "256", "--json", path}), {"KVGRID_PLANT=value"});
    EXPECT_EQ(finished.code, 1) << finished.out;
    EXPECT_TRUE(contains(finished.lastLine(), "FAILED: 32 of 64")) << finished.out;
    const auto json = nlohmann::json::parse(readText(path));
    EXPECT_EQ(json["ok"], false);
    EXPECT_EQ(json["rows"][0]["wrong"], 32);  // those of rank 0
}

TEST(Bench, NeverOverwrites) {
    const TempFolder folder;
    writeText(folder / "kept.json", "mine");
    const Finished finished = bench(2, {"--json", folder / "kept.json"});
    EXPECT_EQ(finished.code, 2);
    EXPECT_TRUE(contains(finished.lastLine(), "exists and is not overwritten")) << finished.out;
    EXPECT_FALSE(contains(finished.out, "# read ceiling"));
    EXPECT_EQ(readText(folder / "kept.json"), "mine");
}

TEST(Bench, NamesTheBrokenLineOfATrace) {
    const TempFolder folder;
    writeText(folder / "broken.jsonl",
              "{\"timestamp\": 0, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": [0]}\n"
              "{\"timestamp\": 1, \"input_length\": \n");
    const Finished finished = bench(2, {"--lengths-from", folder / "broken.jsonl"});
    EXPECT_EQ(finished.code, 2);
    EXPECT_TRUE(contains(finished.lastLine(), "broken.jsonl:2:")) << finished.out;
}

TEST(Bench, SaysWhatDoesNotFit) {
    const Finished finished =
        bench(2, joined(small, {"--context", "256", "--device-blocks", "15"}));
    EXPECT_EQ(finished.code, 3);
    EXPECT_TRUE(contains(finished.lastLine(), "--device-blocks 15: the run needs 16, 1 is missing"))
        << finished.out;
    EXPECT_FALSE(contains(finished.out, "# read ceiling"));
}

TEST(Bench, TakesOneContextWithATrace) {
    const Finished finished =
        bench(1, {"--context", "1K,2K", "--lengths-from",
                  std::string(traces_dir) + "/mooncake_conversation_trace.jsonl"});
    EXPECT_EQ(finished.code, 2);
    EXPECT_TRUE(contains(finished.lastLine(), "--context")) << finished.out;
}

}  // namespace
}  // namespace kvgrid::test
