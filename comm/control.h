// The control plane: plans from rank 0 to all ranks, agreements among them, and errors that end the
// job. Host memory, always over MPI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <kvgrid/error.h>

#include "comm/transport.h"

namespace kvgrid::comm {

class Control {
public:
    // Both must outlive it. `host` is the CPU device or the device whose host memory is used.
    Control(Transport& transport, Device& host);

    [[nodiscard]] int rank() const noexcept { return transport_->rank(); }
    [[nodiscard]] int size() const noexcept { return transport_->size(); }

    // Rank 0's bytes, on every rank; other ranks' argument is ignored. One message when the bytes
    // are at most `first_message_bytes`, two otherwise. The span is valid until the next call.
    [[nodiscard]] std::span<const std::byte> broadcast(std::span<const std::byte> bytes);

    // Every rank's bytes in rank order.
    [[nodiscard]] std::vector<std::vector<std::byte>> allGather(std::span<const std::byte> bytes);

    [[nodiscard]] std::int64_t minimum(std::int64_t value);
    [[nodiscard]] std::int64_t maximum(std::int64_t value);
    void barrier();

    // All ranks learn whether all succeeded: the failure of the lowest failing rank, its number in
    // the message, comes back on every rank.
    [[nodiscard]] Result<void> agree(const Result<void>& mine);

    static constexpr std::size_t first_message_bytes = 16 * 1024;

private:
    Transport* transport_;
    Device* host_;
    std::vector<std::byte> message_;
};

}  // namespace kvgrid::comm
