#include "launch/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/paths.h"

namespace kvgrid::launch {
namespace {

const std::string& shippedPath() {
    static const std::string path =
        std::string(test::traces_dir) + "/mooncake_conversation_trace.jsonl";
    return path;
}

std::vector<std::int64_t> sortedLengths(const Trace& trace, std::int64_t TraceRequest::*length) {
    std::vector<std::int64_t> lengths;
    for (const TraceRequest& request : trace.requests)
        lengths.push_back(request.*length);
    std::sort(lengths.begin(), lengths.end());
    return lengths;
}

// sorted[round(q * (n - 1))]
std::int64_t nearestRank(const std::vector<std::int64_t>& sorted, double q) {
    return sorted[static_cast<std::size_t>(q * static_cast<double>(sorted.size() - 1) + 0.5)];
}

TEST(ShippedTrace, HasTheFiguresOfItsSource) {
    const auto trace = readTrace(shippedPath());
    ASSERT_TRUE(trace) << trace.error().message;
    ASSERT_EQ(trace->requests.size(), 7851U);
    EXPECT_EQ(trace->tokens_per_hash_id, 512);

    const auto input = sortedLengths(*trace, &TraceRequest::input_length);
    EXPECT_EQ(input.front(), 891);
    EXPECT_EQ(nearestRank(input, 0.5), 7284);
    EXPECT_EQ(nearestRank(input, 0.99), 89869);
    EXPECT_EQ(input.back(), 124847);
    const auto output = sortedLengths(*trace, &TraceRequest::output_length);
    EXPECT_EQ(output.front(), 1);
    EXPECT_EQ(nearestRank(output, 0.5), 356);
    EXPECT_EQ(nearestRank(output, 0.99), 1170);
    EXPECT_EQ(output.back(), 2000);

    EXPECT_EQ(trace->requests.front().time_s, 0.0);
    EXPECT_LT(trace->requests.back().time_s, 2400.0);
    EXPECT_GT(trace->requests.back().time_s, 2300.0);
    for (const TraceRequest& request : trace->requests) {
        ASSERT_FALSE(request.hash_ids.empty());
        ASSERT_EQ(request.hash_ids.front(), 0U);
        ASSERT_EQ(request.session, -1);
    }
}

class TraceFiles : public testing::Test {
protected:
    void SetUp() override {
        std::string pattern = testing::TempDir() + "kvgrid_traces_XXXXXX";
        ASSERT_NE(mkdtemp(pattern.data()), nullptr);
        path_ = pattern + "/trace";
    }
    void TearDown() override {
        std::filesystem::remove_all(std::filesystem::path(path_).parent_path());
    }

    Result<Trace> read(const std::string& text) const {
        std::ofstream(path_, std::ios::binary) << text;
        return readTrace(path_);
    }
    // The message behind the path.
    std::string message(const std::string& text) const {
        const auto trace = read(text);
        if (trace) return "(no error)";
        EXPECT_EQ(trace.error().code, ErrorCode::invalid_argument);
        EXPECT_EQ(trace.error().message.find(path_), 0U) << trace.error().message;
        return trace.error().message.substr(path_.size());
    }

