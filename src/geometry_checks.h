// What a geometry and a block size must satisfy before anything is computed from them. Internal to
// src; each Failure is invalid_argument and names the argument.
#pragma once

#include <kvgrid/config.h>
#include <kvgrid/error.h>

namespace kvgrid {

// Counts in range, layers ascending and each in one group, query heads a multiple of KV heads. Any
// head dim and GQA group may be counted; what can be decoded is for validate().
[[nodiscard]] Result<void> checkGeometry(const Geometry& geometry);
[[nodiscard]] Result<void> checkLayerGroup(const LayerGroup& group);
// A power of two from 1 to 256.
[[nodiscard]] Result<void> checkBlockSize(int block_size);

}  // namespace kvgrid
