// Test-only: a new shard's pools, states and workspace are NaN in every format, so that no output
// can depend on what nobody wrote. Compiled to nothing unless the build sets KVGRID_FAULT_INJECTION
// (on with the tests, off otherwise).
//
// KVGRID_POISON=0: they stay as they were allocated, for initcheck, which sees a read of them only
// then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "kernels/device.h"
#include "shard/pool.h"

namespace kvgrid {

#ifdef KVGRID_FAULT_INJECTION
inline bool isPoisoned() {
    const char* poison = std::getenv("KVGRID_POISON");
    return poison == nullptr || std::string_view(poison) != "0";
}
#else
constexpr bool isPoisoned() {
    return false;
}
#endif

constexpr std::uint8_t poison_byte = 0xFF;

// Enqueued on the default stream.
inline void poison(Device& device, std::byte* memory, std::size_t bytes) {
    if (isPoisoned()) device.fill(memory, poison_byte, bytes, device.defaultStream());
}
// At once.
inline void poisonHost(const Pool& pool) {
    if (isPoisoned() && pool.bytes() > 0)
        std::memset(pool.view().data, poison_byte, static_cast<std::size_t>(pool.bytes()));
}

}  // namespace kvgrid
