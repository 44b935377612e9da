// How long the coordinator takes for one step of many running sequences. Not a test: it prints.
//
//   plan_benchmark [sequences] [steps] [window]
//
// Every sequence runs 1 token a step; their lengths are staggered over a block, so that each step
// takes new blocks for one in 64 of them. With a window there is a second layer group, which also
// frees one for each that it takes.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "shard/replica.h"
#include "src/coordinator.h"

namespace {

using kvgrid::Coordinator;
using kvgrid::CoordinatorConfig;
using kvgrid::Replica;
using kvgrid::Requests;
using kvgrid::SequenceId;
using kvgrid::StepPlan;

constexpr std::int64_t block_size = 64;

template <typename Function>
double microseconds(Function function) {
    const auto start = std::chrono::steady_clock::now();
    function();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
        .count();
}

void report(const char* what, std::vector<double>& times) {
    std::sort(times.begin(), times.end());
    std::printf("%-18s %8.1f %8.1f %8.1f\n", what, times.front(), times[times.size() / 2],
                times[times.size() * 99 / 100]);
}

CoordinatorConfig configOf(int sequences, int steps, int window) {
    CoordinatorConfig config;
    config.limits.max_sequences = sequences;
    config.limits.max_sequence_length = block_size + steps;
    config.limits.max_step_tokens = sequences * block_size;
    const std::int64_t blocks = config.limits.max_sequence_length / block_size + 1;
    config.limits.groups = {
        {.blocks_per_sequence = blocks, .device_blocks = sequences * blocks, .host_blocks = 0}};
    config.block_sizes = {block_size};
    config.windows = {0};
    if (window > 0) {
        config.limits.groups.push_back(config.limits.of(0));
        config.block_sizes.push_back(block_size);
        config.windows.push_back(window);
    }
    return config;
}

int measure(int sequences, int steps, int window) {
    const CoordinatorConfig config = configOf(sequences, steps, window);
    Coordinator coordinator(config);
    Replica replica(config.limits);
    Requests allocate;
    for (int i = 0; i < sequences; ++i)
        allocate.allocate(config.limits.max_sequence_length);
    StepPlan plan = coordinator.plan(allocate.all());
    bool right = replica.apply(plan).has_value();
    Requests stagger;
    Requests decode;
    std::vector<std::int64_t> accepted;
    for (int i = 0; i < sequences; ++i) {
        const SequenceId sequence{plan.answers[static_cast<std::size_t>(i)].sequence};
        accepted.push_back(1 + i % block_size);
        stagger.run(sequence, accepted.back());
        decode.run(sequence);
    }
    right &= replica.apply(coordinator.plan(stagger.all())).has_value();
    right &= coordinator.advance(accepted).has_value();
    accepted.assign(static_cast<std::size_t>(sequences), 1);

    std::vector<double> planning;
    std::vector<double> encoding;
    std::vector<double> decoding;
    std::vector<double> applying;
    std::vector<double> advancing;
    std::vector<std::byte> message;
    for (int step = 0; step < steps - 1; ++step) {
        planning.push_back(microseconds([&] { plan = coordinator.plan(decode.all()); }));
        encoding.push_back(microseconds([&] { message = plan.encode(); }));
        decoding.push_back(
            microseconds([&] { right &= StepPlan::decode(message, config.limits).has_value(); }));
        applying.push_back(microseconds([&] { right &= replica.apply(plan).has_value(); }));
        right &= plan.runs.size() == accepted.size();
        advancing.push_back(
            microseconds([&] { right &= coordinator.advance(accepted).has_value(); }));
    }
    std::printf("# %d sequences, 1 token each, %d steps; plan of %zu bytes\n", sequences, steps - 1,
                message.size());
    std::printf("%-18s %8s %8s %8s\n", "# us a step", "min", "p50", "p99");
    report("plan", planning);
    report("advance", advancing);
    report("encode", encoding);
    report("decode", decoding);
    report("apply to replica", applying);
    std::puts(right ? "OK" : "FAILED: a plan was refused");
    return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    const int sequences = argc > 1 ? std::atoi(argv[1]) : 4096;
    const int steps = argc > 2 ? std::atoi(argv[2]) : 2000;
    const int window = argc > 3 ? std::atoi(argv[3]) : 0;
    if (sequences < 1 || steps < 2 || window < 0) {
        std::fputs("plan_benchmark [sequences >= 1] [steps >= 2] [window >= 0]\n", stderr);
        return 2;
    }
    return measure(sequences, steps, window);
}
