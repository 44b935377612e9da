#include "launch/kv_scales.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "launch/json_fields.h"
#include "launch/safetensors.h"
#include "launch/shared_data.h"

namespace kvgrid::launch {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view index_name = "model.safetensors.index.json";

[[noreturn]] void refuse(const std::string& message) {
    throw Error(ErrorCode::invalid_argument, message);
}

// What a tensor's name says that it holds.
struct ScaleName {
    std::size_t layer = 0;
    bool k = false, v = false;  // kv_scale is both
    bool zero_point = false;
};

std::vector<std::string_view> split(std::string_view name) {
    std::vector<std::string_view> parts;
    for (std::size_t begin = 0; begin <= name.size();) {
        const std::size_t end = std::min(name.find('.', begin), name.size());
        parts.push_back(name.substr(begin, end - begin));
        begin = end + 1;
    }
    return parts;
}

// "[...]layers.<number>.[...]k_scale" and its like; none: another tensor.
std::optional<ScaleName> parseName(std::string_view name) {
    const std::vector<std::string_view> parts = split(name);
    const auto layers = std::find(parts.begin(), parts.end(), "layers");
    if (parts.end() - layers < 3) return std::nullopt;
    const std::string_view number = *(layers + 1);
    ScaleName scale;
    const auto parsed = std::from_chars(number.data(), number.data() + number.size(), scale.layer);
    if (parsed.ec != std::errc() || parsed.ptr != number.data() + number.size())
        return std::nullopt;

    const std::string_view last = parts.back();
    const std::string_view before = parts[parts.size() - 2];
    const bool of_output = last == "output_scale" || last == "output_zero_point";
    scale.k = last == "k_scale" || last == "k_zero_point" || (of_output && before == "k_proj");
    scale.v = last == "v_scale" || last == "v_zero_point" || (of_output && before == "v_proj");
    if (last == "kv_scale") scale.k = scale.v = true;
    scale.zero_point = last.ends_with("zero_point");
    if (!scale.k && !scale.v) return std::nullopt;
    return scale;
}

class Reader {
public:
    Reader(std::string path, const Geometry& geometry)
        : path_(std::move(path)),
          kv_heads_(static_cast<std::size_t>(geometry.layers), 0),
          scales_(kv_heads_.size()),
          sources_(kv_heads_.size()) {
        for (const LayerGroup& group : geometry.groups) {
            for (const int layer : group.layers)
                kv_heads_[static_cast<std::size_t>(layer)] = group.kv_heads;
        }
    }

    std::vector<KvScales> read() {
        std::error_code ignored;
        fs::path path = path_;
        if (fs::is_directory(path, ignored)) {
            const bool indexed = fs::exists(path / index_name, ignored);
            path /= indexed ? index_name : "model.safetensors";
        }
        if (path.extension() == ".json") {
            readIndex(path);
        } else {
            Safetensors file(path.string());
            for (const auto& [name, tensor] : file.tensors())
                readTensor(file, path.string(), name, tensor.shape);
        }
        checkAllThere();
        return std::move(scales_);
    }

private:
    // The names of a K scale and a V scale, as "file: tensor".
    struct Sources {
        std::string k, v;
    };

    void readIndex(const fs::path& path) {
        const std::string where = path.string() + ": ";
        const Result<std::string> text = readFile(path.string());
        if (!text) throw Error(text.error());
        const nlohmann::json index = parseJson(*text, where);
        const JsonFields::Found files = JsonFields(index, where).find({"weight_map"});
        if (!files || !files.value->is_object()) refuse(where + "no weight_map of names to files");
        std::map<std::string, std::vector<std::string>> names;  // of scales, by file
        for (const auto& [name, file] : files.value->items()) {
            if (!parseName(name)) continue;
            // A file of the checkpoint lies beside its index.
            if (!file.is_string() || fs::path(file.get<std::string>()).has_parent_path()) {
                refuse(where + name + ": is not in a file of this folder");
            }
            names[file.get<std::string>()].push_back(name);
        }
        for (const auto& [file_name, tensors] : names) {
            const std::string file_path = (path.parent_path() / file_name).string();
            Safetensors file(file_path);
            for (const std::string& name : tensors) {
                const auto tensor = file.tensors().find(name);
                if (tensor == file.tensors().end()) {
                    refuse(fmt::format("{}: {}: is not there, {} says it is", file_path, name,
                                       path.string()));
                }
                readTensor(file, file_path, name, tensor->second.shape);
            }
        }
    }

