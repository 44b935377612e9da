#include "kernels/cpu/memory.h"

#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

namespace kvgrid::cpu {
namespace {

constexpr std::int64_t unlimited = std::numeric_limits<std::int64_t>::max();

// The number that follows `key` in a file of "key number" lines; an empty key takes the first
// number.
std::optional<std::int64_t> readNumber(const std::filesystem::path& file, const std::string& key) {
    std::ifstream stream(file);
    for (std::string line; std::getline(stream, line);) {
        if (line.compare(0, key.size(), key) != 0) continue;
        std::istringstream rest(line.substr(key.size()));
        std::int64_t number = 0;
        if (rest >> number) return number;
        return std::nullopt;
    }
    return std::nullopt;
}

struct CgroupFiles {
    const char* limit;
    const char* usage;
    const char* reclaimable;  // key in memory.stat: page cache that is dropped on demand
};

// The least that the group at `path` and those above it leave.
std::int64_t cgroupRoom(const std::filesystem::path& root, const std::string& path,
                        const CgroupFiles& files) {
    std::int64_t room = unlimited;
    std::filesystem::path group = std::filesystem::path(path).relative_path();
    while (true) {
        const std::filesystem::path folder = root / group;
        const auto limit = readNumber(folder / files.limit, "");
        const auto usage = readNumber(folder / files.usage, "");
        if (limit && usage) {
            const auto cache = readNumber(folder / "memory.stat", files.reclaimable).value_or(0);
            room = std::min(room, std::max<std::int64_t>(0, *limit - (*usage - cache)));
        }
        if (group.empty()) return room;
        group = group.parent_path();
    }
}

std::int64_t cgroupsRoom() {
    std::int64_t room = unlimited;
    std::ifstream stream("/proc/self/cgroup");
    for (std::string line; std::getline(stream, line);) {
        const std::size_t first = line.find(':');
        const std::size_t second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string path = line.substr(second + 1);
        if (controllers.empty())
            room = std::min(room, cgroupRoom("/sys/fs/cgroup", path,
                                             {"memory.max", "memory.current", "inactive_file "}));
        else if (controllers == "memory")
            room = std::min(room, cgroupRoom("/sys/fs/cgroup/memory", path,
                                             {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                              "total_inactive_file "}));
    }
    return room;
}

constexpr std::size_t small_alignment = 256;

std::size_t roundedUp(std::size_t bytes, std::size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

}  // namespace

std::int64_t freeMemory() {
    const auto available_kib = readNumber("/proc/meminfo", "MemAvailable:");
    const std::int64_t available = available_kib ? *available_kib * 1024 : unlimited;
    return std::min(available, cgroupsRoom());
}

void* allocateAligned(std::size_t bytes) noexcept {
    if (bytes == 0) return nullptr;
    if (bytes > std::numeric_limits<std::size_t>::max() / 2) return nullptr;
    if (bytes < huge_page_bytes)
        return std::aligned_alloc(small_alignment, roundedUp(bytes, small_alignment));

    // A mapping starts at any page: take one huge page more, and give back what sticks out.
    const std::size_t wanted = roundedUp(bytes, huge_page_bytes);
    void* mapping = mmap(nullptr, wanted + huge_page_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    auto* const begin = static_cast<std::byte*>(mapping);
    const std::size_t before = roundedUp(reinterpret_cast<std::uintptr_t>(begin), huge_page_bytes) -
                               reinterpret_cast<std::uintptr_t>(begin);
    if (before > 0) munmap(begin, before);
    if (before < huge_page_bytes) munmap(begin + before + wanted, huge_page_bytes - before);
    madvise(begin + before, wanted, MADV_HUGEPAGE);
    return begin + before;
}

void spreadOverNodes(void* pointer, std::size_t bytes) noexcept {
    if (numa_available() < 0) return;
    int policy = MPOL_DEFAULT;
    if (get_mempolicy(&policy, nullptr, 0, nullptr, 0) != 0 || policy != MPOL_DEFAULT) return;
    bitmask* const nodes = numa_get_run_node_mask();
    // Where it fails, the kernel's own choice stays.
    if (numa_bitmask_weight(nodes) > 1)
        mbind(pointer, bytes, MPOL_INTERLEAVE, nodes->maskp, nodes->size + 1, 0);
    numa_bitmask_free(nodes);
}

void deallocateAligned(void* pointer, std::size_t bytes) noexcept {
    if (pointer == nullptr) return;
    if (bytes < huge_page_bytes)
        std::free(pointer);
    else
        munmap(pointer, roundedUp(bytes, huge_page_bytes));
}

}  // namespace kvgrid::cpu
