#include <algorithm>
#include <utility>

#include "comm/transport.h"

namespace kvgrid::comm {
namespace {

class StagedTransport final : public Transport {
public:
    StagedTransport(Watchdog& watchdog, Device& device)
        : watchdog_(&watchdog),
          device_(&device),
          host_(makeCpuDevice(1)),
          mpi_(makeMpiTransport(watchdog)) {}

    [[nodiscard]] TransportKind kind() const noexcept override { return mpi_->kind(); }
    [[nodiscard]] std::string description() const override {
        return mpi_->description() + ", through page-locked memory";
    }
    [[nodiscard]] int rank() const noexcept override { return mpi_->rank(); }
    [[nodiscard]] int size() const noexcept override { return mpi_->size(); }
    [[nodiscard]] bool isCapturable() const noexcept override { return false; }

    void broadcast(std::span<std::byte> data, int root, StreamView stream) override {
        const auto staged = outgoing(data, stream);
        mpi_->broadcast(staged, root, host_->defaultStream());
        deliver(staged, data, stream);
    }

    void allGather(std::span<const std::byte> send, std::span<std::byte> receive,
                   StreamView stream) override {
        const auto sent = outgoing(send, stream);
        const auto received = incoming(receive);
        mpi_->allGather(sent, received, host_->defaultStream());
        deliver(received, receive, stream);
    }

    void allGatherUneven(std::span<const std::byte> send, std::span<std::byte> receive,
                         std::span<const std::int64_t> counts, StreamView stream) override {
        const auto sent = outgoing(send, stream);
        const auto received = incoming(receive);
        mpi_->allGatherUneven(sent, received, counts, host_->defaultStream());
        deliver(received, receive, stream);
    }

    void allToAll(std::span<const std::byte> send, std::span<const std::int64_t> send_counts,
                  std::span<std::byte> receive, std::span<const std::int64_t> receive_counts,
                  StreamView stream) override {
        const auto sent = outgoing(send, stream);
        const auto received = incoming(receive);
        mpi_->allToAll(sent, send_counts, received, receive_counts, host_->defaultStream());
        deliver(received, receive, stream);
    }

    void allReduce(std::span<std::int64_t> values, Reduction reduction,
                   StreamView stream) override {
        reduce(values, reduction, stream);
    }
    void allReduce(std::span<float> values, Reduction reduction, StreamView stream) override {
        reduce(values, reduction, stream);
    }

    void barrier(StreamView stream) override {
        synchronize(stream);
        mpi_->barrier(host_->defaultStream());
    }

private:
    template <typename T>
    void reduce(std::span<T> values, Reduction reduction, StreamView stream) {
        const auto staged = outgoing(std::as_bytes(values), stream);
        mpi_->allReduce(std::span(reinterpret_cast<T*>(staged.data()), values.size()), reduction,
                        host_->defaultStream());
        deliver(staged, std::as_writable_bytes(values), stream);
    }

    // Memory of this many bytes at least. What it held may be gone.
    std::span<std::byte> room(Buffer& buffer, std::size_t bytes) {
        constexpr std::size_t least_bytes = std::size_t{1} << 20;
        if (buffer.bytes() < bytes) {
            auto made =
                Buffer::onHost(*device_, std::max({least_bytes, bytes, 2 * buffer.bytes()}));
            if (!made) throw Error(made.error());
            buffer = std::move(*made);
        }
        return {buffer.data(), bytes};
    }

    // A copy of `data`, once the stream's earlier work is done.
    std::span<std::byte> outgoing(std::span<const std::byte> data, StreamView stream) {
        requireEager(stream);
        const auto staged = room(outgoing_, data.size());
        device_->copy(staged.data(), data.data(), data.size(), stream);
        synchronize(stream);
        return staged;
    }

    std::span<std::byte> incoming(std::span<const std::byte> data) {
        return room(incoming_, data.size());
    }

    void deliver(std::span<const std::byte> staged, std::span<std::byte> data, StreamView stream) {
        device_->copy(data.data(), staged.data(), data.size(), stream);
        synchronize(stream);
    }

    void requireEager(StreamView stream) {
        if (!device_->isCapturing(stream)) return;
        throw Error(ErrorCode::invalid_argument,
                    "transport mpi: an eager collective cannot be captured into a graph");
    }

    void synchronize(StreamView stream) {
        requireEager(stream);
        const Watch watch(*watchdog_, "the device's work");
        device_->synchronize(stream);
    }

    Watchdog* watchdog_;
    Device* device_;
    std::unique_ptr<Device> host_;
    std::unique_ptr<Transport> mpi_;
    Buffer outgoing_;
    Buffer incoming_;
};

}  // namespace

std::unique_ptr<Transport> makeStagedTransport(Watchdog& watchdog, Device& device) {
    return std::make_unique<StagedTransport>(watchdog, device);
}

}  // namespace kvgrid::comm
