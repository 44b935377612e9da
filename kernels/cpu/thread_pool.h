// The threads of one CPU device.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <type_traits>
#include <vector>

namespace kvgrid::cpu {

// Runs the indices of a loop on a fixed set of threads, of which the caller is one. Indices are
// handed out one by one, so units of uneven cost balance. Nothing is allocated per loop. Workers
// spin for some microseconds between loops, then sleep; a loop does not wait for workers that sleep
// on.
class ThreadPool {
public:
    // threads >= 1, at most max_threads. The caller counts as one of them.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    static constexpr int max_threads = 1024;

    [[nodiscard]] int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

    // Calls task(index, thread) for each index in [0, count), each once, in any order; thread is in
    // [0, threads()), and a thread runs one task at a time. Returns when all are done. The first
    // exception of a task is rethrown here and the indices not yet begun are dropped. One loop at a
    // time: not from inside a task, not from two threads at once.
    template <typename Task>
    void parallelFor(std::int64_t count, Task&& task) {
        using Target = std::remove_reference_t<Task>;
        run(count, {[](void* target, std::int64_t index, int thread) {
                        (*static_cast<Target*>(target))(index, thread);
                    },
                    const_cast<void*>(static_cast<const void*>(&task))});
    }

private:
    struct TaskView {
        void (*call)(void* target, std::int64_t index, int thread);
        void* target;
    };

    void run(std::int64_t count, TaskView task);
    void workerMain(int thread);
    std::uint32_t waitForLoop(std::uint32_t last_generation);
    void takeIndices(int thread) noexcept;

    // The state of the current loop in one word, so that joining it is one atomic step:
    // generation << 12 | open << 11 | workers inside.
    static constexpr std::uint32_t inside_mask = (1U << 11) - 1;
    static constexpr std::uint32_t open_bit = 1U << 11;
    static constexpr std::uint32_t generation_shift = 12;

    std::atomic<std::uint32_t> state_{0};
    std::atomic<bool> stopping_{false};

    // Written by the caller while no worker is inside.
    TaskView task_{nullptr, nullptr};
    std::int64_t count_ = 0;

    alignas(64) std::atomic<std::int64_t> next_{0};
    alignas(64) std::atomic<bool> failed_{false};
    std::exception_ptr failure_;

    std::vector<std::thread> workers_;
};

}  // namespace kvgrid::cpu
