#include "kernels/cpu/cpu_device.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels/cpu/simd_targets.h"
// Highway comes after the choice of targets.
#include <hwy/targets.h>

#include "kernels/cpu/memory.h"
#include "kernels/cpu/operations.h"

namespace kvgrid {
namespace cpu {
namespace {

constexpr Operations cpu_operations{
    .append = append,
    .gather = gather,
    .planAttend = planAttend,
    .attend = attend,
    .merge = merge,
    .copyBlocks = copyBlocks,
    .output = output,
    .readRuns = readRuns,
    .attendWorkspaceBytes = attendWorkspaceBytes,
    .attendPlanBytes = attendPlanBytes,
};

// Copies and fills are cut into pieces of this size.
constexpr std::size_t piece_bytes = std::size_t{1} << 20;
constexpr std::size_t page_bytes = 4096;

using Clock = std::chrono::steady_clock;

// Calls task(offset, bytes) for consecutive pieces of [0, bytes).
template <typename Task>
void forEachPiece(ThreadPool& pool, std::size_t bytes, const Task& task) {
    const std::size_t pieces = (bytes + piece_bytes - 1) / piece_bytes;
    pool.parallelFor(static_cast<std::int64_t>(pieces), [&](std::int64_t index, int) {
        const std::size_t offset = static_cast<std::size_t>(index) * piece_bytes;
        task(offset, std::min(piece_bytes, bytes - offset));
    });
}

}  // namespace

CpuDevice::CpuDevice(int threads)
    : pool_(threads),
      scratch_(static_cast<std::byte*>(
          allocateAligned(static_cast<std::size_t>(threads) * scratch_bytes))) {
    if (scratch_ == nullptr) throw Error(ErrorCode::internal, "no memory for the CPU device");
}

CpuDevice::~CpuDevice() {
    deallocateAligned(scratch_, static_cast<std::size_t>(threads()) * scratch_bytes);
}

std::string CpuDevice::description() const {
    const std::int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
    return std::string("cpu ") + hwy::TargetName(targets & -targets) + ", " +
           std::to_string(threads()) + (threads() == 1 ? " thread" : " threads");
}

std::int64_t CpuDevice::freeMemory() const {
    return cpu::freeMemory();
}

const Operations& CpuDevice::operations() const noexcept {
    return cpu_operations;
}

void* CpuDevice::allocate(std::size_t bytes) {
    if (bytes < huge_page_bytes) return allocateAligned(bytes);
    // The kernel promises more memory than there is; the first write to what is missing would end
    // the process.
    if (bytes > static_cast<std::size_t>(freeMemory())) return nullptr;
    auto* const data = static_cast<std::byte*>(allocateAligned(bytes));
    if (data == nullptr) return nullptr;
    spreadOverNodes(data, bytes);
    forEachPiece(pool_, bytes, [data](std::size_t offset, std::size_t piece) {
        for (std::size_t i = 0; i < piece; i += page_bytes)
            data[offset + i] = std::byte{0};
    });
    return data;
}

void CpuDevice::deallocate(void* pointer, std::size_t bytes) noexcept {
    deallocateAligned(pointer, bytes);
}

void* CpuDevice::createEvent(bool) {
    return new Clock::time_point();
}

void CpuDevice::destroyEvent(void* handle) noexcept {
    delete static_cast<Clock::time_point*>(handle);
}

void CpuDevice::record(void* event, StreamView) {
    *static_cast<Clock::time_point*>(event) = Clock::now();
}

double CpuDevice::secondsBetween(void* from, void* to) {
    return std::chrono::duration<double>(*static_cast<Clock::time_point*>(to) -
                                         *static_cast<Clock::time_point*>(from))
        .count();
}

void CpuDevice::beginCapture(StreamView) {
    throw Error(ErrorCode::unavailable, "the CPU device has no graphs");
}

void CpuDevice::copy(void* destination, const void* source, std::size_t bytes, StreamView) {
    auto* const to = static_cast<std::byte*>(destination);
    const auto* const from = static_cast<const std::byte*>(source);
    forEachPiece(pool_, bytes, [to, from](std::size_t offset, std::size_t piece) {
        std::memcpy(to + offset, from + offset, piece);
    });
}

void CpuDevice::fill(void* destination, std::uint8_t value, std::size_t bytes, StreamView) {
    auto* const to = static_cast<std::byte*>(destination);
    forEachPiece(pool_, bytes, [to, value](std::size_t offset, std::size_t piece) {
        std::memset(to + offset, value, piece);
    });
}

}  // namespace cpu

std::unique_ptr<Device> makeCpuDevice(int threads) {
    return std::make_unique<cpu::CpuDevice>(threads);
}

}  // namespace kvgrid
