// A thread that ends this process when one operation, or the device's work of one step, outlasts
// its deadline.
//
// The main thread says what it is about to do (a Watch); the watchdog reads (operation, since when)
// and, past the timeout, prints rank, step and operation on stderr and ends the process with exit
// code 5 by _exit: it never calls MPI, and mpirun then ends the other ranks.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "kernels/device.h"

namespace kvgrid::comm {

class Watchdog {
public:
    // last_words: as in ProcessOptions.
    Watchdog(int rank, std::chrono::milliseconds timeout,
             void (*last_words)(const char* why) noexcept = nullptr);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // Where the job is, for the message. layer -1: none.
    void setPlace(std::int64_t step, int layer) noexcept;

    // `event` was recorded behind the device's work of this step: it must come within the timeout,
    // counted from when the step before it was done. A launched graph shows no operation to the
    // host, so this is how a step that hangs inside one is seen. A device that has failed ends the
    // process too, with code 1.
    void expect(const void* owner, std::int64_t step, Event event);
    // Drops what this owner expects: before the events' device ends, and when their work is known
    // to be done.
    void forgetExpected(const void* owner);

private:
    friend class Watch;
    struct State;
    std::unique_ptr<State> state_;
};

// Watches one operation while it lives. Nesting keeps the outermost. Cheap: two stores.
class Watch {
public:
    // `operation` is a string literal: "all-gather".
    Watch(Watchdog& watchdog, const char* operation) noexcept;
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

private:
    Watchdog* watchdog_;
    bool outermost_;
};

}  // namespace kvgrid::comm
