#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <kvgrid/error.h>

#include "comm/mpi_support.h"
#include "comm/transport.h"
#include "comm/transport_checks.h"

namespace kvgrid::comm {
namespace {

using Counts = std::span<const std::int64_t>;

constexpr int all_to_all_tag = 1;

MPI_Op mpiOperation(Reduction reduction) {
    switch (reduction) {
    case Reduction::sum:
        return MPI_SUM;
    case Reduction::minimum:
        return MPI_MIN;
    case Reduction::maximum:
        return MPI_MAX;
    }
    throw Error(ErrorCode::internal, "all-reduce: unknown reduction");
}

void copyBytes(std::span<std::byte> destination, std::span<const std::byte> source) {
    if (!source.empty() && destination.data() != source.data()) {
        std::memcpy(destination.data(), source.data(), source.size());
    }
}

class MpiTransport final : public Transport {
public:
    MpiTransport(Watchdog& watchdog, std::int64_t max_message_bytes);
    ~MpiTransport() override;

    [[nodiscard]] TransportKind kind() const noexcept override { return TransportKind::mpi; }
    [[nodiscard]] std::string description() const override {
        return fmt::format("MPI ({})", mpiLibrary());
    }
    [[nodiscard]] bool isCapturable() const noexcept override { return false; }
    [[nodiscard]] int rank() const noexcept override { return rank_; }
    [[nodiscard]] int size() const noexcept override { return size_; }

    void broadcast(std::span<std::byte> data, int root, StreamView stream) override;
    void allGather(std::span<const std::byte> send, std::span<std::byte> receive,
                   StreamView stream) override;
    void allGatherUneven(std::span<const std::byte> send, std::span<std::byte> receive,
                         Counts counts, StreamView stream) override;
    void allToAll(std::span<const std::byte> send, Counts send_counts, std::span<std::byte> receive,
                  Counts receive_counts, StreamView stream) override;
    void allReduce(std::span<std::int64_t> values, Reduction reduction,
                   StreamView stream) override {
        reduceInPlace(values, MPI_INT64_T, reduction, stream);
    }
    void allReduce(std::span<float> values, Reduction reduction, StreamView stream) override {
        reduceInPlace(values, MPI_FLOAT, reduction, stream);
    }
    void barrier(StreamView stream) override;

private:
    void broadcastParts(std::span<std::byte> data, int root, const char* operation);
    void gatherByBroadcasts(std::span<std::byte> receive, Counts counts, const char* operation);
    template <typename T>
    void reduceInPlace(std::span<T> values, MPI_Datatype type, Reduction reduction,
                       StreamView stream);

    Watchdog* watchdog_;
    std::size_t max_message_bytes_;
    MPI_Comm communicator_ = MPI_COMM_NULL;
    int rank_ = 0;
    int size_ = 1;
    std::vector<int> counts_;
    std::vector<int> displacements_;
    std::vector<MPI_Request> requests_;
};

MpiTransport::MpiTransport(Watchdog& watchdog, std::int64_t max_message_bytes)
    : watchdog_(&watchdog),
      max_message_bytes_(static_cast<std::size_t>(max_message_bytes)) {
    require(max_message_bytes >= 1 && max_message_bytes <= std::numeric_limits<int>::max(),
            "MPI transport", "max_message_bytes is not within 1 and 2^31 - 1");
    const Watch watch(watchdog, "making of the MPI communicator");
    checkMpi(MPI_Comm_dup(MPI_COMM_WORLD, &communicator_), "making of the MPI communicator");
    checkMpi(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN), "MPI error handler");
    MPI_Comm_rank(communicator_, &rank_);
    MPI_Comm_size(communicator_, &size_);
    counts_.resize(static_cast<std::size_t>(size_));
    displacements_.resize(static_cast<std::size_t>(size_));
}

// Freeing is collective: while an exception unwinds on this rank alone, the others would not come.
MpiTransport::~MpiTransport() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0 || std::uncaught_exceptions() > 0) return;
    const Watch watch(*watchdog_, "end of the MPI communicator");
    MPI_Comm_free(&communicator_);
}

void MpiTransport::broadcast(std::span<std::byte> data, int root, StreamView stream) {
    checkBroadcast(root, size_);
    stream.device().synchronize(stream);
    const Watch watch(*watchdog_, "broadcast");
    broadcastParts(data, root, "broadcast");
}

void MpiTransport::broadcastParts(std::span<std::byte> data, int root, const char* operation) {
    while (!data.empty()) {
        const auto part = data.first(std::min(data.size(), max_message_bytes_));
        checkMpi(
            MPI_Bcast(part.data(), static_cast<int>(part.size()), MPI_BYTE, root, communicator_),
            operation);
        data = data.subspan(part.size());
    }
}

// This rank's own part is in place already.
void MpiTransport::gatherByBroadcasts(std::span<std::byte> receive, Counts counts,
                                      const char* operation) {
    std::size_t offset = 0;
    for (int root = 0; root < size_; ++root) {
        const auto bytes = static_cast<std::size_t>(counts[static_cast<std::size_t>(root)]);
        broadcastParts(receive.subspan(offset, bytes), root, operation);
        offset += bytes;
    }
}