    void readTensor(Safetensors& file, const std::string& file_path, const std::string& name,
                    std::vector<std::int64_t> shape) {
        const std::optional<ScaleName> scale = parseName(name);
        if (!scale) return;
        const std::string where = file_path + ": " + name;
        if (scale->zero_point) refuse(where + ": zero points are not supported");
        if (scale->layer >= kv_heads_.size() || kv_heads_[scale->layer] == 0) {
            refuse(fmt::format("{}: the model has no layer {} with KV, of {} layers", where,
                               scale->layer, kv_heads_.size()));
        }
        const std::int64_t kv_heads = kv_heads_[scale->layer];
        while (!shape.empty() && shape.back() == 1)
            shape.pop_back();
        if (shape.size() > 1 || (shape.size() == 1 && shape.front() != kv_heads)) {
            refuse(
                fmt::format("{}: its shape is not [], [1] or [{}], the KV heads", where, kv_heads));
        }
        std::vector<float> values = file.read(name, kv_heads);
        for (std::size_t head = 0; head < values.size(); ++head) {
            // NaN is in no range.
            if (values[head] >= KvScales::least && values[head] <= KvScales::most) continue;
            refuse(fmt::format("{}{}: {} is not in [2^-14, {:.0f}]", where,
                               values.size() > 1 ? fmt::format(", KV head {}", head) : "",
                               values[head], KvScales::most));
        }
        const float of_all = values.front();
        values.resize(static_cast<std::size_t>(kv_heads), of_all);
        if (scale->k) take(scales_[scale->layer].k, sources_[scale->layer].k, values, where);
        if (scale->v) take(scales_[scale->layer].v, sources_[scale->layer].v, values, where);
    }

    static void take(std::vector<float>& scales, std::string& source,
                     const std::vector<float>& values, const std::string& where) {
        if (!source.empty()) refuse(where + ": the layer has a scale already, " + source);
        scales = values;
        source = where;
    }

    void checkAllThere() const {
        for (std::size_t layer = 0; layer < kv_heads_.size(); ++layer) {
            if (kv_heads_[layer] == 0) continue;
            const KvScales& scales = scales_[layer];
            if (!scales.k.empty() && !scales.v.empty()) continue;
            refuse(fmt::format("{}: no {} of layer {}", path_,
                               scales.k.empty() ? "k_scale" : "v_scale", layer));
        }
    }

    std::string path_;
    std::vector<int> kv_heads_;     // [layer]; 0: it has no KV
    std::vector<KvScales> scales_;  // [layer]
    std::vector<Sources> sources_;  // [layer]
};

}  // namespace

Result<std::vector<KvScales>> readKvScales(const std::string& path, const Geometry& geometry) {
    try {
        return Reader(path, geometry).read();
    } catch (const Error& error) {
        return failure(error.code(), error.what());
    }
}

std::vector<KvScales> scalesOf(const Geometry& part, std::vector<KvScales> whole) {
    whole.resize(static_cast<std::size_t>(part.layers));
    for (const LayerGroup& group : part.groups) {
        for (const int layer : group.layers) {
            KvScales& scales = whole[static_cast<std::size_t>(layer)];
            scales.k.resize(static_cast<std::size_t>(group.kv_heads));
            scales.v.resize(static_cast<std::size_t>(group.kv_heads));
        }
    }
    return whole;
}

}  // namespace kvgrid::launch
