// Reads the fixed scales of K and V that checkpoints with a calibrated KV cache ship. Which files
// and which tensors count is in docs/kv_scales.md.
#pragma once

#include <string>
#include <vector>

#include <kvgrid/config.h>
#include <kvgrid/error.h>

namespace kvgrid::launch {

// The scales of every layer that has KV, [layers]; one that a layer has for all KV heads is each
// head's.
//   path      a .safetensors file, a model.safetensors.index.json beside the files that it
//             names, or a folder with either
//   geometry  of the whole model
// invalid_argument, naming the file and the tensor or layer: scales that are missing, there twice,
// of a layer that is not there, of another shape than [], [1] or [KV heads], not in
// [KvScales::least, KvScales::most], or with a zero point.
[[nodiscard]] Result<std::vector<KvScales>> readKvScales(const std::string& path,
                                                         const Geometry& geometry);

// Those of a part of the model: its layers, and of each the first KV heads.
[[nodiscard]] std::vector<KvScales> scalesOf(const Geometry& part, std::vector<KvScales> whole);

}  // namespace kvgrid::launch
