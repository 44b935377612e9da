#include "comm/join.h"

#include <cstddef>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "comm/fault_injection.h"
#include "kernels/ops.h"

namespace kvgrid::comm {
namespace {

std::int64_t bytesOfRows(const Join::Shape& shape, std::int64_t rows, int head_dim) {
    return rows * shape.local_heads * head_dim *
           static_cast<std::int64_t>(bytesPerElement(shape.output_format));
}

OutputParams localOutput(const Join::Shape& shape, std::int64_t rows, int head_dim,
                         const Join::States& states, void* destination) {
    OutputParams params;
    params.rows = rows;
    params.heads = shape.local_heads;
    params.head_dim = head_dim;
    params.destination_format = shape.output_format;
    params.source = states.out;
    params.lse = states.lse;
    params.sinks = states.sinks;
    params.destination = destination;
    return params;
}

void requireRoom(std::int64_t rows, int head_dim, const Join::Shape& shape) {
    if (rows >= 0 && rows <= shape.max_rows && head_dim <= shape.max_head_dim) return;
    throw Error(ErrorCode::internal,
                fmt::format("join of {} rows of head dim {}, made for {} of {}", rows, head_dim,
                            shape.max_rows, shape.max_head_dim));
}

}  // namespace

Join::Join(Transport& transport, const Shape& shape, Buffer receive)
    : transport_(&transport),
      shape_(shape),
      receive_(std::move(receive)) {}

Result<Join> Join::create(Transport& transport, Device& device, const Shape& shape) {
    const std::int64_t bytes =
        transport.size() == 1
            ? 0
            : transport.size() * bytesOfRows(shape, shape.max_rows, shape.max_head_dim);
    auto receive = Buffer::onDevice(device, static_cast<std::size_t>(bytes));
    if (!receive) return tl::unexpected(receive.error());
    return Join(transport, shape, std::move(*receive));
}

// This rank's part is made where the all-gather wants it, so nothing is sent from a buffer of
// its own. The parts then interleave: rank by rank becomes row by row.
void Join::gather(const States& states, std::int64_t rows, int head_dim, void* out,
                  StreamView stream) {
    requireRoom(rows, head_dim, shape_);
    faultPoint("join", transport_->rank());
    if (transport_->size() == 1) {
        keep(states, rows, head_dim, out, stream);
        return;
    }
    const auto part = static_cast<std::size_t>(bytesOfRows(shape_, rows, head_dim));
    const auto parts = static_cast<std::size_t>(transport_->size());
    const std::span<std::byte> all(receive_.data(), parts * part);
    const std::span<std::byte> mine =
        all.subspan(static_cast<std::size_t>(transport_->rank()) * part, part);
    const Operations& operations = stream.device().operations();

    if (rows != 0) {
        operations.output(localOutput(shape_, rows, head_dim, states, mine.data()), stream);
    }
    if (has_fault_points && rows != 0 && !stream.device().isCapturing(stream))
        faultPoint("collective", transport_->rank());
    transport_->allGather(mine, all, stream);
    if (rows == 0) return;

    OutputParams interleave = localOutput(shape_, rows, head_dim, {}, out);
    interleave.parts = transport_->size();
    interleave.source_format = shape_.output_format;
    interleave.source = all.data();
    operations.output(interleave, stream);
}

void Join::keep(const States& states, std::int64_t rows, int head_dim, void* out,
                StreamView stream) {
    requireRoom(rows, head_dim, shape_);
    if (rows == 0) return;
    stream.device().operations().output(localOutput(shape_, rows, head_dim, states, out), stream);
}

}  // namespace kvgrid::comm
