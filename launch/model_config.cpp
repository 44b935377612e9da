#include "launch/model_config.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "launch/json_fields.h"
#include "launch/model_reader.h"
#include "launch/shared_data.h"

namespace kvgrid::launch {

namespace {

namespace fs = std::filesystem;

// Where the language model is in the file of a larger one.
constexpr std::array nested_models{"text_config", "llm_config", "language_config",
                                   "thinker_config.text_config"};

// The object with the geometry; if there is none, the one that should have it.
JsonFields languageModel(const JsonFields& outer) {
    JsonFields best = outer;
    for (const char* key : nested_models) {
        const auto inner = outer.object({key});
        if (!inner) continue;
        if (inner->find(layers_keys) || !outer.find(layers_keys)) best = *inner;
        break;
    }
    return best;
}

// "folder/config.json" is named by its folder.
std::string nameOf(const fs::path& path) {
    if (path.filename() != "config.json") return path.stem().string();
    std::error_code ignored;
    const fs::path folder = fs::absolute(path, ignored).parent_path().filename();
    return folder.empty() ? "config" : folder.string();
}

bool looksLikePath(const std::string& text) {
    return text.find('/') != std::string::npos || text.ends_with(".json");
}

Result<ModelConfig> loadFile(const fs::path& path, const std::string& name) {
    auto text = readFile(path.string());
    if (!text) return tl::unexpected(text.error());
    auto config = parseModelConfig(*text, path.string());
    if (config) config->name = name;
    return config;
}

tl::unexpected<Failure> unknownModel(const std::string& name) {
    return failure(ErrorCode::invalid_argument,
                   fmt::format("model '{}' is neither shipped nor a file; shipped are {}", name,
                               fmt::join(shippedModels(), ", ")));
}

}  // namespace

Result<ModelConfig> parseModelConfig(std::string_view text, const std::string& file) {
    ModelConfig config;
    config.path = file;
    config.name = nameOf(file);
    try {
        const nlohmann::json json = parseJson(text, file + ": ");
        const JsonFields outer(json, file + ": ");
        readModel(outer, languageModel(outer), config);
    } catch (const Error& error) {
        return failure(error.code(), error.what());
    }
    return config;
}

Result<ModelConfig> loadModelConfig(const std::string& name_or_path) {
    std::error_code ignored;
    if (!looksLikePath(name_or_path)) {
        const fs::path shipped = sharedFolder() / "models" / (name_or_path + ".json");
        if (fs::exists(shipped, ignored)) return loadFile(shipped, name_or_path);
        if (!fs::exists(name_or_path, ignored)) return unknownModel(name_or_path);
    }
    fs::path path = name_or_path;
    if (fs::is_directory(path, ignored)) path /= "config.json";
    return loadFile(path, nameOf(path));
}

std::vector<std::string> shippedModels() {
    std::vector<std::string> names;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(sharedFolder() / "models", ignored)) {
        if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
    }
    std::sort(names.begin(), names.end());
    return names;
}

Result<Geometry> decodableGeometry(const ModelConfig& model, std::int64_t longest) {
    for (const Obstacle& obstacle : model.obstacles) {
        if (obstacle.beyond >= longest) continue;
        std::string message = fmt::format("{}: {}: {}", model.name, obstacle.key, obstacle.why);
        if (obstacle.beyond > 0) {
            message += fmt::format(" (runs of at most {} tokens do without)", obstacle.beyond);
        }
        return failure(ErrorCode::invalid_argument, std::move(message));
    }
    Geometry geometry = model.geometry;
    geometry.groups.clear();
    for (LayerGroup group : model.geometry.groups) {
        if (group.window >= longest) group.window = 0;
        const auto alike = std::find_if(
            geometry.groups.begin(), geometry.groups.end(), [&](const LayerGroup& other) {
                return other.window == group.window && other.kv_heads == group.kv_heads &&
                       other.head_dim == group.head_dim && other.rotary == group.rotary;
            });
        if (alike == geometry.groups.end()) {
            geometry.groups.push_back(std::move(group));
            continue;
        }
        alike->layers.insert(alike->layers.end(), group.layers.begin(), group.layers.end());
        std::sort(alike->layers.begin(), alike->layers.end());
    }
    return geometry;
}

Result<Geometry> firstLayers(const Geometry& geometry, int layers) {
    if (layers < 1 || layers > geometry.layers) {
        return failure(ErrorCode::invalid_argument,
                       fmt::format("layers {}: the model has {}", layers, geometry.layers));
    }
    Geometry first{.layers = layers, .query_heads = geometry.query_heads, .groups = {}};
    for (LayerGroup group : geometry.groups) {
        group.layers.erase(std::lower_bound(group.layers.begin(), group.layers.end(), layers),
                           group.layers.end());
        if (!group.layers.empty()) first.groups.push_back(std::move(group));
    }
    if (first.groups.empty()) {
        return failure(ErrorCode::invalid_argument,
                       fmt::format("layers {}: none of the first {} has KV", layers, layers));
    }
    return first;
}

Result<Geometry> shareOf(const Geometry& geometry, int ranks) {
    const auto grid = chooseGrid(geometry, ranks);
    if (!grid) return tl::unexpected(grid.error());
    Geometry share = geometry;
    share.query_heads /= ranks;
    for (LayerGroup& group : share.groups)
        group.kv_heads /= ranks;
    return share;
}

}  // namespace kvgrid::launch
