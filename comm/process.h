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
    std::unique_ptr<Device> host;                  // of control messages
    std::unique_ptr<Transport> control_transport;  // MPI, host memory
    std::unique_ptr<Control> control;
    std::unique_ptr<Device> device;             // where the pool lives
    int device_sharers = 1;                     // ranks that have this GPU
    std::unique_ptr<Transport> data_transport;  // null: the control transport serves both

    [[nodiscard]] Transport& transport() noexcept {
        return data_transport ? *data_transport : *control_transport;
    }
    // Waits until the stream's work is done. Under the watchdog.
    void synchronize(StreamView stream) const {
        const Watch watch(*watchdog, "the device's work");
        device->synchronize(stream);
    }
};

}  // namespace kvgrid::comm
