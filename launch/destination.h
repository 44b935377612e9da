// Where the output of a subcommand goes: report files, and the verdict on the last line.
//
// With `--json -` the JSON is the only thing on stdout: table, progress and verdict go to stderr.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include <kvgrid/error.h>

#include "launch/report.h"

namespace kvgrid::launch {

class Destination {
public:
    // Before the run, on the rank that writes. json: empty, a file or "-"; csv: empty or a file.
    // invalid_argument: a file that exists, that cannot be written, or the same one twice. Leaves
    // nothing behind.
    [[nodiscard]] static Result<Destination> check(std::string json, std::string csv);

    [[nodiscard]] bool jsonOnStdout() const noexcept { return json_ == "-"; }
    // For the table, progress and verdict.
    [[nodiscard]] std::FILE* text() const noexcept { return jsonOnStdout() ? stderr : stdout; }

    // After the run: the JSON and CSV that were asked for. Never overwrites; a file that could not
    // be written whole is removed. invalid_argument: the flag and why.
    [[nodiscard]] Result<void> write(const Report& report) const;

private:
    Destination(std::string json, std::string csv);
    std::string json_;
    std::string csv_;
};

// The last line: "OK" for code 0, else "FAILED: reason". Returns `code`.
int verdict(std::FILE* out, int code, std::string_view reason = "");

// Has the first rank print "FAILED: reason" (to stderr when `text_on_stderr`) even where the job
// ends without a verdict: at the deadline, at abort, and when the launcher ends it with SIGTERM
// because another rank was lost. What to put into ProcessOptions::last_words comes back; null on
// other ranks. Once in a process.
using LastWords = void (*)(const char* why) noexcept;
[[nodiscard]] LastWords armVerdict(bool text_on_stderr);

// What the MPI launcher says this process's rank is, before MPI is initialised; 0 without a
// launcher.
[[nodiscard]] int launcherRank();

// Who says why a subcommand ends without a result.
enum class Speaker {
    first_rank,  // all ranks know it: only the first prints
    every_rank,  // perhaps this rank alone knows it
};

// Ends a subcommand that has no result: says why on stderr, with a hint at --help when the
// arguments were wrong, and gives the verdict (first rank only) where the subcommand's own would
// go. Ranks are told apart by what their MPI launcher says. argv[0] is the subcommand. Returns the
// exit code.
int refuse(int argc, const char* const* argv, const Failure& failure,
           Speaker speaker = Speaker::first_rank);

}  // namespace kvgrid::launch
