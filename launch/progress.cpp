#include "launch/progress.h"

#include <cstdio>

#include <fmt/format.h>

namespace kvgrid::launch {

void Progress::begin(const std::string& what) {
    if (shown_) say(what);
}

void Progress::update(const std::string& what) {
    if (shown_ && Clock::now() - said_ >= std::chrono::seconds(2)) say(what);
}

void Progress::say(const std::string& what) {
    said_ = Clock::now();
    const double seconds = std::chrono::duration<double>(said_ - start_).count();
    fmt::print(stderr, "[{:6.1f} s] {}\n", seconds, what);
}

}  // namespace kvgrid::launch
