// Across ranks: concatenate on the head axis; merge on the context axis (1 in this version).
//
// Every rank holds the states of its query heads; the joined output has all heads, in order. The
// data flow is states (fp32) -> sinks merged, output format -> all-gather -> [rows, all heads,
// head_dim]. The receive buffer is made once, for the largest step: nothing is allocated in gather
// or keep.
#pragma once

#include <cstdint>

#include <kvgrid/error.h>
#include <kvgrid/types.h>

#include "comm/transport.h"
#include "kernels/device.h"

namespace kvgrid::comm {

class Join {
public:
    struct Shape {
        std::int64_t max_rows = 0;
        std::int64_t local_heads = 0;  // query heads of this rank, the same on every rank
        int max_head_dim = 0;
        NumberFormat output_format = NumberFormat::fp32;
    };

    // Of this rank's query heads, on the device.
    struct States {
        const float* out = nullptr;    // [rows, local_heads, head_dim]
        const float* lse = nullptr;    // [rows, local_heads]; unused without sinks
        const float* sinks = nullptr;  // [local_heads] logits, merged last; null: none
    };

    // does_not_fit: the receive buffer, max_rows of all heads. The transport must outlive it.
    [[nodiscard]] static Result<Join> create(Transport& transport, Device& device,
                                             const Shape& shape);

    // states -> out [rows, all heads, head_dim]. Collective; the same rows and head_dim on every
    // rank.
    void gather(const States& states, std::int64_t rows, int head_dim, void* out,
                StreamView stream);
    // states -> out [rows, local_heads, head_dim]. Local.
    void keep(const States& states, std::int64_t rows, int head_dim, void* out, StreamView stream);

private:
    Join(Transport& transport, const Shape& shape, Buffer receive);
    Transport* transport_;
    Shape shape_;
    Buffer receive_;
};

}  // namespace kvgrid::comm
