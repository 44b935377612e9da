// How far a long run is, on stderr, where somebody reads it.
#pragma once

#include <chrono>
#include <string>

namespace kvgrid::launch {

class Progress {
public:
    // Silent unless `shown`.
    explicit Progress(bool shown) : shown_(shown) {}

    // A new part of the run: always said.
    void begin(const std::string& what);
    // Where the part is: said at most once in two seconds.
    void update(const std::string& what);

private:
    using Clock = std::chrono::steady_clock;
    void say(const std::string& what);

    bool shown_;
    Clock::time_point start_ = Clock::now();
    Clock::time_point said_ = start_;
};

}  // namespace kvgrid::launch
