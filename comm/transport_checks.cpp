#include "comm/transport_checks.h"

#include <fmt/format.h>

#include <kvgrid/error.h>

namespace kvgrid::comm {

void require(bool holds, const char* operation, const char* what) {
    if (!holds) throw Error(ErrorCode::internal, fmt::format("{}: {}", operation, what));
}

std::size_t total(std::span<const std::int64_t> counts) {
    std::size_t bytes = 0;
    for (const std::int64_t count : counts) {
        require(count >= 0, "transport", "a count is negative");
        bytes += static_cast<std::size_t>(count);
    }
    return bytes;
}

void checkBroadcast(int root, int ranks) {
    require(root >= 0 && root < ranks, "broadcast", "no such root");
}

void checkAllGather(std::span<const std::byte> send, std::span<const std::byte> receive,
                    int ranks) {
    require(receive.size() == static_cast<std::size_t>(ranks) * send.size(), "all-gather",
            "the receive span does not hold size() times the send span");
}

void checkAllGatherUneven(std::span<const std::byte> send, std::span<const std::byte> receive,
                          std::span<const std::int64_t> counts, int rank, int ranks) {
    const char* const operation = "uneven all-gather";
    require(counts.size() == static_cast<std::size_t>(ranks), operation, "not one count a rank");
    require(counts[static_cast<std::size_t>(rank)] == static_cast<std::int64_t>(send.size()),
            operation, "this rank's count differs from its send span");
    require(receive.size() == total(counts), operation,
            "the receive span does not hold the sum of the counts");
}

void checkAllToAll(std::span<const std::byte> send, std::span<const std::int64_t> send_counts,
                   std::span<const std::byte> receive, std::span<const std::int64_t> receive_counts,
                   int rank, int ranks) {
    const char* const operation = "all-to-all";
    const auto count = static_cast<std::size_t>(ranks);
    const auto self = static_cast<std::size_t>(rank);
    require(send_counts.size() == count && receive_counts.size() == count, operation,
            "not one count a rank");
    require(send.size() == total(send_counts) && receive.size() == total(receive_counts), operation,
            "a span does not hold the sum of its counts");
    require(send_counts[self] == receive_counts[self], operation,
            "this rank's counts for itself differ");
}

}  // namespace kvgrid::comm
