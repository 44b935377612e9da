// Which device each rank computes on, and that no two have one GPU unasked.
#pragma once

#include <memory>
#include <string>

#include <kvgrid/error.h>
#include <kvgrid/process.h>

#include "comm/control.h"
#include "kernels/device.h"

namespace kvgrid::comm {

struct NodePlace {
    std::string host;
    int node_rank = 0;  // among the ranks of this host
    int threads = 1;    // CPU threads of this rank
};

struct BoundDevice {
    std::unique_ptr<Device> device;
    int sharers = 1;  // ranks on this device, this one included; 1 on the CPU
};

// Collective; the same verdict on every rank. The GPU of a rank is number `node_rank` of its host,
// counted around, or the one that the environment's KVGRID_DEVICE numbers. unavailable: the GPU
// that was asked for, one for every rank, or one for each rank alone is not there.
// invalid_argument: KVGRID_DEVICE is not a number.
[[nodiscard]] Result<BoundDevice> bindDevice(Control& control, const ProcessOptions& options,
                                             const NodePlace& place);

}  // namespace kvgrid::comm
