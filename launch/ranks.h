// What a subcommand that mpirun starts does around its run: all ranks leave with one exit code, and
// rank 0 alone prints.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include <kvgrid/error.h>
#include <kvgrid/process.h>

#include "launch/destination.h"

namespace kvgrid::launch {

// How a run ended: code 0, or 1 and the values that were wrong.
struct Outcome {
    int code = 0;
    std::string reason;
};

// Starts the process and runs `body` on every rank. Every rank returns the same exit code: of the
// outcome, or of the Failure, after rank 0 printed the verdict (to stderr when `text_on_stderr`).
// An Error or any other exception of a single rank ends the job with MPI_Abort.
// `body` returns a Failure on all ranks or on none: see agree.
[[nodiscard]] int runOnRanks(int argc, char** argv, const ProcessOptions& options,
                             bool text_on_stderr,
                             const std::function<Result<Outcome>(Process&)>& body);

// Prints the text of --help or --version, once however many ranks were started. Returns 0.
int answer(const std::string& text);

// Collective. The failure of the lowest rank that has one, on every rank.
[[nodiscard]] Result<void> agree(Process& process, const Result<void>& mine);

// Collective. values[rank]: what each rank gave. All give as many.
[[nodiscard]] std::vector<std::vector<double>> gatherValues(Process& process,
                                                            std::span<const double> values);

// Whether two of these ranks have one GPU.
[[nodiscard]] bool shareAGpu(std::span<const RankDescription> ranks);

// Collective. Rank 0's destination, checked; every rank gets its verdict.
[[nodiscard]] Result<Destination> openDestination(Process& process, const std::string& json,
                                                  const std::string& csv);

}  // namespace kvgrid::launch
