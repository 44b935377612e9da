// Host memory of the CPU device: how much there is, and large aligned pieces of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvgrid::cpu {

inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

// Bytes that this process may still allocate, about: what the kernel calls available, within what
// each enclosing control group leaves (versions 1 and 2).
[[nodiscard]] std::int64_t freeMemory();

// 256-byte aligned; from huge_page_bytes on mapped by itself at a huge page boundary, with huge
// pages asked for. Not touched. Null when there is none.
[[nodiscard]] void* allocateAligned(std::size_t bytes) noexcept;
void deallocateAligned(void* pointer, std::size_t bytes) noexcept;

// Of memory that was not touched yet: its pages will lie on all NUMA nodes that the process may run
// on, in turn, where there are several and nobody (numactl) chose otherwise. Any thread takes any
// unit of work, so no node is the right one, and all of them together are read faster.
void spreadOverNodes(void* pointer, std::size_t bytes) noexcept;

}  // namespace kvgrid::cpu
