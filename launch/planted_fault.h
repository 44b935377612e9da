// Test-only: a wrong value, so that tests can see verify and bench find one. Compiled to nothing
// unless the build sets KVGRID_FAULT_INJECTION (on with the tests, off otherwise).
//
// KVGRID_PLANT=value: rank 0 appends a wrong V of every sequence's first token.
// KVGRID_PLANT=replay: the same, but only where verify decodes a second time.
// KVGRID_PLANT=digest: the last rank digests other outputs than it has.
#pragma once

#include <cstdlib>
#include <string_view>

namespace kvgrid::launch {

#ifdef KVGRID_FAULT_INJECTION
inline bool isPlanted(std::string_view fault) {
    const char* planted = std::getenv("KVGRID_PLANT");
    return planted != nullptr && planted == fault;
}
#else
constexpr bool isPlanted(std::string_view /*fault*/) {
    return false;
}
#endif

}  // namespace kvgrid::launch
