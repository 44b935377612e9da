// A loop over threads, for the work beside the cache: making inputs and checking outputs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace kvgrid::launch {

// Calls body(i) for every i in [0, count), in any order, on up to `threads` threads of which the
// calling one is one. Rethrows the first exception when all threads are done.
template <typename Body>
void parallelFor(int threads, std::int64_t count, const Body& body) {
    std::atomic<std::int64_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_mutex;
    const auto work = [&] {
        try {
            for (std::int64_t i = next++; i < count; i = next++)
                body(i);
        } catch (...) {
            next = count;
            const std::lock_guard lock(failure_mutex);
            if (!failure) failure = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> others;
        for (std::int64_t i = 1; i < std::min<std::int64_t>(threads, count); ++i)
            others.emplace_back(work);
        work();
    }
    if (failure) std::rethrow_exception(failure);
}

}  // namespace kvgrid::launch
