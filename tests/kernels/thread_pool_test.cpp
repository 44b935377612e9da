// The pool of threads: every index once, exceptions, sleeping and hurried workers.
#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <kvgrid/error.h>

namespace kvgrid::cpu {
namespace {

TEST(ThreadPoolTest, EveryIndexOnce) {
    for (const int threads : {1, 2, 3, 5, 16}) {
        ThreadPool pool(threads);
        EXPECT_EQ(pool.threads(), threads);
        for (const std::int64_t count : {0, 1, 2, 3, 100, 10000}) {
            std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
            std::atomic<bool> in_range{true};
            pool.parallelFor(count, [&](std::int64_t index, int thread) {
                if (thread < 0 || thread >= threads) in_range = false;
                calls[static_cast<std::size_t>(index)].fetch_add(1);
            });
            for (const auto& call : calls)
                EXPECT_EQ(call.load(), 1);
            EXPECT_TRUE(in_range);
        }
        pool.parallelFor(-5, [](std::int64_t, int) { FAIL(); });
    }
}

// What a task wrote is visible to the caller, and what the caller wrote before to the tasks; a
// thread number is never in use twice at a time. Thread sanitizer checks this test too.
TEST(ThreadPoolTest, ManySmallLoops) {
    ThreadPool pool(4);
    std::vector<std::int64_t> per_thread(4, 0);
    std::int64_t expected = 0;
    for (std::int64_t loop = 0; loop < 20000; ++loop) {
        const std::int64_t count = loop % 7;
        expected += count * loop;
        pool.parallelFor(count, [&, loop](std::int64_t, int thread) {
            per_thread[static_cast<std::size_t>(thread)] += loop;
        });
    }
    EXPECT_EQ(per_thread[0] + per_thread[1] + per_thread[2] + per_thread[3], expected);
}

TEST(ThreadPoolTest, WorkersHelpAlsoAfterASleep) {
    ThreadPool pool(3);
    for (int round = 0; round < 3; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        std::mutex mutex;
        std::set<std::thread::id> seen;
        // Each task waits until all three threads have one, so this ends only when all help.
        pool.parallelFor(3, [&](std::int64_t, int) {
            std::unique_lock lock(mutex);
            seen.insert(std::this_thread::get_id());
            lock.unlock();
            while (true) {
                lock.lock();
                const bool all = seen.size() == 3;
                lock.unlock();
                if (all) return;
                std::this_thread::yield();
            }
        });
        EXPECT_EQ(seen.size(), 3U);
    }
}

TEST(ThreadPoolTest, ExceptionsReachTheCaller) {
    for (const int threads : {1, 4}) {
        ThreadPool pool(threads);
        for (int round = 0; round < 200; ++round) {
            std::atomic<int> begun{0};
            try {
                pool.parallelFor(1000, [&](std::int64_t index, int) {
                    ++begun;
                    if (index % 10 == 3) throw std::runtime_error("index " + std::to_string(index));
                });
                FAIL() << "no exception";
            } catch (const std::runtime_error& error) {
                EXPECT_EQ(std::string(error.what()).rfind("index ", 0), 0U);
            }
            EXPECT_LT(begun.load(), 1000);
            std::atomic<int> after{0};
            pool.parallelFor(10, [&](std::int64_t, int) { ++after; });
            EXPECT_EQ(after.load(), 10);
        }
    }
}

TEST(ThreadPoolTest, EndsWhileWorkersSleepOrSpin) {
    for (int round = 0; round < 50; ++round) {
        ThreadPool pool(1 + round % 6);
        if (round % 2 == 0) pool.parallelFor(20, [](std::int64_t, int) {});
        if (round % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

TEST(ThreadPoolTest, ThreadCountsThatMakeNoSenseAreRefused) {
    EXPECT_THROW(ThreadPool(0), Error);
    EXPECT_THROW(ThreadPool(-1), Error);
    EXPECT_THROW(ThreadPool(ThreadPool::max_threads + 1), Error);
}

}  // namespace
}  // namespace kvgrid::cpu
