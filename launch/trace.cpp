#include "launch/trace.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "launch/json_fields.h"
#include "launch/shared_data.h"

namespace kvgrid::launch {

namespace {

using nlohmann::json;

// One line of the file, and how messages name it.
struct Line {
    std::string_view text;
    std::string where;  // "trace.jsonl:7: "

    [[noreturn]] void fail(const std::string& why) const {
        throw Error(ErrorCode::invalid_argument, where + why);
    }
};

// Without line ends (LF or CRLF) and without the empty lines behind the last row.
std::vector<Line> splitLines(std::string_view text, const std::string& path) {
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r'))
        text.remove_suffix(1);
    std::vector<Line> lines;
    while (!text.empty()) {
        const std::size_t end = text.find('\n');
        std::string_view line = text.substr(0, end);
        if (line.ends_with('\r')) line.remove_suffix(1);
        lines.push_back({.text = line, .where = fmt::format("{}:{}: ", path, lines.size() + 1)});
        if (end == std::string_view::npos) break;
        text.remove_prefix(end + 1);
    }
    return lines;
}

std::vector<std::uint64_t> readHashIds(const JsonFields& fields) {
    const auto found = fields.find({"hash_ids"});
    if (!found) return {};
    if (!found.value->is_array()) fields.fail("hash_ids", "is not a list");
    std::vector<std::uint64_t> ids;
    ids.reserve(found.value->size());
    for (const json& id : *found.value) {
        ids.push_back(
            static_cast<std::uint64_t>(wholeNumber(fields, "hash_ids", id, 0, INT64_MAX)));
    }
    return ids;
}

double readTime(const JsonFields& fields, std::string_view key) {
    const auto time = fields.number({key});
    if (!time) fields.fail(key, "is missing");
    if (*time < 0) fields.fail(key, fmt::format("{} is negative", *time));
    return *time;
}

// Mooncake: {"timestamp": ms, "input_length", "output_length", "hash_ids"}. Files with chat_id
// (Alibaba's Bailian traces) have the same members and seconds.
void readMooncake(const std::vector<Line>& lines, Trace& trace) {
    for (const Line& line : lines) {
        const json row = parseJson(line.text, line.where);
        const JsonFields fields(row, line.where);
        const double unit_s = fields.has("chat_id") ? 1.0 : 1e-3;
        TraceRequest request;
        request.time_s = readTime(fields, "timestamp") * unit_s;
        request.input_length = fields.requiredInteger({"input_length"}, 0);
        request.output_length = fields.requiredInteger({"output_length"}, 0);
        request.hash_ids = readHashIds(fields);
        trace.requests.push_back(std::move(request));
    }
}

void readSessionRequests(const JsonFields& parent, const json& requests, double start_s,
                         bool sub_agent, int session, Trace& trace) {
    if (!requests.is_array()) parent.fail("requests", "is not a list");
    for (std::size_t i = 0; i < requests.size(); ++i) {
        const JsonFields fields(requests[i], parent.where() + fmt::format("requests[{}]: ", i));
        const double time_s = start_s + readTime(fields, "t");
        if (fields.text({"type"}) == "subagent" && !sub_agent) {
            const auto inner = fields.find({"requests"});
            if (!inner) fields.fail("requests", "is missing");
            readSessionRequests(fields, *inner.value, time_s, true, session, trace);
            continue;
        }
        TraceRequest request;
        request.time_s = time_s;
        request.input_length = fields.requiredInteger({"in"}, 0);
        request.output_length = fields.requiredInteger({"out"}, 0);
        request.session = session;
        request.sub_agent = sub_agent;
        request.hash_ids = readHashIds(fields);
        trace.requests.push_back(std::move(request));
    }
}

// A session a line. Times of a sub-agent's requests begin at its own.
void readSessions(const std::vector<Line>& lines, Trace& trace) {
    int session = 0;
    for (const Line& line : lines) {
        const json row = parseJson(line.text, line.where);
        const JsonFields fields(row, line.where);
        const std::int64_t tokens = fields.requiredInteger({"block_size"}, 1);
        if (trace.tokens_per_hash_id != 0 && tokens != trace.tokens_per_hash_id) {
            fields.fail("block_size",
                        fmt::format("{}, but {} before", tokens, trace.tokens_per_hash_id));
        }
        trace.tokens_per_hash_id = tokens;
        const auto requests = fields.find({"requests"});
        if (!requests) fields.fail("requests", "is missing");
        readSessionRequests(fields, *requests.value, 0, false, session, trace);
        ++session;
    }
}

std::int64_t parseNumber(const Line& line, std::string_view column, std::string_view text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc::result_out_of_range) {
        line.fail(fmt::format("{}: {} is beyond 64 bits", column, text));
    }
    if (error != std::errc{} || end != text.data() + text.size()) {
        line.fail(fmt::format("{}: '{}' is not a whole number", column, text));
    }
    if (value < 0) line.fail(fmt::format("{}: {} is negative", column, value));
    return value;
}

// "2023-11-16 18:17:03.9799600", UTC assumed, to seconds since 1970.
double parseTimestamp(const Line& line, std::string_view text) {
    const auto wrong = [&] {
        line.fail(fmt::format("TIMESTAMP: '{}' is not YYYY-MM-DD hh:mm:ss[.fraction]", text));
    };
    constexpr std::string_view form = "0000-00-00 00:00:00";
    if (text.size() < form.size()) wrong();
    for (std::size_t i = 0; i < form.size(); ++i) {
        const bool digit = text[i] >= '0' && text[i] <= '9';
        if (form[i] == '0' ? !digit : text[i] != form[i]) wrong();
    }
    const auto part = [&](std::size_t at, std::size_t digits) {
        int value = 0;
        std::from_chars(text.data() + at, text.data() + at + digits, value);
        return value;
    };
    const std::chrono::year_month_day day{std::chrono::year{part(0, 4)},
                                          std::chrono::month{static_cast<unsigned>(part(5, 2))},
                                          std::chrono::day{static_cast<unsigned>(part(8, 2))}};
    if (!day.ok() || part(11, 2) > 23 || part(14, 2) > 59 || part(17, 2) > 60) wrong();
    const std::int64_t whole_s =
        std::chrono::sys_days(day).time_since_epoch() / std::chrono::seconds(1) +
        part(11, 2) * 3600 + part(14, 2) * 60 + part(17, 2);

    std::string_view fraction = text.substr(form.size());
    if (fraction.empty()) return static_cast<double>(whole_s);
    fraction.remove_prefix(1);
    std::int64_t digits = 0;
    const auto [end, error] =
        std::from_chars(fraction.data(), fraction.data() + fraction.size(), digits);
    if (text[form.size()] != '.' || error != std::errc{} || digits < 0 || fraction.size() > 9 ||
        end != fraction.data() + fraction.size()) {
        wrong();
    }
    return static_cast<double>(whole_s) +
           static_cast<double>(digits) / std::pow(10.0, static_cast<double>(fraction.size()));
}

constexpr std::string_view azure_header = "TIMESTAMP,ContextTokens,GeneratedTokens";

void readAzure(const std::vector<Line>& lines, Trace& trace) {
    double start_s = 0;
    for (std::size_t i = 1; i < lines.size(); ++i) {
        const Line& line = lines[i];
        const std::size_t first = line.text.find(',');
        const std::size_t second = line.text.find(',', first + 1);
        if (first == std::string_view::npos || second == std::string_view::npos ||
            line.text.find(',', second + 1) != std::string_view::npos) {
            line.fail("is not three fields");
        }
        const double time_s = parseTimestamp(line, line.text.substr(0, first));
        if (i == 1) start_s = time_s;
        TraceRequest request;
        request.time_s = time_s - start_s;
        request.input_length =
            parseNumber(line, "ContextTokens", line.text.substr(first + 1, second - first - 1));
        request.output_length = parseNumber(line, "GeneratedTokens", line.text.substr(second + 1));
        trace.requests.push_back(std::move(request));
    }
}

// The least power of two of which every row's input has as many started, or as many whole, blocks
// as ids: some traces give the last, partial block an id, some do not.
std::int64_t impliedTokens(const std::vector<TraceRequest>& requests) {
    constexpr std::int64_t most_tokens = 1 << 16;
    const auto explains = [&](std::int64_t tokens, std::int64_t rounding) {
        return std::all_of(requests.begin(), requests.end(), [=](const TraceRequest& request) {
            const std::int64_t blocks =
                request.input_length / tokens + (request.input_length % tokens + rounding) / tokens;
            return blocks == static_cast<std::int64_t>(request.hash_ids.size());
        });
    };
    for (std::int64_t tokens = 1; tokens <= most_tokens; tokens *= 2) {
        if (explains(tokens, tokens - 1) || explains(tokens, 0)) return tokens;
    }
    return 0;
}

void readLines(const std::vector<Line>& lines, Trace& trace) {
    if (lines.front().text == azure_header) return readAzure(lines, trace);
    if (!lines.front().text.starts_with('{')) {
        lines.front().fail(fmt::format("is neither a JSON object nor '{}'", azure_header));
    }
    const json first = parseJson(lines.front().text, lines.front().where);
    if (first.contains("requests")) return readSessions(lines, trace);
    readMooncake(lines, trace);
    trace.tokens_per_hash_id = impliedTokens(trace.requests);
}

// A random number of 64 bits from a state that it moves on (Steele, Lea and Flood, "Fast
// splittable pseudorandom number generators", OOPSLA 2014: SplitMix64).
std::uint64_t nextRandom(std::uint64_t& state) {
    state += 0x9e3779b97f4a7c15U;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
}

// The file, or the shipped trace of that name.
std::string resolve(const std::string& path) {
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored) || path.find('/') != std::string::npos) return path;
    for (const std::string& name : {path, path + ".jsonl"}) {
        const auto shipped = sharedFolder() / "traces" / name;
        if (std::filesystem::exists(shipped, ignored)) return shipped.string();
    }
    return path;
}

}  // namespace

Result<Trace> readTrace(const std::string& path) {
    Trace trace;
    trace.path = resolve(path);
    const auto text = readFile(trace.path);
    if (!text) return tl::unexpected(text.error());
    try {
        const std::vector<Line> lines = splitLines(*text, trace.path);
        if (!lines.empty()) readLines(lines, trace);
    } catch (const Error& error) {
        return failure(error.code(), error.what());
    }
    if (trace.requests.empty()) {
        return failure(ErrorCode::invalid_argument, trace.path + ": has no requests");
    }
    return trace;
}

std::vector<std::int64_t> drawLengths(const Trace& trace, std::int64_t count, std::uint64_t seed,
                                      std::int64_t longest) {
    std::vector<std::int64_t> lengths;
    const std::uint64_t requests = trace.requests.size();
    for (std::int64_t i = 0; i < count && requests > 0; ++i) {
        // The high half of a 128-bit product: even to 1 in 2^64 / requests.
        const auto product = static_cast<unsigned __int128>(nextRandom(seed)) * requests;
        const auto& request = trace.requests[static_cast<std::size_t>(product >> 64)];
        lengths.push_back(std::clamp<std::int64_t>(request.input_length, 1, longest));
    }
    return lengths;
}

}  // namespace kvgrid::launch
