#include <kvgrid/version.h>

namespace kvgrid {

const char* version() noexcept {
    return KVGRID_VERSION;
}

}  // namespace kvgrid
