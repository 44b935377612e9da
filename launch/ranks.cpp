#include "launch/ranks.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <set>
#include <utility>

namespace kvgrid::launch {

namespace {

int conclude(Process& process, int argc, char** argv, bool text_on_stderr,
             const Result<Outcome>& result) {
    int code = result ? result->code : exitCode(result.error().code);
    if (process.rank() == 0) {
        if (result) {
            code = verdict(text_on_stderr ? stderr : stdout, code, result->reason);
        } else {
            refuse(argc, argv, result.error());
        }
    }
    // The launcher ends the job at the first exit code that is not 0: not before the verdict.
    process.barrier();
    return code;
}

// Ranks that were told different things would compute different things, and agree on none.
Result<void> sameArguments(Process& process, int argc, char** argv) {
    std::string mine;
    for (int i = 0; i < argc; ++i)
        mine.append(argv[i]).push_back('\0');
    const std::vector<std::string> all = process.allGather(mine);
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
        if (all[rank] == all[0]) continue;
        return failure(
            ErrorCode::invalid_argument,
            "rank " + std::to_string(rank) + " was started with other arguments than rank 0");
    }
    return {};
}

}  // namespace

int runOnRanks(int argc, char** argv, const ProcessOptions& options, bool text_on_stderr,
               const std::function<Result<Outcome>(Process&)>& body) {
    ProcessOptions with_verdict = options;
    with_verdict.last_words = armVerdict(text_on_stderr);
    auto process = Process::start(with_verdict);
    if (!process) return refuse(argc, argv, process.error());
    try {
        const Result<void> alike = sameArguments(*process, argc, argv);
        return conclude(*process, argc, argv, text_on_stderr,
                        alike ? body(*process) : Result<Outcome>(tl::unexpected(alike.error())));
    } catch (const Error& error) {
        process->abort(exitCode(error.code()), error.what());
    } catch (const std::bad_alloc&) {
        process->abort(exitCode(ErrorCode::does_not_fit), "out of memory");
    } catch (const std::exception& error) {
        process->abort(exitCode(ErrorCode::internal), error.what());
    }
}

int answer(const std::string& text) {
    if (launcherRank() == 0) std::fputs(text.c_str(), stdout);
    return 0;
}

Result<void> agree(Process& process, const Result<void>& mine) {
    // Nothing where all is well, else the code as one character and the message.
    std::string said;
    if (!mine)
        said = static_cast<char>('0' + static_cast<int>(mine.error().code)) + mine.error().message;
    for (const std::string& other : process.allGather(said)) {
        if (!other.empty()) {
            return failure(static_cast<ErrorCode>(other.front() - '0'), other.substr(1));
        }
    }
    return {};
}

bool shareAGpu(std::span<const RankDescription> ranks) {
    std::set<std::pair<std::string, std::string>> seen;
    return std::any_of(ranks.begin(), ranks.end(), [&](const RankDescription& rank) {
        return rank.device.starts_with("cuda") && !seen.emplace(rank.host, rank.device).second;
    });
}

Result<Destination> openDestination(Process& process, const std::string& json,
                                    const std::string& csv) {
    // Other ranks write nothing; all of them probing one file would find each other's.
    auto mine = process.rank() == 0 ? Destination::check(json, csv) : Destination::check("", "");
    const Result<void> checked = mine ? Result<void>() : tl::unexpected(mine.error());
    if (auto agreed = agree(process, checked); !agreed) return tl::unexpected(agreed.error());
    return mine;
}

std::vector<std::vector<double>> gatherValues(Process& process, std::span<const double> values) {
    const std::string mine(reinterpret_cast<const char*>(values.data()), values.size_bytes());
    std::vector<std::vector<double>> all;
    for (const std::string& bytes : process.allGather(mine)) {
        all.emplace_back(bytes.size() / sizeof(double));
        std::memcpy(all.back().data(), bytes.data(), all.back().size() * sizeof(double));
    }
    return all;
}

}  // namespace kvgrid::launch
