// How bytes travel between ranks. One contract for MPI and NCCL.
//
// Every rank of the transport makes the same calls in the same order. Spans are bytes of the
// transport's device memory (host memory on the CPU device) and may be empty; counts may differ
// from rank to rank where it says so; more than 2^31 bytes are ordinary. Send and receive spans
// must not overlap unless equal spans are allowed by name. A call enqueues on the stream; the
// result is there when the stream has reached it. The MPI transport is eager: it synchronises the
// stream, returns when the call is over, and cannot be captured into a graph. A failing transport
// throws Error. A lost rank shows as a deadline: every call is watched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include <kvgrid/types.h>

#include "comm/watchdog.h"
#include "kernels/device.h"

namespace kvgrid::comm {

enum class Reduction : std::uint8_t { sum, minimum, maximum };

class Transport {
public:
    Transport() = default;
    virtual ~Transport() = default;
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;

    [[nodiscard]] virtual TransportKind kind() const noexcept = 0;
    [[nodiscard]] virtual std::string description() const = 0;  // "MPI (Open MPI 4.1.4)"
    [[nodiscard]] virtual int rank() const noexcept = 0;
    [[nodiscard]] virtual int size() const noexcept = 0;
    // Whether a stream that is being captured may be given.
    [[nodiscard]] virtual bool isCapturable() const noexcept = 0;

    // Everybody has the root's bytes. The same size on every rank.
    virtual void broadcast(std::span<std::byte> data, int root, StreamView stream) = 0;

    // receive = rank 0's bytes, rank 1's, ...: receive.size() == size() * send.size(). `send` may
    // be this rank's own part of `receive`.
    virtual void allGather(std::span<const std::byte> send, std::span<std::byte> receive,
                           StreamView stream) = 0;

    // Uneven: counts[r] bytes come from rank r, counts[rank()] == send.size(), receive.size() ==
    // their sum.
    virtual void allGatherUneven(std::span<const std::byte> send, std::span<std::byte> receive,
                                 std::span<const std::int64_t> counts, StreamView stream) = 0;

    // send_counts[r] bytes go to rank r, receive_counts[r] come from it, both in rank order.
    virtual void allToAll(std::span<const std::byte> send,
                          std::span<const std::int64_t> send_counts, std::span<std::byte> receive,
                          std::span<const std::int64_t> receive_counts, StreamView stream) = 0;

    // In place, element by element.
    virtual void allReduce(std::span<std::int64_t> values, Reduction reduction,
                           StreamView stream) = 0;
    virtual void allReduce(std::span<float> values, Reduction reduction, StreamView stream) = 0;

    // Every rank has come here, and the stream's earlier work is done.
    virtual void barrier(StreamView stream) = 0;
};

// Over all ranks of the job, with a communicator of its own: the host program's messages never mix
// with these. MPI runs already; only the calling thread may use it. The watchdog must outlive it.
// Collective, and so is its end, which comes before MPI's. MPI counts in int, so bytes beyond
// `max_message_bytes` (1 to 2^31 - 1, the same on every rank) travel as several messages.
[[nodiscard]] std::unique_ptr<Transport> makeMpiTransport(
    Watchdog& watchdog, std::int64_t max_message_bytes = std::int64_t{1} << 30);

// The MPI transport for memory of `device`, which is copied through page-locked host memory. Eager.
[[nodiscard]] std::unique_ptr<Transport> makeStagedTransport(Watchdog& watchdog, Device& device);

struct NcclOptions {
    int rank = 0;
    int size = 1;
    // Some ranks have the GPU of another, the same on every rank: each says that its host is its
    // own, and all together use few enough thread blocks to run at once.
    bool share_gpu = false;
};

// NCCL over the GPU of each rank, stream-ordered. Collective. `exchange` gives rank 0's bytes to
// every rank. unavailable (Error): this build has no NCCL transport.
[[nodiscard]] std::unique_ptr<Transport> makeNcclTransport(
    Watchdog& watchdog, Device& device, const NcclOptions& options,
    const std::function<void(std::span<std::byte>)>& exchange);

// "NCCL 2.28.3 (headers 2.28.3)"; empty where this build has no NCCL transport.
[[nodiscard]] std::string ncclLibrary();

}  // namespace kvgrid::comm
