#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <string>

#include <fmt/format.h>

#include "comm/transport.h"
#include "comm/transport_checks.h"

namespace kvgrid::comm {
namespace {

void check(ncclResult_t result, const char* call) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    // NCCL says more in its log, NCCL_DEBUG=WARN.
    throw Error(
        result == ncclRemoteError ? ErrorCode::deadline : ErrorCode::internal,
        fmt::format("{}: {} ({})", call, ncclGetErrorString(result), ncclGetLastError(nullptr)));
}

std::string versionText(int version) {
    return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

ncclRedOp_t operationOf(Reduction reduction) {
    switch (reduction) {
    case Reduction::minimum:
        return ncclMin;
    case Reduction::maximum:
        return ncclMax;
    case Reduction::sum:
        break;
    }
    return ncclSum;
}

ncclConfig_t configOf(const NcclOptions& options) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (options.share_gpu) {
        // The kernels of all ranks wait for each other, so all must have room at once.
        constexpr int most_blocks = 4;
        config.minCTAs = 1;
        config.maxCTAs = most_blocks;
    }
    return config;
}

// Calls within its life are one operation to NCCL.
class Group {
public:
    Group() { check(ncclGroupStart(), "ncclGroupStart"); }
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    ~Group() {
        if (open_) static_cast<void>(ncclGroupEnd());
    }
    void end() {
        open_ = false;
        check(ncclGroupEnd(), "ncclGroupEnd");
    }

private:
    bool open_ = true;
};

class NcclTransport final : public Transport {
public:
    NcclTransport(Watchdog& watchdog, Device& device, const NcclOptions& options,
                  const std::function<void(std::span<std::byte>)>& exchange);
    ~NcclTransport() override;

    [[nodiscard]] TransportKind kind() const noexcept override { return TransportKind::nccl; }
    [[nodiscard]] std::string description() const override { return ncclLibrary(); }
    [[nodiscard]] int rank() const noexcept override { return rank_; }
    [[nodiscard]] int size() const noexcept override { return size_; }
    [[nodiscard]] bool isCapturable() const noexcept override { return true; }

    void broadcast(std::span<std::byte> data, int root, StreamView stream) override;
    void allGather(std::span<const std::byte> send, std::span<std::byte> receive,
                   StreamView stream) override;
    void allGatherUneven(std::span<const std::byte> send, std::span<std::byte> receive,
                         std::span<const std::int64_t> counts, StreamView stream) override;
    void allToAll(std::span<const std::byte> send, std::span<const std::int64_t> send_counts,
                  std::span<std::byte> receive, std::span<const std::int64_t> receive_counts,
                  StreamView stream) override;
    void allReduce(std::span<std::int64_t> values, Reduction reduction,
                   StreamView stream) override {
        reduce(values.data(), values.size(), ncclInt64, reduction, stream);
    }
    void allReduce(std::span<float> values, Reduction reduction, StreamView stream) override {
        reduce(values.data(), values.size(), ncclFloat32, reduction, stream);
    }
    void barrier(StreamView stream) override;

private:
    [[nodiscard]] static cudaStream_t handleOf(StreamView stream) noexcept {
        return static_cast<cudaStream_t>(stream.handle());
    }
    void reduce(void* values, std::size_t count, ncclDataType_t type, Reduction reduction,
                StreamView stream);

