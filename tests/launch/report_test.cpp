#include "launch/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "launch/destination.h"
#include "tests/launch/run_program.h"

namespace kvgrid::launch {
namespace {

const std::vector<Column> columns{
    {.key = "context_tokens", .heading = "context", .unit = "tokens"},
    {.key = "step_p50_us", .heading = "step p50", .unit = "us", .format = fixed1, .width = 10},
    {.key = "share", .heading = "share", .unit = "%", .format = percent},
    {.key = "note", .heading = "note", .unit = ""},
    {.key = "exact", .heading = "exact", .unit = ""},
};

Report sample() {
    Report report("bench", {"kvgrid", "bench", "--model", "my model"}, columns);
    report.note("a note");
    report.fact("device", std::string("cpu"), "device");
    report.fact("threads", std::int64_t{2});
    report.list("ranks", {"rank", "host"}, {{std::int64_t{0}, std::string("a")}});
    report.row({std::int64_t{4096}, 12.345, 0.5, std::string("x,\"y\""), true});
    report.row({std::int64_t{16384}, std::monostate{}, std::nan(""), std::string("plain"), false});
    report.result("wrong", std::int64_t{0}, "wrong");
    return report;
}

TEST(Report, Table) {
    const std::string table = sample().table();
    EXPECT_NE(table.find("# command: kvgrid bench --model 'my model'\n"
                         "# a note\n"
                         "# device: cpu\n"
                         "#  context    step p50  share   note  exact\n"
                         "#   tokens          us      %\n"
                         "      4096        12.3   50.0  x,\"y\"   true\n"
                         "     16384           -      -  plain  false\n"
                         "# wrong: 0\n"),
              std::string::npos)
        << table;
    EXPECT_EQ(table.find("# kvgrid "), 0U);
}

TEST(Report, PiecesAreTheTable) {
    const Report report = sample();
    std::string pieces = report.preamble() + report.headings();
    for (const Row& row : report.rows())
        pieces += report.line(row);
    pieces += report.closing();
    EXPECT_EQ(pieces.find(report.preamble()), 0U);
    EXPECT_NE(report.line({std::int64_t{1}}).find("-"), std::string::npos);
    EXPECT_NE(pieces.find("      4096        12.3   50.0  x,\"y\"   true\n"), std::string::npos)
        << pieces;
}

TEST(Report, Csv) {
    EXPECT_EQ(sample().csv(),
              "context_tokens,step_p50_us,share,note,exact\n"
              "4096,12.345,0.5,\"x,\"\"y\"\"\",true\n"
              "16384,,,plain,false\n");
}

TEST(Report, Json) {
    const auto json = nlohmann::json::parse(sample().json());
    EXPECT_EQ(json["schema_version"], 1);
    EXPECT_EQ(json["command"], "bench");
    EXPECT_EQ(json["argv"], (std::vector<std::string>{"kvgrid", "bench", "--model", "my model"}));
    EXPECT_TRUE(json["version"].is_string());
    EXPECT_TRUE(json["git_hash"].is_string());
    EXPECT_EQ(json["device"], "cpu");
    EXPECT_EQ(json["threads"], 2);
    EXPECT_EQ(json["wrong"], 0);
    EXPECT_EQ(json["ranks"][0]["host"], "a");
    ASSERT_EQ(json["rows"].size(), 2U);
    EXPECT_EQ(json["rows"][0]["step_p50_us"], 12.345);
    EXPECT_TRUE(json["rows"][0]["exact"].is_boolean());
    EXPECT_TRUE(json["rows"][1]["step_p50_us"].is_null());
    EXPECT_TRUE(json["rows"][1]["share"].is_null());
}

TEST(Report, JsonKeepsWholeNumbersAndBadUtf8) {
    Report report("plan", {"kvgrid", "\xff"}, columns);
    report.row({std::numeric_limits<std::int64_t>::max()});
    const auto json = nlohmann::json::parse(report.json());
    EXPECT_EQ(json["rows"][0]["context_tokens"].get<std::int64_t>(),
              std::numeric_limits<std::int64_t>::max());
    EXPECT_TRUE(json["rows"][0]["note"].is_null());
}

TEST(HumanBytes, PowersOf1024) {
    EXPECT_EQ(humanBytes(0), "0 B");
    EXPECT_EQ(humanBytes(1023), "1023 B");
    EXPECT_EQ(humanBytes(1024), "1 KiB");
    EXPECT_EQ(humanBytes(2621440), "2.5 MiB");
    EXPECT_EQ(humanBytes(2147483648), "2 GiB");
    EXPECT_EQ(humanBytes(-1536), "-1.5 KiB");
    EXPECT_EQ(humanBytes(std::numeric_limits<std::int64_t>::max()), "8 EiB");
    EXPECT_EQ(bytes(Cell(std::int64_t{2621440})), "2621440 (2.5 MiB)");
    EXPECT_EQ(bytes(Cell(std::int64_t{100})), "100");
    EXPECT_EQ(bytes(Cell(std::int64_t{std::numeric_limits<std::int64_t>::min()})),
              "-9223372036854775808 (-8 EiB)");
}

std::string errorOf(const Result<Destination>& result) {
    if (result) return "(no error)";
    EXPECT_EQ(result.error().code, ErrorCode::invalid_argument);
    return result.error().message;
}

TEST(Destination, LeavesNothingBeforeTheRun) {
    const test::TempFolder folder;
    ASSERT_TRUE(Destination::check(folder / "a.json", folder / "a.csv"));
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Destination, NeverOverwrites) {
    const test::TempFolder folder;
    const std::string path = folder / "a.json";
    test::writeText(path, "mine");
    EXPECT_EQ(errorOf(Destination::check(path, "")),
              "--json: " + path + " exists and is not overwritten");
    EXPECT_EQ(errorOf(Destination::check("", path)),
              "--csv: " + path + " exists and is not overwritten");

    // Not even when the file appears during the run.
    const std::string later = folder / "later.json";
    const auto destination = Destination::check(later, "");
    ASSERT_TRUE(destination);
    test::writeText(later, "mine");
    EXPECT_FALSE(destination->write(sample()));
    EXPECT_EQ(test::readText(later), "mine");
    EXPECT_EQ(test::readText(path), "mine");
}

TEST(Destination, RefusesWhatCannotBeWritten) {
    const test::TempFolder folder;
    EXPECT_EQ(errorOf(Destination::check(folder / "none/a.json", "")),
              "--json: cannot write " + (folder / "none/a.json") + ": No such file or directory");
    EXPECT_EQ(errorOf(Destination::check(folder.path().string(), "")),
              "--json: " + folder.path().string() + " exists and is not overwritten");
    EXPECT_EQ(errorOf(Destination::check("", "-")), "--csv: '-' is for --json; give a file");
    const std::string both = folder / "both";
    EXPECT_EQ(errorOf(Destination::check(both, both)), "--csv: " + both + " is what --json writes");
    EXPECT_EQ(errorOf(Destination::check(both, folder / "./both")),
              "--csv: " + (folder / "./both") + " exists and is not overwritten");
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Destination, WritesBothFiles) {
    const test::TempFolder folder;
    const auto destination = Destination::check(folder / "a.json", folder / "a.csv");
    ASSERT_TRUE(destination);
    EXPECT_EQ(destination->text(), stdout);
    const auto written = destination->write(sample());
    ASSERT_TRUE(written) << written.error().message;
    EXPECT_EQ(test::readText(folder / "a.json"), sample().json());
    EXPECT_EQ(test::readText(folder / "a.csv"), sample().csv());
}

TEST(Destination, JsonOnStdoutSendsTheRestToStderr) {
    const auto destination = Destination::check("-", "");
    ASSERT_TRUE(destination);
    EXPECT_TRUE(destination->jsonOnStdout());
    EXPECT_EQ(destination->text(), stderr);
    testing::internal::CaptureStdout();
    const auto written = destination->write(sample());
    EXPECT_EQ(testing::internal::GetCapturedStdout(), sample().json());
    EXPECT_TRUE(written);
}

TEST(Verdict, IsOneLine) {
    testing::internal::CaptureStdout();
    EXPECT_EQ(verdict(stdout, 0), 0);
    EXPECT_EQ(verdict(stdout, 3, "a\nb"), 3);
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "OK\nFAILED: a b\n");
}

}  // namespace
}  // namespace kvgrid::launch
