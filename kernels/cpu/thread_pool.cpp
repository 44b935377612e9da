#include "kernels/cpu/thread_pool.h"

#include <utility>

#include <kvgrid/error.h>

namespace kvgrid::cpu {
namespace {

// About 20 microseconds: longer than the gap between two operations of a layer, short enough not to
// take a core from another rank for long.
constexpr int spins_before_sleep = 1000;

void pauseBriefly() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
    if (threads < 1 || threads > max_threads)
        throw Error(ErrorCode::internal,
                    "a thread pool of " + std::to_string(threads) + " threads");
    workers_.reserve(static_cast<std::size_t>(threads) - 1);
    for (int thread = 1; thread < threads; ++thread)
        workers_.emplace_back([this, thread] { workerMain(thread); });
}

ThreadPool::~ThreadPool() {
    stopping_.store(true, std::memory_order_relaxed);
    state_.fetch_add(1U << generation_shift, std::memory_order_release);
    state_.notify_all();
    for (std::thread& worker : workers_)
        worker.join();
}

void ThreadPool::run(std::int64_t count, TaskView task) {
    if (count <= 0) return;
    if (workers_.empty() || count == 1) {
        for (std::int64_t index = 0; index < count; ++index)
            task.call(task.target, index, 0);
        return;
    }
    task_ = task;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    // No worker is inside and the loop is closed, so the caller alone changes the word.
    const std::uint32_t generation =
        (state_.load(std::memory_order_relaxed) >> generation_shift) + 1;
    state_.store(generation << generation_shift | open_bit, std::memory_order_release);
    state_.notify_all();

    takeIndices(0);

    std::uint32_t state = state_.fetch_and(~open_bit, std::memory_order_acquire) & ~open_bit;
    for (int spins = 0; (state & inside_mask) != 0; ++spins) {
        if (spins < spins_before_sleep)
            pauseBriefly();
        else
            state_.wait(state, std::memory_order_acquire);
        state = state_.load(std::memory_order_acquire);
    }
    if (failed_.load(std::memory_order_relaxed))
        std::rethrow_exception(std::exchange(failure_, {}));
}

void ThreadPool::workerMain(int thread) {
    std::uint32_t generation = 0;
    while (true) {
        generation = waitForLoop(generation);
        if (stopping_.load(std::memory_order_relaxed)) return;
        takeIndices(thread);
        const std::uint32_t state = state_.fetch_sub(1, std::memory_order_release) - 1;
        if ((state & (open_bit | inside_mask)) == 0) state_.notify_all();
    }
}

// Joins the next open loop and returns its generation, or returns when the pool stops. A generation
// that wrapped around to the last one is missed, which costs this worker's help in one loop.
std::uint32_t ThreadPool::waitForLoop(std::uint32_t last_generation) {
    int spins = 0;
    std::uint32_t state = state_.load(std::memory_order_acquire);
    while (!stopping_.load(std::memory_order_relaxed)) {
        const bool joinable =
            (state & open_bit) != 0 && state >> generation_shift != last_generation;
        if (joinable) {
            if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire))
                return state >> generation_shift;
            continue;
        }
        if (++spins < spins_before_sleep)
            pauseBriefly();
        else
            state_.wait(state, std::memory_order_acquire);
        state = state_.load(std::memory_order_acquire);
    }
    return last_generation;
}

void ThreadPool::takeIndices(int thread) noexcept {
    while (!failed_.load(std::memory_order_relaxed)) {
        const std::int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
        if (index >= count_) return;
        try {
            task_.call(task_.target, index, thread);
        } catch (...) {
            // The thread that sets the flag owns the exception; the caller reads it after all left.
            if (!failed_.exchange(true, std::memory_order_relaxed))
                failure_ = std::current_exception();
        }
    }
}

}  // namespace kvgrid::cpu
