#include "comm/process.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <hwy/highway.h>
#include <xxhash.h>

#include "comm/affinity.h"
#include "comm/device_binding.h"
#include "comm/fault_injection.h"
#include "comm/mpi_support.h"

namespace kvgrid {
namespace {

Process* living_process = nullptr;

Result<void> validate(const ProcessOptions& options) {
    if (options.timeout.count() <= 0) {
        return failure(ErrorCode::invalid_argument,
                       fmt::format("timeout {} ms is not positive", options.timeout.count()));
    }
    if (options.threads < 0) {
        return failure(ErrorCode::invalid_argument,
                       fmt::format("threads {} is negative", options.threads));
    }
    // What no rank of this build can have is refused before MPI starts.
    if (options.device == DeviceKind::cuda && cudaLibrary().empty()) {
        return failure(ErrorCode::unavailable,
                       "device cuda: this kvgrid was built without the CUDA device (configure with "
                       "-DKVGRID_CUDA=ON)");
    }
    if (options.transport == TransportKind::nccl && comm::ncclLibrary().empty()) {
        return failure(ErrorCode::unavailable,
                       "transport nccl: this kvgrid was built without the NCCL transport");
    }
    return {};
}

// The launcher's word, for the watchdog's message before MPI can tell.
int rankFromEnvironment() {
    for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
        const char* text = std::getenv(variable);
        if (text == nullptr) continue;
        const std::string_view digits(text);
        int rank = 0;
        const auto [end, error] = std::from_chars(digits.begin(), digits.end(), rank);
        if (error == std::errc{} && end == digits.end()) return rank;
    }
    return 0;
}

Result<void> startMpi(comm::ProcessState& state, int* argc, char*** argv) {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) {
        return failure(ErrorCode::unavailable, "MPI has ended in this process and cannot restart");
    }
    int initialized = 0;
    MPI_Initialized(&initialized);
    int level = MPI_THREAD_SINGLE;
    if (initialized == 0) {
        comm::checkMpi(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level), "start of MPI");
        state.owns_mpi = true;
    } else {
        MPI_Query_thread(&level);
    }
    if (level < MPI_THREAD_FUNNELED) {
        return failure(ErrorCode::unavailable,
                       "MPI runs with MPI_THREAD_SINGLE; kvgrid needs MPI_THREAD_FUNNELED");
    }
    int on_main_thread = 0;
    MPI_Is_thread_main(&on_main_thread);
    if (on_main_thread == 0) {
        throw Error(ErrorCode::invalid_argument, "Process::start: not on the thread that runs MPI");
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &state.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &state.size);
    return {};
}

// Node rank, node size and this rank's share of the node's hardware threads.
void findNode(comm::ProcessState& state) {
    const comm::Watch watch(*state.watchdog, "exchange within the node");
    MPI_Comm node = MPI_COMM_NULL;
    comm::checkMpi(
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, state.rank, MPI_INFO_NULL, &node),
        "MPI_Comm_split_type");
    MPI_Comm_rank(node, &state.node_rank);
    MPI_Comm_size(node, &state.node_size);

    const comm::CpuSet mine = comm::affinityMask();
    std::vector<comm::CpuSet> masks(static_cast<std::size_t>(state.node_size));
    comm::checkMpi(
        MPI_Allgather(&mine, sizeof mine, MPI_BYTE, masks.data(), sizeof mine, MPI_BYTE, node),
        "exchange of affinity masks");
    MPI_Comm_free(&node);
    state.threads = state.options.threads != 0
                        ? state.options.threads
                        : comm::shareOfMask(masks, static_cast<std::size_t>(state.node_rank));
}

std::string optionsText(const ProcessOptions& options) {
    return fmt::format("device {}, transport {}, timeout {} ms, threads {}, share_gpu {}",
                       options.device ? name(*options.device) : "auto",
                       options.transport ? name(*options.transport) : "auto",
                       options.timeout.count(), options.threads, options.share_gpu);
}

