// Writes .safetensors files, as checkpoints are.
#pragma once

#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/number_formats.h"
#include "tests/launch/run_program.h"

namespace kvgrid::test {

struct TensorInFile {
    std::string name;
    std::vector<std::int64_t> shape;
    std::vector<float> values;
    std::string dtype = "F32";  // or F16, BF16
};

inline std::string safetensors(const std::string& header, const std::string& data) {
    const std::uint64_t length = header.size();
    std::string bytes(sizeof(length), '\0');
    std::memcpy(bytes.data(), &length, sizeof(length));
    return bytes + header + data;
}

inline std::string safetensors(const std::vector<TensorInFile>& tensors) {
    nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
    std::string data;
    for (const TensorInFile& tensor : tensors) {
        const std::size_t begin = data.size();
        for (const float value : tensor.values) {
            if (tensor.dtype == "F32") {
                data.append(reinterpret_cast<const char*>(&value), sizeof(value));
                continue;
            }
            const std::uint16_t bits =
                tensor.dtype == "F16" ? fp16FromFloat(value) : bf16FromFloat(value);
            data.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
        }
        header[tensor.name] = {{"dtype", tensor.dtype},
                               {"shape", tensor.shape},
                               {"data_offsets", {begin, data.size()}}};
    }
    return safetensors(header.dump(), data);
}

// k_scale and v_scale of each layer: other ones in each, around `k` and `v`.
inline std::vector<TensorInFile> layerScales(int layers, float k, float v) {
    std::vector<TensorInFile> tensors;
    for (int layer = 0; layer < layers; ++layer) {
        const std::string attention = "model.layers." + std::to_string(layer) + ".self_attn.";
        const float factor = 1.0F + 0.125F * static_cast<float>(layer % 8);
        tensors.push_back({attention + "k_scale", {1}, {k * factor}});
        tensors.push_back({attention + "v_scale", {1}, {v * factor}});
    }
    return tensors;
}

}  // namespace kvgrid::test
