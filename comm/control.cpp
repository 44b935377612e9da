#include "comm/control.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include <fmt/format.h>

namespace kvgrid::comm {
namespace {

constexpr std::size_t header_bytes = sizeof(std::uint64_t);

struct FailureHeader {
    std::int64_t code = 0;
    std::int64_t message_bytes = 0;
};

}  // namespace

Control::Control(Transport& transport, Device& host) : transport_(&transport), host_(&host) {}

// The first message has a fixed size, as only rank 0 knows how much there is to say: the length,
// then as much of the bytes as fits.
std::span<const std::byte> Control::broadcast(std::span<const std::byte> bytes) {
    constexpr std::size_t first_bytes = header_bytes + first_message_bytes;
    const StreamView stream = host_->defaultStream();
    if (message_.size() < first_bytes) message_.resize(first_bytes);

    std::uint64_t size = bytes.size();
    if (rank() == 0) {
        message_.resize(std::max(first_bytes, header_bytes + bytes.size()));
        std::memcpy(message_.data(), &size, header_bytes);
        if (size != 0) std::memcpy(message_.data() + header_bytes, bytes.data(), bytes.size());
    }
    transport_->broadcast(std::span(message_).first(first_bytes), 0, stream);
    std::memcpy(&size, message_.data(), header_bytes);
    if (size > first_message_bytes) {
        message_.resize(header_bytes + size);
        transport_->broadcast(std::span(message_).subspan(first_bytes), 0, stream);
    }
    return std::span<const std::byte>(message_).subspan(header_bytes, size);
}

std::vector<std::vector<std::byte>> Control::allGather(std::span<const std::byte> bytes) {
    const StreamView stream = host_->defaultStream();
    const auto ranks = static_cast<std::size_t>(size());
    const auto mine = static_cast<std::int64_t>(bytes.size());
    std::vector<std::int64_t> counts(ranks);
    transport_->allGather(std::as_bytes(std::span(&mine, 1)),
                          std::as_writable_bytes(std::span(counts)), stream);

    std::vector<std::byte> all(
        static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})));
    transport_->allGatherUneven(bytes, all, counts, stream);

    std::vector<std::vector<std::byte>> parts(ranks);
    auto next = all.cbegin();
    for (std::size_t from = 0; from < ranks; ++from) {
        const auto end = next + counts[from];
        parts[from].assign(next, end);
        next = end;
    }
    return parts;
}

std::int64_t Control::minimum(std::int64_t value) {
    transport_->allReduce(std::span(&value, 1), Reduction::minimum, host_->defaultStream());
    return value;
}

std::int64_t Control::maximum(std::int64_t value) {
    transport_->allReduce(std::span(&value, 1), Reduction::maximum, host_->defaultStream());
    return value;
}

void Control::barrier() {
    transport_->barrier(host_->defaultStream());
}

Result<void> Control::agree(const Result<void>& mine) {
    constexpr std::int64_t nobody = std::numeric_limits<std::int64_t>::max();
    const std::int64_t first = minimum(mine ? nobody : rank());
    if (first == nobody) return {};

    const auto root = static_cast<int>(first);
    const StreamView stream = host_->defaultStream();
    FailureHeader header;
    std::string message;
    if (rank() == root) {
        message = mine.error().message;
        header = {static_cast<std::int64_t>(mine.error().code),
                  static_cast<std::int64_t>(message.size())};
    }
    transport_->broadcast(std::as_writable_bytes(std::span(&header, 1)), root, stream);
    message.resize(static_cast<std::size_t>(header.message_bytes));
    transport_->broadcast(std::as_writable_bytes(std::span(message)), root, stream);
    return failure(static_cast<ErrorCode>(header.code), fmt::format("rank {}: {}", root, message));
}

}  // namespace kvgrid::comm