std::string hostName() {
    std::array<char, MPI_MAX_PROCESSOR_NAME> text{};
    int length = 0;
    MPI_Get_processor_name(text.data(), &length);
    return {text.data(), static_cast<std::size_t>(length)};
}

std::vector<std::string> allGatherText(comm::Control& control, std::string_view text) {
    std::vector<std::string> all;
    for (const auto& bytes : control.allGather(std::as_bytes(std::span(text)))) {
        all.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    return all;
}

// Every rank sees the same options and reaches the same verdict.
Result<void> compareOptions(comm::ProcessState& state) {
    const auto options = allGatherText(*state.control, optionsText(state.options));
    for (std::size_t rank = 0; rank < options.size(); ++rank) {
        if (options[rank] == options[0]) continue;
        return failure(ErrorCode::invalid_argument,
                       fmt::format("rank {} was started with other options than rank 0: {}; {}",
                                   rank, options[rank], options[0]));
    }
    return {};
}

void introduceRanks(comm::ProcessState& state) {
    comm::Control& control = *state.control;
    const auto hosts = allGatherText(control, hostName());
    const auto pids = allGatherText(control, fmt::to_string(::getpid()));
    const auto devices = allGatherText(control, state.device->description());
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
        state.ranks.push_back(
            {static_cast<int>(rank), hosts[rank], std::stoi(pids[rank]), devices[rank]});
    }
}

Result<void> makeDataTransport(comm::ProcessState& state) {
    const bool on_gpu = state.device->kind() == DeviceKind::cuda;
    const bool has_nccl = !comm::ncclLibrary().empty();
    const TransportKind kind = state.options.transport.value_or(
        on_gpu && has_nccl ? TransportKind::nccl : TransportKind::mpi);
    if (kind == TransportKind::nccl && !on_gpu) {
        return failure(ErrorCode::unavailable, "transport nccl: the ranks are on the CPU device");
    }
    if (!on_gpu) return {};
    if (kind == TransportKind::mpi) {
        state.data_transport = comm::makeStagedTransport(*state.watchdog, *state.device);
        return {};
    }
    const auto exchange = [&](std::span<std::byte> bytes) {
        const auto root = state.control->broadcast(bytes);
        std::copy(root.begin(), root.end(), bytes.begin());
    };
    const bool shared = state.control->maximum(state.device_sharers) > 1;
    state.data_transport = comm::makeNcclTransport(
        *state.watchdog, *state.device,
        {.rank = state.rank, .size = state.size, .share_gpu = shared}, exchange);
    return {};
}

// Collective. The same verdict on every rank.
Result<void> join(comm::ProcessState& state) {
    if (auto compared = compareOptions(state); !compared) return compared;
    auto bound = comm::bindDevice(
        *state.control, state.options,
        {.host = hostName(), .node_rank = state.node_rank, .threads = state.threads});
    if (!bound) return tl::unexpected(bound.error());
    state.device = std::move(bound->device);
    state.device_sharers = bound->sharers;
    introduceRanks(state);
    return makeDataTransport(state);
}

// Collective. Transports first: they hold communicators.
void endMpi(comm::ProcessState& state) noexcept {
    state.data_transport.reset();
    state.device.reset();
    state.control.reset();
    state.control_transport.reset();
    if (!state.owns_mpi) return;
    const comm::Watch watch(*state.watchdog, "end of MPI");
    MPI_Finalize();
}

Result<std::unique_ptr<comm::ProcessState>> makeState(int* argc, char*** argv,
                                                      const ProcessOptions& options) {
    if (living_process != nullptr) {
        throw Error(ErrorCode::invalid_argument, "Process::start: another Process lives");
    }
    if (auto valid = validate(options); !valid) return tl::unexpected(valid.error());

    auto state = std::make_unique<comm::ProcessState>();
    state->options = options;
    state->exceptions_at_start = std::uncaught_exceptions();
    // Before MPI, as a rank may be lost before it gets there.
    const int expected_rank = rankFromEnvironment();
    state->watchdog =
        std::make_unique<comm::Watchdog>(expected_rank, options.timeout, options.last_words);
    {
        const comm::Watch watch(*state->watchdog, "start of MPI");
        if (auto started = startMpi(*state, argc, argv); !started) {
            endMpi(*state);
            return tl::unexpected(started.error());
        }
    }
    if (state->rank != expected_rank) {
        state->watchdog =
            std::make_unique<comm::Watchdog>(state->rank, options.timeout, options.last_words);
    }
    comm::faultPoint("start", state->rank);
    findNode(*state);
    state->host = makeCpuDevice(1);
    state->control_transport = comm::makeMpiTransport(*state->watchdog);
    state->control = std::make_unique<comm::Control>(*state->control_transport, *state->host);
    if (auto joined = join(*state); !joined) {
        endMpi(*state);
        return tl::unexpected(joined.error());
    }
    return state;
}

}  // namespace

