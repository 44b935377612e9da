// In place of the NCCL transport where it is not built.
#include "comm/transport.h"

namespace kvgrid::comm {

std::unique_ptr<Transport> makeNcclTransport(Watchdog&, Device&, const NcclOptions&,
                                             const std::function<void(std::span<std::byte>)>&) {
    throw Error(ErrorCode::unavailable, "this kvgrid was built without the NCCL transport");
}

std::string ncclLibrary() {
    return {};
}

}  // namespace kvgrid::comm
