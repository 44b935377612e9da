// The smallest job that goes the way of a decode step: plan from rank 0, append, attend, join. What
// run_faults.py kills and stops when there is no need for the whole program.
//
//   fault_job [--timeout SECONDS] [--steps N] [--throw RANK]      (steps of about 1 ms)
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include <kvgrid/process.h>

#include "comm/fault_injection.h"
#include "comm/join.h"
#include "comm/process.h"

namespace kvgrid {
namespace {

constexpr int layers = 4;

struct Settings {
    ProcessOptions options;
    std::int64_t steps = 1000;
    int throwing_rank = -1;
};

void decode(Process& process, const Settings& settings) {
    comm::ProcessState& state = process.state();
    const comm::Join::Shape shape{
        .max_rows = 4, .local_heads = 8, .max_head_dim = 128, .output_format = NumberFormat::bf16};
    auto join = comm::Join::create(state.transport(), *state.device, shape).value();
    const std::vector<float> states(
        static_cast<std::size_t>(shape.max_rows * shape.local_heads * shape.max_head_dim), 1.0F);
    std::vector<std::byte> out(static_cast<std::size_t>(process.size()) * states.size() * 2);

    for (std::int64_t step = 0; step < settings.steps; ++step) {
        state.watchdog->setPlace(step, -1);
        (void)state.control->broadcast(std::as_bytes(std::span(&step, 1)));
        for (int layer = 0; layer < layers; ++layer) {
            state.watchdog->setPlace(step, layer);
            comm::faultPoint("append", process.rank());
            comm::faultPoint("attend", process.rank());
            if (process.rank() == settings.throwing_rank && step == 3) {
                std::cerr << "kvgrid: rank " << process.rank() << ": injected fault: throw\n";
                throw Error(ErrorCode::does_not_fit, "thrown as asked");
            }
            std::this_thread::sleep_for(std::chrono::microseconds(200));
            join.gather({.out = states.data()}, shape.max_rows, shape.max_head_dim, out.data(),
                        state.device->defaultStream());
        }
    }
}

Settings parse(int argc, char** argv) {
    Settings settings;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string_view flag = argv[i];
        const int value = std::atoi(argv[i + 1]);
        if (flag == "--timeout") settings.options.timeout = std::chrono::seconds(value);
        if (flag == "--steps") settings.steps = value;
        if (flag == "--throw") settings.throwing_rank = value;
    }
    return settings;
}

int run(int argc, char** argv) {
    const Settings settings = parse(argc, argv);
    auto process = Process::start(argc, argv, settings.options);
    if (!process) throw Error(process.error());
    try {
        decode(*process, settings);
    } catch (const Error& error) {
        process->abort(exitCode(error.code()), error.what());
    }
    if (process->rank() == 0) std::cout << "OK\n";
    return 0;
}

}  // namespace
}  // namespace kvgrid

int main(int argc, char** argv) {
    try {
        return kvgrid::run(argc, argv);
    } catch (const kvgrid::Error& error) {
        std::cerr << "fault_job: " << error.what() << '\n';
        return kvgrid::exitCode(error.code());
    }
}
