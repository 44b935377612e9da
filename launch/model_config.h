// Reads a Hugging Face config.json: the shape of the model's KV cache, and what of its attention
// the cache cannot decode yet.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <kvgrid/config.h>
#include <kvgrid/error.h>
#include <kvgrid/types.h>

namespace kvgrid::launch {

// A part of the model's attention that the cache does not compute yet.
struct Obstacle {
    std::string key;  // of the config: "sliding_window", "rope_scaling.rope_type"
    std::string why;
    std::int64_t beyond = 0;  // only runs longer than this many tokens meet it; 0: every run
};

struct ModelConfig {
    std::string name;  // the shipped name, or the file's
    std::string path;
    std::string model_type;    // empty: not in the file
    Geometry geometry;         // windows as in the file; those that no position meets are 0
    RotaryEmbedding rotary;    // of layers without one of their own; dim 0: none, or an obstacle
                               // stands in its place
    double softmax_scale = 0;  // of q.k; 0: 1 / sqrt(head_dim)
    double logit_softcap = 0;  // as of CacheConfig; 0: none
    bool attention_sinks = false;
    std::optional<NumberFormat>
        dtype;  // of the weights; none: not in the file, or not a 16 or 32 bit float
    std::int64_t max_positions = 0;  // 0: not in the file
    std::vector<Obstacle> obstacles;
};

// By shipped name, or by path of a config.json or of a folder that holds one. Shipped models lie in
// ../share/kvgrid/models of the program's folder. invalid_argument: the file, and the key in it.
[[nodiscard]] Result<ModelConfig> loadModelConfig(const std::string& name_or_path);

// The same from text; `file` names it in messages.
[[nodiscard]] Result<ModelConfig> parseModelConfig(std::string_view text, const std::string& file);

// Names of the shipped models, sorted; empty when the folder is not there.
[[nodiscard]] std::vector<std::string> shippedModels();

// The geometry that a run of at most `longest` tokens a sequence decodes: a window no shorter than
// that is none, and groups that become alike are one. invalid_argument: the first obstacle that the
// run meets, with its key.
[[nodiscard]] Result<Geometry> decodableGeometry(const ModelConfig& model, std::int64_t longest);

// The first `layers` layers. invalid_argument: more than there are, or none of them has KV.
[[nodiscard]] Result<Geometry> firstLayers(const Geometry& geometry, int layers);

// What one rank of `ranks` owns: KV and query heads divided by it. invalid_argument: they do not
// divide; the message lists what would.
[[nodiscard]] Result<Geometry> shareOf(const Geometry& geometry, int ranks);

}  // namespace kvgrid::launch