    std::string path_;
};

TEST_F(TraceFiles, Mooncake) {
    const auto trace = read(
        "{\"timestamp\": 3000, \"input_length\": 20, \"output_length\": 1, \"hash_ids\": [7, "
        "9]}\r\n"
        "{\"timestamp\": 4500, \"input_length\": 16, \"output_length\": 0, \"hash_ids\": [7]}\n\n");
    ASSERT_TRUE(trace) << trace.error().message;
    ASSERT_EQ(trace->requests.size(), 2U);
    EXPECT_EQ(trace->tokens_per_hash_id, 16);
    EXPECT_EQ(trace->requests[0].time_s, 3.0);
    EXPECT_EQ(trace->requests[0].hash_ids, (std::vector<std::uint64_t>{7, 9}));
    EXPECT_EQ(trace->requests[1].input_length, 16);
    EXPECT_EQ(trace->requests[1].output_length, 0);
}

TEST_F(TraceFiles, OnlyWholeBlocksMayHaveIds) {
    const auto trace = read(
        "{\"timestamp\": 0, \"input_length\": 130, \"output_length\": 1, \"hash_ids\": [1, 2]}\n"
        "{\"timestamp\": 0, \"input_length\": 63, \"output_length\": 1, \"hash_ids\": []}\n");
    ASSERT_TRUE(trace) << trace.error().message;
    EXPECT_EQ(trace->tokens_per_hash_id, 64);
}

TEST_F(TraceFiles, BailianTimesAreSeconds) {
    const auto trace = read(
        "{\"chat_id\": 1, \"parent_chat_id\": -1, \"timestamp\": 61.5, \"input_length\": 20, "
        "\"output_length\": 1, \"type\": \"text\", \"turn\": 1, \"hash_ids\": [1, 2]}\n");
    ASSERT_TRUE(trace) << trace.error().message;
    EXPECT_EQ(trace->requests.front().time_s, 61.5);
}

TEST_F(TraceFiles, Azure) {
    const auto trace = read(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 23:59:59.9799600,4808,10\r\n"
        "2023-11-17 00:00:01,3180,0");
    ASSERT_TRUE(trace) << trace.error().message;
    ASSERT_EQ(trace->requests.size(), 2U);
    EXPECT_EQ(trace->requests[0].time_s, 0.0);
    EXPECT_NEAR(trace->requests[1].time_s, 1.02004, 1e-6);
    EXPECT_EQ(trace->requests[0].input_length, 4808);
    EXPECT_EQ(trace->requests[1].output_length, 0);
    EXPECT_EQ(trace->tokens_per_hash_id, 0);
}

TEST_F(TraceFiles, Sessions) {
    const auto trace = read(
        R"({"id": "a", "block_size": 64, "requests": [)"
        R"({"t": 0.0, "type": "n", "in": 128, "out": 3, "hash_ids": [1, 2]},)"
        R"({"t": 5, "type": "subagent", "requests": [{"t": 1.5, "in": 70, "out": 0, "hash_ids": [1]}]},)"
        R"({"t": 9.25, "type": "s", "in": 64, "out": 1, "hash_ids": [1]}]})"
        "\n"
        R"({"id": "b", "block_size": 64, "requests": [{"t": 0, "in": 1, "out": 1, "hash_ids": []}]})");
    ASSERT_TRUE(trace) << trace.error().message;
    EXPECT_EQ(trace->tokens_per_hash_id, 64);
    ASSERT_EQ(trace->requests.size(), 4U);
    EXPECT_FALSE(trace->requests[0].sub_agent);
    EXPECT_TRUE(trace->requests[1].sub_agent);
    EXPECT_EQ(trace->requests[1].time_s, 6.5);
    EXPECT_EQ(trace->requests[1].session, 0);
    EXPECT_EQ(trace->requests[2].time_s, 9.25);
    EXPECT_EQ(trace->requests[3].session, 1);
}

constexpr const char* good = "{\"timestamp\": 0, \"input_length\": 2, \"output_length\": 1}\n";

TEST_F(TraceFiles, ABrokenLineIsNamed) {
    const std::string start = good;
    EXPECT_EQ(message(start + "{\"timestamp\": 0, \"input_leng").find(":2: is no JSON: "), 0U);
    EXPECT_EQ(message(start + "\n" + good).find(":2: is no JSON: "), 0U);
    EXPECT_EQ(message(start + good + "[]\n"), ":3: is a list, not an object");
    EXPECT_EQ(message(start + "{\"timestamp\": 0, \"output_length\": 1}"), ":2: no input_length");
    EXPECT_EQ(message(start + "{\"input_length\": 1, \"output_length\": 1}"),
              ":2: timestamp: is missing");
    EXPECT_EQ(message(start + "{\"timestamp\": 0, \"input_length\": -3, \"output_length\": 1}"),
              ":2: input_length: -3 is too small: at least 0");
    EXPECT_EQ(message(start + "{\"timestamp\": 0, \"input_length\": 1.5, \"output_length\": 1}"),
              ":2: input_length: 1.5 is not a whole number");
    EXPECT_EQ(message(start + "{\"timestamp\": 0, \"input_length\": 1e30, \"output_length\": 1}"),
              ":2: input_length: 1e+30 is beyond 64 bits");
    EXPECT_EQ(message(start + "{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 1}"),
              ":2: timestamp: -1 is negative");
    EXPECT_EQ(message("{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, "
                      "\"hash_ids\": [1, \"2\"]}"),
              ":1: hash_ids: is a string, not a whole number");
    EXPECT_EQ(message("{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, "
                      "\"hash_ids\": 5}"),
              ":1: hash_ids: is not a list");
}

TEST_F(TraceFiles, ABrokenAzureLineIsNamed) {
    const std::string start = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    const std::string time = "2023-11-16 18:17:03.9799600";
    EXPECT_EQ(message(start + time + ",1,2\n" + time + ",1"), ":3: is not three fields");
    EXPECT_EQ(message(start + time + ",1,2,3"), ":2: is not three fields");
    EXPECT_EQ(message(start + time + ",x,2"), ":2: ContextTokens: 'x' is not a whole number");
    EXPECT_EQ(message(start + time + ",1,2 "), ":2: GeneratedTokens: '2 ' is not a whole number");
    EXPECT_EQ(message(start + time + ",,2"), ":2: ContextTokens: '' is not a whole number");
    EXPECT_EQ(message(start + time + ",-1,2"), ":2: ContextTokens: -1 is negative");
    EXPECT_EQ(message(start + time + ",99999999999999999999,2"),
              ":2: ContextTokens: 99999999999999999999 is beyond 64 bits");
    for (const char* wrong :
         {"yesterday", "2023-13-16 18:17:03", "2023-02-30 18:17:03", "2023-11-16 25:17:03",
          "2023-11-16 18:17:03x5", "2023-11-16 18:17:03.", "2023-11-16 18:17:03.1234567890"}) {
        EXPECT_EQ(message(start + wrong + ",1,2").find(":2: TIMESTAMP: "), 0U) << wrong;
    }
}

TEST_F(TraceFiles, ABrokenSessionIsNamed) {
    EXPECT_EQ(message(R"({"block_size": 64, "requests": [{"t": 0, "in": 1}]})"),
              ":1: requests[0]: no out");
    EXPECT_EQ(message(R"({"block_size": 64, "requests": 7})"), ":1: requests: is not a list");
    EXPECT_EQ(message(R"({"requests": []})"), ":1: no block_size");
    EXPECT_EQ(
        message("{\"block_size\": 64, \"requests\": []}\n{\"block_size\": 32, \"requests\": []}"),
        ":2: block_size: 32, but 64 before");
    EXPECT_EQ(message(R"({"block_size": 64, "requests": [{"t": 0, "type": "subagent"}]})"),
              ":1: requests[0]: requests: is missing");
}

TEST_F(TraceFiles, NothingToRead) {
    EXPECT_EQ(message(""), ": has no requests");
    EXPECT_EQ(message("\n\n"), ": has no requests");
    EXPECT_EQ(message("TIMESTAMP,ContextTokens,GeneratedTokens\n"), ": has no requests");
    EXPECT_EQ(message("a,b\n1,2\n").find(":1: is neither a JSON object nor "), 0U);
    const auto missing = readTrace("/no/such/trace.jsonl");
    ASSERT_FALSE(missing);
    EXPECT_EQ(missing.error().message, "/no/such/trace.jsonl: no such file");
}

TEST(DrawLengths, IsFixedByItsSeed) {
    const Trace trace = readTrace(shippedPath()).value();
    const auto lengths = drawLengths(trace, 8, 0, 1 << 20);
    // The same on every machine: a change here changes every recorded benchmark.
    EXPECT_EQ(lengths,
              (std::vector<std::int64_t>{7121, 1178, 38149, 1254, 9480, 79096, 19242, 904}));
    EXPECT_EQ(drawLengths(trace, 8, 0, 1 << 20), lengths);
    EXPECT_NE(drawLengths(trace, 8, 1, 1 << 20), lengths);
    const auto longer = drawLengths(trace, 20, 0, 1 << 20);
    EXPECT_TRUE(std::equal(lengths.begin(), lengths.end(), longer.begin()));
}

TEST(DrawLengths, ClipsToTheLongest) {
    const Trace trace = readTrace(shippedPath()).value();
    const auto all = drawLengths(trace, 2000, 5, 1 << 20);
    const auto clipped = drawLengths(trace, 2000, 5, 4096);
    for (std::size_t i = 0; i < all.size(); ++i) {
        ASSERT_EQ(clipped[i], std::min<std::int64_t>(all[i], 4096));
    }
    EXPECT_EQ(*std::max_element(clipped.begin(), clipped.end()), 4096);
    EXPECT_TRUE(drawLengths(trace, 0, 0, 4096).empty());
    EXPECT_TRUE(drawLengths(Trace{}, 5, 0, 4096).empty());
}

TEST(DrawLengths, AnEmptyContextCountsAsOneToken) {
    Trace trace;
    trace.requests.resize(1);
    EXPECT_EQ(drawLengths(trace, 2, 0, 100), (std::vector<std::int64_t>{1, 1}));
}

}  // namespace
}  // namespace kvgrid::launch
