#include "comm/fault_injection.h"

#ifdef KVGRID_FAULT_INJECTION

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <kvgrid/error.h>

namespace kvgrid::comm {
namespace {

constexpr std::string_view collective = "collective";
constexpr std::array<std::string_view, 5> places{"start", "append", "attend", "join", collective};

struct Fault {
    int signal = 0;
    std::string place;
    int rank = 0;
    int count = 1;
};

int parseNumber(std::string_view text, std::string_view whole) {
    int number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || end != text.data() + text.size() || number < 0) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("KVGRID_FAULT={}: \"{}\" is no count", whole, text));
    }
    return number;
}

// A fault that is misspelt would let a test of faults pass without one.
Fault parse(std::string_view text) {
    std::vector<std::string_view> parts;
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find(':', begin), text.size());
        parts.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    const bool kill = !parts.empty() && parts[0] == "kill";
    const bool stop = !parts.empty() && parts[0] == "stop";
    const bool place =
        parts.size() > 1 && std::find(places.begin(), places.end(), parts[1]) != places.end();
    if (!(kill || stop) || !place || parts.size() < 3 || parts.size() > 4) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("KVGRID_FAULT={}: expected <kill|stop>:<{}>:<rank>[:<count>]", text,
                                fmt::join(places, "|")));
    }
    Fault fault;
    fault.signal = kill ? SIGKILL : SIGSTOP;
    fault.place = parts[1];
    fault.rank = parseNumber(parts[2], text);
    if (parts.size() == 4) fault.count = parseNumber(parts[3], text);
    return fault;
}

const std::optional<Fault>& configuredFault() {
    static const std::optional<Fault> fault = []() -> std::optional<Fault> {
        const char* text = std::getenv("KVGRID_FAULT");
        if (text == nullptr || *text == '\0') return std::nullopt;
        return parse(text);
    }();
    return fault;
}

void raiseSignal(const Fault& fault) {
    const std::string line =
        fmt::format("kvgrid: rank {}: injected fault: {} at {}\n", fault.rank,
                    fault.signal == SIGKILL ? "SIGKILL" : "SIGSTOP", fault.place);
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
    ::kill(::getpid(), fault.signal);
}

}  // namespace

void faultPoint(const char* place, int rank) {
    const auto& fault = configuredFault();
    if (!fault || fault->place != place) return;
    const bool named = fault->rank == rank;
    const bool amid_collective = fault->place == collective;
    // The lowest of the other ranks holds the collective open.
    const bool holds = amid_collective && rank == (fault->rank == 0 ? 1 : 0);
    if (!named && !holds) return;
    static int visits = 0;
    if (++visits != fault->count) return;
    if (!amid_collective) {
        raiseSignal(*fault);
    } else if (named) {
        std::thread([fault = *fault] {
            std::this_thread::sleep_for(collective_delay);
            raiseSignal(fault);
        }).detach();
    } else {
        std::this_thread::sleep_for(collective_hold);
    }
}

}  // namespace kvgrid::comm

#endif  // KVGRID_FAULT_INJECTION
