// Runs the built program under mpirun, as users do.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/launch/run_program.h"
#include "tests/paths.h"

namespace kvgrid::test {

// `ranks` ranks of kvgrid, one without mpirun; environment: "NAME=value".
inline Finished runRanks(int ranks, const std::vector<std::string>& arguments,
                         const std::vector<std::string>& environment = {}) {
    std::vector<std::string> command{"/usr/bin/env"};
    command.insert(command.end(), environment.begin(), environment.end());
    if (ranks > 1) {
        command.insert(command.end(), {mpirun, "--oversubscribe", "--bind-to", "none", "-n",
                                       std::to_string(ranks)});
    }
    command.emplace_back(cli);
    command.insert(command.end(), arguments.begin(), arguments.end());
    return run(command);
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

// What follows `label` on its line; empty when there is none.
inline std::string valueOf(const std::string& text, const std::string& label) {
    const std::size_t at = text.find(label);
    if (at == std::string::npos) return "";
    const std::size_t begin = at + label.size();
    return text.substr(begin, text.find('\n', begin) - begin);
}

inline int countOf(const std::string& text, const std::string& part) {
    int count = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
        ++count;
    return count;
}

inline std::vector<std::string> joined(std::vector<std::string> first,
                                       const std::vector<std::string>& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
}

}  // namespace kvgrid::test