void MpiTransport::allGather(std::span<const std::byte> send, std::span<std::byte> receive,
                             StreamView stream) {
    const auto ranks = static_cast<std::size_t>(size_);
    checkAllGather(send, receive, size_);
    stream.device().synchronize(stream);
    if (send.empty()) return;
    const Watch watch(*watchdog_, "all-gather");
    const auto mine = receive.subspan(static_cast<std::size_t>(rank_) * send.size(), send.size());
    // MPI's own algorithms multiply counts by ranks in int, so the whole must fit, not the part.
    if (receive.size() > max_message_bytes_) {
        copyBytes(mine, send);
        const std::vector<std::int64_t> counts(ranks, static_cast<std::int64_t>(send.size()));
        gatherByBroadcasts(receive, counts, "all-gather");
        return;
    }
    const auto count = static_cast<int>(send.size());
    const void* source = send.data() == mine.data() ? MPI_IN_PLACE : send.data();
    checkMpi(MPI_Allgather(source, count, MPI_BYTE, receive.data(), count, MPI_BYTE, communicator_),
             "all-gather");
}

void MpiTransport::allGatherUneven(std::span<const std::byte> send, std::span<std::byte> receive,
                                   Counts counts, StreamView stream) {
    constexpr const char* operation = "uneven all-gather";
    const auto self = static_cast<std::size_t>(rank_);
    checkAllGatherUneven(send, receive, counts, rank_, size_);
    stream.device().synchronize(stream);
    if (receive.empty()) return;
    const Watch watch(*watchdog_, operation);
    if (receive.size() > max_message_bytes_) {
        copyBytes(receive.subspan(total(counts.first(self)), send.size()), send);
        gatherByBroadcasts(receive, counts, operation);
        return;
    }
    int offset = 0;
    for (std::size_t from = 0; from < counts.size(); ++from) {
        counts_[from] = static_cast<int>(counts[from]);
        displacements_[from] = offset;
        offset += counts_[from];
    }
    checkMpi(MPI_Allgatherv(send.data(), counts_[self], MPI_BYTE, receive.data(), counts_.data(),
                            displacements_.data(), MPI_BYTE, communicator_),
             operation);
}

// Pairwise, so that the two sides of each pair agree on the number of messages by themselves:
// whether everything fits into one MPI_Alltoallv differs from rank to rank.
void MpiTransport::allToAll(std::span<const std::byte> send, Counts send_counts,
                            std::span<std::byte> receive, Counts receive_counts,
                            StreamView stream) {
    checkAllToAll(send, send_counts, receive, receive_counts, rank_, size_);
    const auto ranks = static_cast<std::size_t>(size_);
    const auto self = static_cast<std::size_t>(rank_);
    stream.device().synchronize(stream);
    const Watch watch(*watchdog_, "all-to-all");

    requests_.clear();
    const auto for_each_message = [this](auto span, auto post) {
        while (!span.empty()) {
            const auto part = span.first(std::min(span.size(), max_message_bytes_));
            requests_.push_back(MPI_REQUEST_NULL);
            checkMpi(post(part.data(), static_cast<int>(part.size()), &requests_.back()),
                     "all-to-all");
            span = span.subspan(part.size());
        }
    };
    const auto part_of = [](auto span, Counts counts, std::size_t peer) {
        return span.subspan(total(counts.first(peer)), static_cast<std::size_t>(counts[peer]));
    };
    for (std::size_t distance = 1; distance < ranks; ++distance) {
        const std::size_t from = (self + ranks - distance) % ranks;
        for_each_message(part_of(receive, receive_counts, from),
                         [&](std::byte* data, int bytes, MPI_Request* request) {
                             return MPI_Irecv(data, bytes, MPI_BYTE, static_cast<int>(from),
                                              all_to_all_tag, communicator_, request);
                         });
    }
    for (std::size_t distance = 1; distance < ranks; ++distance) {
        const std::size_t to = (self + distance) % ranks;
        for_each_message(part_of(send, send_counts, to),
                         [&](const std::byte* data, int bytes, MPI_Request* request) {
                             return MPI_Isend(data, bytes, MPI_BYTE, static_cast<int>(to),
                                              all_to_all_tag, communicator_, request);
                         });
    }
    copyBytes(part_of(receive, receive_counts, self), part_of(send, send_counts, self));
    checkMpi(MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE),
             "all-to-all");
}

template <typename T>
void MpiTransport::reduceInPlace(std::span<T> values, MPI_Datatype type, Reduction reduction,
                                 StreamView stream) {
    stream.device().synchronize(stream);
    const Watch watch(*watchdog_, "all-reduce");
    const std::size_t most = std::max<std::size_t>(1, max_message_bytes_ / sizeof(T));
    while (!values.empty()) {
        const auto part = values.first(std::min(values.size(), most));
        checkMpi(MPI_Allreduce(MPI_IN_PLACE, part.data(), static_cast<int>(part.size()), type,
                               mpiOperation(reduction), communicator_),
                 "all-reduce");
        values = values.subspan(part.size());
    }
}

void MpiTransport::barrier(StreamView stream) {
    stream.device().synchronize(stream);
    const Watch watch(*watchdog_, "barrier");
    checkMpi(MPI_Barrier(communicator_), "barrier");
}

}  // namespace

std::unique_ptr<Transport> makeMpiTransport(Watchdog& watchdog, std::int64_t max_message_bytes) {
    return std::make_unique<MpiTransport>(watchdog, max_message_bytes);
}

}  // namespace kvgrid::comm