Process::Process(std::unique_ptr<comm::ProcessState> state) : state_(std::move(state)) {
    living_process = this;
}

Process::Process(Process&& other) noexcept : state_(std::move(other.state_)) {
    if (living_process == &other) living_process = this;
}

Process::~Process() {
    if (!state_) return;
    if (std::uncaught_exceptions() > state_->exceptions_at_start) {
        abort(exitCode(ErrorCode::internal), "an exception left the scope of the Process");
    }
    endMpi(*state_);
    living_process = nullptr;
}

Process* Process::current() noexcept {
    return living_process;
}

Result<Process> Process::start(int& argc, char**& argv, const ProcessOptions& options) {
    return makeState(&argc, &argv, options).map([](auto state) {
        return Process(std::move(state));
    });
}

Result<Process> Process::start(const ProcessOptions& options) {
    return makeState(nullptr, nullptr, options).map([](auto state) {
        return Process(std::move(state));
    });
}

int Process::rank() const noexcept {
    return state_->rank;
}
int Process::size() const noexcept {
    return state_->size;
}
int Process::nodeRank() const noexcept {
    return state_->node_rank;
}
int Process::nodeSize() const noexcept {
    return state_->node_size;
}
DeviceKind Process::device() const noexcept {
    return state_->device->kind();
}
TransportKind Process::transport() const noexcept {
    return state_->transport().kind();
}
int Process::threads() const noexcept {
    return state_->threads;
}
const std::vector<RankDescription>& Process::ranks() const noexcept {
    return state_->ranks;
}

std::vector<std::string> Process::libraries() const {
    const auto version = XXH_versionNumber();
    std::vector<std::string> all{
        comm::mpiLibrary(), fmt::format("Highway {}.{}.{}", HWY_MAJOR, HWY_MINOR, HWY_PATCH),
        fmt::format("xxHash {}.{}.{}", version / 10000, version / 100 % 100, version % 100)};
    if (device() == DeviceKind::cuda) all.push_back(cudaLibrary());
    if (transport() == TransportKind::nccl) all.push_back(comm::ncclLibrary());
    return all;
}

void Process::synchronize() {
    state_->synchronize(state_->device->defaultStream());
}

void Process::barrier() {
    state_->control->barrier();
}

std::vector<std::string> Process::allGather(std::string_view bytes) {
    return allGatherText(*state_->control, bytes);
}

std::string Process::broadcast(std::string_view bytes) {
    const auto all = state_->control->broadcast(std::as_bytes(std::span(bytes)));
    return {reinterpret_cast<const char*>(all.data()), all.size()};
}

void Process::abort(int exit_code, std::string_view why) noexcept {
    std::fflush(nullptr);
    std::fprintf(stderr, "kvgrid: rank %d: %.*s\n", state_->rank, static_cast<int>(why.size()),
                 why.data());
    std::fflush(stderr);
    if (state_->options.last_words != nullptr) {
        std::array<char, 512> text{};
        std::snprintf(text.data(), text.size(), "rank %d: %.*s", state_->rank,
                      static_cast<int>(why.size()), why.data());
        state_->options.last_words(text.data());
    }
    const comm::Watch watch(*state_->watchdog, "abort");
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Abort(MPI_COMM_WORLD, exit_code);
    ::_exit(exit_code);
}

}  // namespace kvgrid
