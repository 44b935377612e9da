// What a Process holds, for the floors above: the device, the transports, the watchdog.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <kvgrid/process.h>

#include "comm/control.h"
#include "comm/transport.h"
#include "comm/watchdog.h"
#include "kernels/device.h"

namespace kvgrid::comm {

struct ProcessState {
    int rank = 0;
    int size = 1;
    int node_rank = 0;
    int node_size = 1;
    bool owns_mpi = false;        // started MPI, so ends it
    int exceptions_at_start = 0;  // more of them in flight: this rank is unwinding
    ProcessOptions options;
    int threads = 1;
    std::vector<RankDescription> ranks;

    std::unique_ptr<Watchdog> watchdog;
    std::unique_ptr<Device> device;                // where the pool lives
    std::unique_ptr<Transport> control_transport;  // MPI, host memory
    std::unique_ptr<Transport> data_transport;     // null: the control transport serves both
    std::unique_ptr<Control> control;

    [[nodiscard]] Transport& transport() noexcept {
        return data_transport ? *data_transport : *control_transport;
    }
};

}  // namespace kvgrid::comm
