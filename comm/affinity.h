// How many threads a rank may keep busy. Pure arithmetic, apart from reading this thread's mask.
#pragma once

#include <bitset>
#include <cstddef>
#include <span>

namespace kvgrid::comm {

// The hardware threads that a process may run on, by number. The kernel's limit is 8192.
using CpuSet = std::bitset<8192>;

// The calling thread's, which is the process's when no thread has been bound by itself.
[[nodiscard]] CpuSet affinityMask();

// This rank's share of its mask: a hardware thread that several ranks of the node may use counts in
// equal parts, rounded down, at least 1. `masks` are those of all ranks of the node.
[[nodiscard]] int shareOfMask(std::span<const CpuSet> masks, std::size_t node_rank);

}  // namespace kvgrid::comm
