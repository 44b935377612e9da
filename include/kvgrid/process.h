// One rank: MPI's lifetime, its device, its transports, its watchdog.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <kvgrid/error.h>
#include <kvgrid/types.h>

namespace kvgrid {

// The same on every rank.
struct ProcessOptions {
    // None: a GPU when this build and node have one.
    std::optional<DeviceKind> device = std::nullopt;
    // None: NCCL between GPUs, MPI otherwise.
    std::optional<TransportKind> transport = std::nullopt;
    // Of one collective operation, and of the device's work of one step; past it the job ends with
    // code 5.
    std::chrono::milliseconds timeout{60'000};
    // CPU threads of this rank; 0: its affinity mask / ranks of the node that share it.
    int threads = 0;
    // Ranks of one host may have one GPU: for tests. Without it two ranks on one GPU are refused.
    bool share_gpu = false;
    // Called with the reason when kvgrid is about to end this process ahead of time (the deadline
    // passed, abort): on any thread, so only what a signal handler may do is allowed. May differ
    // between ranks.
    void (*last_words)(const char* why) noexcept = nullptr;
};

// For the preamble of a report.
struct RankDescription {
    int rank = 0;
    std::string host;
    int pid = 0;
    std::string device;  // "cpu AVX3_ZEN4, 2 threads", "cuda NVIDIA H200 (0000:1b:00.0), sm_90"
};

namespace comm {
struct ProcessState;  // what the library's own floors see (comm/process.h)
}

// Made once, on the main thread, which alone calls MPI. Every rank makes the same calls. A rank's
// GPU is the one of its number among the ranks of its host; the environment's KVGRID_DEVICE, the
// number of a GPU, overrides that.
class Process {
public:
    // Starts MPI (unless it runs already), binds the device and starts the watchdog. Every rank
    // returns the same verdict. unavailable: the device or transport that was asked for is missing
    // (MPI is left as it was when this build has none), or MPI has ended in this process already.
    // invalid_argument: an option out of range, or options that differ between ranks.
    // A second living Process throws Error.
    [[nodiscard]] static Result<Process> start(int& argc, char**& argv,
                                               const ProcessOptions& options = {});
    [[nodiscard]] static Result<Process> start(const ProcessOptions& options = {});
    // The living one, or null.
    [[nodiscard]] static Process* current() noexcept;

    Process(Process&& other) noexcept;
    Process& operator=(Process&&) = delete;
    // Ends MPI with all ranks together (when start started it). While an exception unwinds it
    // leaves at once instead, with MPI_Abort and code 1: the others might wait for this rank. To
    // end with an Error's own code, catch it where the Process lives and call abort.
    ~Process();

    [[nodiscard]] int rank() const noexcept;
    [[nodiscard]] int size() const noexcept;
    [[nodiscard]] int nodeRank() const noexcept;  // among the ranks of this host
    [[nodiscard]] int nodeSize() const noexcept;
    [[nodiscard]] DeviceKind device() const noexcept;
    [[nodiscard]] TransportKind transport() const noexcept;
    [[nodiscard]] int threads() const noexcept;
    // Of all ranks, in rank order, on every rank.
    [[nodiscard]] const std::vector<RankDescription>& ranks() const noexcept;
    // Name and version of each library in use: "Open MPI 4.1.4", ...
    [[nodiscard]] std::vector<std::string> libraries() const;

    // Waits until the work that calls without a stream of the caller's own enqueued is done. Local;
    // under the watchdog.
    void synchronize();

    // Small host-side collectives, for configuration and reports. Under the watchdog.
    void barrier();
    // Every rank's bytes, in rank order, on every rank.
    [[nodiscard]] std::vector<std::string> allGather(std::string_view bytes);
    [[nodiscard]] std::string broadcast(std::string_view bytes);  // rank 0's

    // Ends the whole job at once with this code, after printing why with the rank's number.
    [[noreturn]] void abort(int exit_code, std::string_view why) noexcept;

    [[nodiscard]] comm::ProcessState& state() noexcept { return *state_; }

private:
    explicit Process(std::unique_ptr<comm::ProcessState> state);
    std::unique_ptr<comm::ProcessState> state_;
};

}  // namespace kvgrid