    Watchdog* watchdog_;
    Device* device_;
    int rank_;
    int size_;
    ncclComm_t communicator_ = nullptr;
    Buffer token_;  // of the barrier
};

NcclTransport::NcclTransport(Watchdog& watchdog, Device& device, const NcclOptions& options,
                             const std::function<void(std::span<std::byte>)>& exchange)
    : watchdog_(&watchdog),
      device_(&device),
      rank_(options.rank),
      size_(options.size) {
    auto token = Buffer::onDevice(device, sizeof(std::int64_t));
    if (!token) throw Error(token.error());
    token_ = std::move(*token);
    device.fill(token_.data(), 0, token_.bytes(), device.defaultStream());
    device.synchronize(device.defaultStream());
    if (options.share_gpu) {
        // NCCL takes two ranks of one host for two GPUs. Read once, so set before the first call.
        const std::string host = fmt::format("kvgrid-rank-{}", rank_);
        ::setenv("NCCL_HOSTID", host.c_str(), 1);
    }
    ncclUniqueId id{};
    if (rank_ == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    exchange(std::as_writable_bytes(std::span(&id, 1)));
    ncclConfig_t config = configOf(options);
    const Watch watch(watchdog, "start of NCCL");
    check(ncclCommInitRankConfig(&communicator_, size_, id, rank_, &config),
          "ncclCommInitRankConfig");
}

// While an exception unwinds on this rank alone, the others would not come to the end.
NcclTransport::~NcclTransport() {
    if (std::uncaught_exceptions() > 0) return;
    const Watch watch(*watchdog_, "end of NCCL");
    static_cast<void>(ncclCommDestroy(communicator_));
}

void NcclTransport::broadcast(std::span<std::byte> data, int root, StreamView stream) {
    checkBroadcast(root, size_);
    if (data.empty()) return;
    const Watch watch(*watchdog_, "broadcast");
    check(ncclBroadcast(data.data(), data.data(), data.size(), ncclUint8, root, communicator_,
                        handleOf(stream)),
          "ncclBroadcast");
}

void NcclTransport::allGather(std::span<const std::byte> send, std::span<std::byte> receive,
                              StreamView stream) {
    checkAllGather(send, receive, size_);
    if (send.empty()) return;
    const Watch watch(*watchdog_, "all-gather");
    check(ncclAllGather(send.data(), receive.data(), send.size(), ncclUint8, communicator_,
                        handleOf(stream)),
          "ncclAllGather");
}

void NcclTransport::allGatherUneven(std::span<const std::byte> send, std::span<std::byte> receive,
                                    std::span<const std::int64_t> counts, StreamView stream) {
    checkAllGatherUneven(send, receive, counts, rank_, size_);
    const Watch watch(*watchdog_, "uneven all-gather");
    Group group;
    std::byte* to = receive.data();
    for (int from = 0; from < size_; ++from) {
        const auto bytes = static_cast<std::size_t>(counts[static_cast<std::size_t>(from)]);
        if (bytes != 0) {
            check(ncclBroadcast(from == rank_ ? send.data() : to, to, bytes, ncclUint8, from,
                                communicator_, handleOf(stream)),
                  "ncclBroadcast");
        }
        to += bytes;
    }
    group.end();
}

void NcclTransport::allToAll(std::span<const std::byte> send,
                             std::span<const std::int64_t> send_counts,
                             std::span<std::byte> receive,
                             std::span<const std::int64_t> receive_counts, StreamView stream) {
    checkAllToAll(send, send_counts, receive, receive_counts, rank_, size_);
    const Watch watch(*watchdog_, "all-to-all");
    Group group;
    const std::byte* from = send.data();
    std::byte* to = receive.data();
    for (int peer = 0; peer < size_; ++peer) {
        const auto sent = static_cast<std::size_t>(send_counts[static_cast<std::size_t>(peer)]);
        const auto received =
            static_cast<std::size_t>(receive_counts[static_cast<std::size_t>(peer)]);
        if (sent != 0) {
            check(ncclSend(from, sent, ncclUint8, peer, communicator_, handleOf(stream)),
                  "ncclSend");
        }
        if (received != 0) {
            check(ncclRecv(to, received, ncclUint8, peer, communicator_, handleOf(stream)),
                  "ncclRecv");
        }
        from += sent;
        to += received;
    }
    group.end();
}

void NcclTransport::reduce(void* values, std::size_t count, ncclDataType_t type,
                           Reduction reduction, StreamView stream) {
    if (count == 0) return;
    const Watch watch(*watchdog_, "all-reduce");
    check(ncclAllReduce(values, values, count, type, operationOf(reduction), communicator_,
                        handleOf(stream)),
          "ncclAllReduce");
}

void NcclTransport::barrier(StreamView stream) {
    if (device_->isCapturing(stream))
        throw Error(ErrorCode::invalid_argument, "barrier: the host waits, so it is not captured");
    const Watch watch(*watchdog_, "barrier");
    reduce(token_.data(), 1, ncclInt64, Reduction::maximum, stream);
    device_->synchronize(stream);
}

}  // namespace

std::unique_ptr<Transport> makeNcclTransport(
    Watchdog& watchdog, Device& device, const NcclOptions& options,
    const std::function<void(std::span<std::byte>)>& exchange) {
    return std::make_unique<NcclTransport>(watchdog, device, options, exchange);
}

std::string ncclLibrary() {
    int version = 0;
    check(ncclGetVersion(&version), "ncclGetVersion");
    return fmt::format("NCCL {} (headers {})", versionText(version),
                       versionText(NCCL_VERSION_CODE));
}

}  // namespace kvgrid::comm
