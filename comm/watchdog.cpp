#include "comm/watchdog.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cinttypes>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <exception>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

namespace kvgrid::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int deadline_exit_code = 5;
constexpr int device_failed_exit_code = 1;
constexpr std::chrono::milliseconds longest_nap{100};
constexpr std::chrono::milliseconds shortest_nap{1};
// Keeps `since + timeout` inside the clock's range.
constexpr std::chrono::milliseconds longest_timeout = std::chrono::hours(24 * 365 * 10);

// A pipe that nobody reads must not keep the process alive.
void writeToStderr(const char* text, std::size_t bytes) {
    pollfd descriptor{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&descriptor, 1, 100) != 1) return;
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, bytes);
}

}  // namespace

// One writer, the main thread; one reader, the watchdog's. `sequence` is odd while an operation
// runs. The reader discards what it read when the sequence has moved meanwhile: then the main
// thread is alive. Data is stored with release and loaded with acquire, so that whoever sees a new
// value also sees that the sequence has moved.
struct Watchdog::State {
    int rank = 0;
    std::chrono::milliseconds timeout{0};
    void (*last_words)(const char* why) noexcept = nullptr;

    std::atomic<std::uint64_t> sequence{0};
    std::atomic<const char*> operation{nullptr};
    std::atomic<Clock::rep> since{0};
    std::atomic<std::int64_t> step{-1};
    std::atomic<int> layer{-1};
    bool watching = false;  // the writer's own

    struct Expected {
        const void* owner = nullptr;
        std::int64_t step = 0;
        Clock::time_point since;
        Event event;
    };
    std::mutex expected_mutex;
    std::deque<Expected> expected;  // oldest first

    std::mutex mutex;
    std::condition_variable wake;
    bool stopping = false;
    std::thread thread;

    void begin(const char* what) noexcept {
        operation.store(what, std::memory_order_release);
        since.store(Clock::now().time_since_epoch().count(), std::memory_order_release);
        sequence.store(sequence.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    }

    void end() noexcept {
        sequence.store(sequence.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    }

    void checkDeadline() {
        const auto before = sequence.load(std::memory_order_acquire);
        if (before % 2 == 0) return;
        const char* what = operation.load(std::memory_order_acquire);
        const Clock::duration begun{since.load(std::memory_order_acquire)};
        if (sequence.load(std::memory_order_relaxed) != before) return;
        if (Clock::now().time_since_epoch() - begun < timeout) return;
        report(what);
        ::_exit(deadline_exit_code);
    }

    void checkExpected() {
        const std::lock_guard lock(expected_mutex);
        try {
            const auto now = Clock::now();
            while (!expected.empty() && expected.front().event.finished()) {
                expected.pop_front();
                if (!expected.empty())
                    expected.front().since = std::max(expected.front().since, now);
            }
            if (expected.empty() || now - expected.front().since < timeout) return;
        } catch (const std::exception& error) {
            // The main thread may be far from its next call to the device.
            atStep(expected.front().step);
            say("%s", error.what());
            ::_exit(device_failed_exit_code);
        }
        atStep(expected.front().step);
        report("the device's work");
        ::_exit(deadline_exit_code);
    }

    void atStep(std::int64_t number) noexcept {
        step.store(number, std::memory_order_relaxed);
        layer.store(-1, std::memory_order_relaxed);
    }

    void report(const char* what) {
        const bool whole_seconds = timeout.count() % 1000 == 0;
        const std::int64_t amount = whole_seconds ? timeout.count() / 1000 : timeout.count();
        say("%s did not end within %" PRId64 " %s", what, amount, whole_seconds ? "s" : "ms");
    }

    // One line on stderr, with rank, step and layer before it.
    [[gnu::format(printf, 2, 3)]] void say(const char* format, ...) {
        constexpr std::string_view name = "kvgrid: ";
        std::array<char, 512> line{};
        int length = std::snprintf(line.data(), line.size(), "%srank %d: ", name.data(), rank);
        const auto room = [&] { return line.size() - static_cast<std::size_t>(length); };
        const auto at_step = step.load(std::memory_order_relaxed);
        const int at_layer = layer.load(std::memory_order_relaxed);
        if (at_step >= 0 && at_layer >= 0) {
            length += std::snprintf(line.data() + length, room(),
                                    "step %" PRId64 ", layer %d: ", at_step, at_layer);
        } else if (at_step >= 0) {
            length += std::snprintf(line.data() + length, room(), "step %" PRId64 ": ", at_step);
        }
        std::va_list arguments;
        va_start(arguments, format);
        length += std::max(0, std::vsnprintf(line.data() + length, room(), format, arguments));
        va_end(arguments);
        const std::size_t end = std::min(static_cast<std::size_t>(length), line.size() - 2);
        line[end] = '\n';
        writeToStderr(line.data(), end + 1);
        line[end] = '\0';
        if (last_words != nullptr) last_words(line.data() + name.size());
    }

    void run() {
        const auto nap = std::clamp(timeout / 10, shortest_nap, longest_nap);
        std::unique_lock lock(mutex);
        while (!wake.wait_for(lock, nap, [this] { return stopping; })) {
            checkDeadline();
            checkExpected();
        }
    }
};

Watchdog::Watchdog(int rank, std::chrono::milliseconds timeout,
                   void (*last_words)(const char* why) noexcept)
    : state_(std::make_unique<State>()) {
    state_->rank = rank;
    state_->last_words = last_words;
    state_->timeout = std::min(timeout, longest_timeout);
    state_->thread = std::thread([state = state_.get()] { state->run(); });
}

Watchdog::~Watchdog() {
    {
        const std::lock_guard lock(state_->mutex);
        state_->stopping = true;
    }
    state_->wake.notify_one();
    state_->thread.join();
}

void Watchdog::setPlace(std::int64_t step, int layer) noexcept {
    state_->step.store(step, std::memory_order_relaxed);
    state_->layer.store(layer, std::memory_order_relaxed);
}

void Watchdog::expect(const void* owner, std::int64_t step, Event event) {
    const std::lock_guard lock(state_->expected_mutex);
    state_->expected.push_back({owner, step, Clock::now(), std::move(event)});
}

void Watchdog::forgetExpected(const void* owner) {
    const std::lock_guard lock(state_->expected_mutex);
    std::erase_if(state_->expected,
                  [owner](const auto& expected) { return expected.owner == owner; });
}

Watch::Watch(Watchdog& watchdog, const char* operation) noexcept
    : watchdog_(&watchdog),
      outermost_(!watchdog.state_->watching) {
    if (!outermost_) return;
    watchdog_->state_->watching = true;
    watchdog_->state_->begin(operation);
}

Watch::~Watch() {
    if (!outermost_) return;
    watchdog_->state_->end();
    watchdog_->state_->watching = false;
}

}  // namespace kvgrid::comm
