// Readers of real serving traces: Mooncake-style JSON lines, Azure LLM inference CSV, and the
// Claude Code session JSON lines of kv-cache-tester. The format is told by the first line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <kvgrid/error.h>

namespace kvgrid::launch {

struct TraceRequest {
    double time_s = 0;               // since the trace (session format: since the session) began
    std::int64_t input_length = 0;   // tokens
    std::int64_t output_length = 0;  // tokens; can be 0
    int session = -1;        // index of the session whose requests share hash ids; -1: all do
    bool sub_agent = false;  // made by a sub-agent of the session
    // Prefix-chained block ids: equal ids mean equal blocks and equal everything before them.
    std::vector<std::uint64_t> hash_ids;
};

struct Trace {
    std::string path;
    // Tokens of a hash id: what the file says, else what its rows imply; 0: no ids.
    std::int64_t tokens_per_hash_id = 0;
    std::vector<TraceRequest> requests;  // in file order; a sub-agent's at its place in the session
};

// By path, or by name of a shipped trace. invalid_argument: the file, or "file:line: what is wrong
// with it".
[[nodiscard]] Result<Trace> readTrace(const std::string& path);

// `count` context lengths: input lengths of requests drawn with replacement, clipped to
// [1, longest], longest being at least 1. The same trace, seed and longest give the same lengths on
// every machine, and the first lengths of a longer draw.
[[nodiscard]] std::vector<std::int64_t> drawLengths(const Trace& trace, std::int64_t count,
                                                    std::uint64_t seed, std::int64_t longest);

}  // namespace kvgrid::launch
