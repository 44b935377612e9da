// The command line: one subcommand a file, listed here.

#include <array>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>

#include <kvgrid/error.h>

#include "launch/commands.h"
#include "launch/destination.h"
#include "launch/options.h"
#include "launch/ranks.h"

namespace {

using namespace kvgrid;

struct Command {
    std::string_view name;
    std::string_view help;
    int (*run)(int argc, char** argv);
};

constexpr std::array commands{
    Command{"plan", "bytes of the KV cache of a model and context over ranks: does it fit?",
            launch::runPlan},
    Command{"verify", "run distributed decode and check every value", launch::runVerify},
    Command{"bench", "time distributed decode", launch::runBench},
};

std::string help() {
    std::string text =
        "kvgrid: a sharded key-value cache for transformer decoding\n"
        "Usage:\n"
        "  kvgrid COMMAND [--flag VALUE]...\n"
        "  mpirun -n RANKS kvgrid COMMAND [--flag VALUE]...\n\n"
        "Commands:\n";
    for (const Command& command : commands) {
        std::string name(command.name);
        name.resize(8, ' ');
        text += "  " + name + " " + std::string(command.help) + "\n";
    }
    return text +
           "\n'kvgrid COMMAND --help' lists the flags of one; 'kvgrid --version' says which kvgrid "
           "this is.\n\n"
           "Exit codes: 0 right; 1 wrong values; 2 usage or bad input; 3 does not fit;\n"
           "4 device or transport missing; 5 deadline passed or rank lost.\n\n"
           "Examples:\n"
           "  kvgrid plan --model llama-3.1-70b --ranks 8 --context 128K --batch 8\n"
           "  mpirun -n 4 kvgrid verify\n"
           "  mpirun -n 4 kvgrid bench --model llama-3.2-1b --context 4K,16K\n";
}

int runCommand(const Command& command, int argc, char** argv) {
    try {
        return command.run(argc, argv);
    } catch (const Error& error) {
        return launch::refuse(argc, argv, {error.code(), error.what()},
                              launch::Speaker::every_rank);
    } catch (const std::exception& error) {
        return launch::refuse(argc, argv, {ErrorCode::internal, error.what()},
                              launch::Speaker::every_rank);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::string_view first = argc > 1 ? argv[1] : "";
    if (first == "--help") return launch::answer(help());
    if (first == "--version") return launch::answer(launch::versionText());
    for (const Command& command : commands) {
        if (first == command.name) return runCommand(command, argc - 1, argv + 1);
    }
    const std::string problem =
        first.empty() ? "no command" : "unknown command '" + std::string(first) + "'";
    std::fprintf(stderr, "kvgrid: %s\n%s", problem.c_str(), help().c_str());
    return launch::verdict(stdout, exitCode(ErrorCode::invalid_argument), problem);
}
