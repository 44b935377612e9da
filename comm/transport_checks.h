// Whether the arguments of a collective fit together, the same for every transport. A wrong size on
// one rank would leave the others waiting: each check throws Error (internal), which ends the job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvgrid::comm {

void require(bool holds, const char* operation, const char* what);
// The sum of counts, none of them negative.
[[nodiscard]] std::size_t total(std::span<const std::int64_t> counts);

void checkBroadcast(int root, int ranks);
void checkAllGather(std::span<const std::byte> send, std::span<const std::byte> receive, int ranks);
void checkAllGatherUneven(std::span<const std::byte> send, std::span<const std::byte> receive,
                          std::span<const std::int64_t> counts, int rank, int ranks);
void checkAllToAll(std::span<const std::byte> send, std::span<const std::int64_t> send_counts,
                   std::span<const std::byte> receive, std::span<const std::int64_t> receive_counts,
                   int rank, int ranks);

}  // namespace kvgrid::comm
