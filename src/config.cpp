#include <kvgrid/config.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <fmt/format.h>

#include "src/checked_math.h"
#include "src/geometry_checks.h"

namespace kvgrid {

namespace {

constexpr std::array head_dims{64, 80, 96, 128, 256};
constexpr int most_gqa_group = 128;
constexpr int most_block_size = 256;
constexpr int most_count =
    1 << 20;  // of layers, heads and head dim: products stay far from 64 bits

std::string text(std::int64_t value) {
    return std::to_string(value);
}

tl::unexpected<Failure> invalid(const std::string& message) {
    return failure(ErrorCode::invalid_argument, message);
}

Result<void> checkCount(const std::string& what, std::int64_t value, std::int64_t least,
                        std::int64_t most = INT64_MAX) {
    if (value >= least && value <= most) return {};
    if (most == INT64_MAX) return invalid(what + " " + text(value) + ": at least " + text(least));
    return invalid(what + " " + text(value) + ": " + text(least) + " to " + text(most));
}

// KV heads can be divided by the divisors of this.
int commonKvHeads(const Geometry& geometry) {
    int common = 0;
    for (const LayerGroup& group : geometry.groups)
        common = std::gcd(common, group.kv_heads);
    return common;
}

std::string divisorsOf(int number) {
    std::vector<int> divisors;
    for (int candidate = 1; candidate <= number; ++candidate) {
        if (number % candidate == 0) divisors.push_back(candidate);
    }
    std::string list;
    for (std::size_t i = 0; i < divisors.size(); ++i) {
        if (i > 0) list += i + 1 == divisors.size() ? " or " : ", ";
        list += text(divisors[i]);
    }
    return list;
}

Result<void> checkHeads(const Geometry& geometry, int heads, const std::string& argument) {
    const int common = commonKvHeads(geometry);
    if (common % heads == 0) return {};
    return invalid(argument + ": " + text(heads) + " does not divide the " + text(common) +
                   " KV heads; " + divisorsOf(common) + " would do");
}

Result<void> checkDecodable(const Geometry& geometry) {
    std::size_t layers = 0;
    for (const LayerGroup& group : geometry.groups) {
        layers += group.layers.size();
        if (std::find(head_dims.begin(), head_dims.end(), group.head_dim) == head_dims.end()) {
            return invalid("head dim " + text(group.head_dim) + ": 64, 80, 96, 128 or 256");
        }
        const auto checked = checkCount("query heads a KV head",
                                        geometry.query_heads / group.kv_heads, 1, most_gqa_group);
        if (!checked) return checked;
    }
    if (layers == static_cast<std::size_t>(geometry.layers)) return {};
    return invalid("geometry: every layer must be in a layer group");
}

Result<void> checkFactors(const std::string& scaling, std::initializer_list<double> factors) {
    for (const double factor : factors) {
        if (!std::isfinite(factor) || factor <= 0) {
            return invalid("rotary " + scaling + " scaling: every factor is above 0");
        }
    }
    return {};
}

struct CheckScaling {
    double theta;

    Result<void> operator()(std::monostate) const { return {}; }

    Result<void> operator()(const LinearScaling& scaling) const {
        return checkFactors("linear", {scaling.factor});
    }

    Result<void> operator()(const Llama3Scaling& scaling) const {
        auto checked =
            checkFactors("llama3", {scaling.factor, scaling.low_freq_factor,
                                    scaling.high_freq_factor, scaling.original_max_position});
        if (!checked) return checked;
        if (scaling.high_freq_factor <= scaling.low_freq_factor) {
            return invalid("rotary llama3 scaling: high_freq_factor is above low_freq_factor");
        }
        return {};
    }

    Result<void> operator()(const YarnScaling& scaling) const {
        auto checked = checkFactors("yarn", {scaling.factor, scaling.original_max_position,
                                             scaling.beta_fast, scaling.beta_slow});
        if (checked && scaling.attention_factor != 0)
            checked = checkFactors("yarn", {scaling.attention_factor});
        if (!checked) return checked;
        if (scaling.beta_fast <= scaling.beta_slow) {
            return invalid("rotary yarn scaling: beta_fast is above beta_slow");
        }
        if (theta <= 1) {
            return invalid("rotary theta " + std::to_string(theta) + ": above 1 in yarn scaling");
        }
        return {};
    }
};

Result<void> checkRotary(const RotaryEmbedding& rotary, int head_dim) {
    if (rotary.dim == 0) return {};
    const auto checked = checkCount("rotary dim", rotary.dim, 0, head_dim);
    if (!checked) return checked;
    if (rotary.dim % 2 != 0) return invalid("rotary dim " + text(rotary.dim) + " is odd");
    if (!std::isfinite(rotary.theta) || rotary.theta <= 0) {
        return invalid("rotary theta " + std::to_string(rotary.theta) + ": above 0");
    }
    return std::visit(CheckScaling{rotary.theta}, rotary.scaling);
}

// Kernels have it as fp32: it must neither vanish nor overflow there.
Result<void> checkSoftcap(double softcap) {
    using Limits = std::numeric_limits<float>;
    if (softcap == 0 || (softcap >= double{Limits::min()} && softcap <= double{Limits::max()})) {
        return {};
    }
    return invalid("logit softcap " + std::to_string(softcap) + ": above 0, or 0 for none");
}

Result<void> checkFormats(const CacheConfig& config) {
    if (config.kv_format == NumberFormat::fp32) {
        return invalid("KV format " + std::string(name(config.kv_format)) +
                       ": fp16, bf16, fp8-e4m3 or int8");
    }
    const auto plain = [](NumberFormat format) {
        return format == NumberFormat::fp32 || format == NumberFormat::fp16 ||
               format == NumberFormat::bf16;
    };
    if (!plain(config.input_format)) {
        return invalid("input format " + std::string(name(config.input_format)) +
                       ": fp32, fp16 or bf16");
    }
    if (!plain(config.output_format)) {
        return invalid("output format " + std::string(name(config.output_format)) +
                       ": fp32, fp16 or bf16");
    }
    return {};
}

Result<void> checkScales(const std::string& which, std::span<const float> scales, int kv_heads) {
    if (scales.size() != static_cast<std::size_t>(kv_heads)) {
        return invalid(which + ": " + std::to_string(scales.size()) + " scales for " +
                       text(kv_heads) + " KV heads");
    }
    for (std::size_t head = 0; head < scales.size(); ++head) {
        // NaN is in no range.
        if (scales[head] >= KvScales::least && scales[head] <= KvScales::most) continue;
        return invalid(fmt::format("{}, KV head {}: {} is not in [2^-14, {:.0f}]", which, head,
                                   scales[head], KvScales::most));
    }
    return {};
}

// A layer without its scales is refused: it must not be quantised by another rule than the others.
Result<void> checkKvScales(const CacheConfig& config) {
    if (config.kv_scales.empty()) return {};
    if (!hasScales(config.kv_format)) {
        return invalid("KV scales: " + std::string(name(config.kv_format)) +
                       " has none, fp8-e4m3 and int8 have");
    }
    if (config.kv_scales.size() != static_cast<std::size_t>(config.geometry.layers)) {
        return invalid("KV scales: of " + std::to_string(config.kv_scales.size()) +
                       " layers, there are " + text(config.geometry.layers));
    }
    for (const LayerGroup& group : config.geometry.groups) {
        for (const int layer : group.layers) {
            const KvScales& scales = config.kv_scales[static_cast<std::size_t>(layer)];
            const std::string of_layer = " scales of layer " + text(layer);
            auto checked = checkScales("K" + of_layer, scales.k, group.kv_heads);
            if (checked) checked = checkScales("V" + of_layer, scales.v, group.kv_heads);
            if (!checked) return checked;
        }
    }
    return {};
}

// Tokens of a block: a contiguous one holds a sequence, whole stripes of 256.
std::optional<std::int64_t> blockTokens(const CacheConfig& config) {
    if (config.layout != PoolLayout::contiguous) return config.block_size;
    constexpr std::int64_t stripe = 256;
    const auto padded = checkedSum({config.max_sequence_length, stripe - 1});
    if (!padded) return std::nullopt;
    return *padded / stripe * stripe;
}

// Every byte offset into a pool or a step's tensors must stay within 64 bits.
Result<void> checkOffsets(const CacheConfig& config, const LayerGroup& group) {
    const auto layers = static_cast<std::int64_t>(group.layers.size());
    const auto tokens = blockTokens(config);
    const auto blocks = checkedSum({config.device_blocks, config.host_blocks});
    const auto element = static_cast<std::int64_t>(bytesPerElement(config.kv_format));
    const auto rows = checkedProduct({tokens.value_or(0), group.head_dim, element});
    const auto head =
        checkedSum({rows.value_or(0), scaleBytes(config.kv_format, tokens.value_or(0))});
    if (!tokens || !blocks || !rows || !head ||
        !checkedProduct({*blocks, 2 * layers, group.kv_heads, *head})) {
        return invalid("device blocks and host blocks: the bytes of the pools are beyond 64 bits");
    }
    if (!checkedProduct({config.max_step_tokens, config.geometry.query_heads, group.head_dim, 4})) {
        return invalid("max step tokens " + text(config.max_step_tokens) +
                       ": the bytes of a step are beyond 64 bits");
    }
    return {};
}

Result<void> checkSizes(const CacheConfig& config) {
    struct Count {
        const char* name;
        std::int64_t value;
        std::int64_t least;
        std::int64_t most;
    };
    constexpr std::int64_t most_ids = INT32_MAX;  // block ids and rows of a plan have 32 bits
    for (const Count& count :
         {Count{"device blocks", config.device_blocks, 1, most_ids},
          Count{"host blocks", config.host_blocks, 0, most_ids},
          Count{"max sequences", config.max_sequences, 1, most_ids},
          Count{"max sequence length", config.max_sequence_length, 1, INT64_MAX},
          Count{"max step tokens", config.max_step_tokens, 1, most_ids}}) {
        const auto checked = checkCount(count.name, count.value, count.least, count.most);
        if (!checked) return checked;
    }
    if (config.layout != PoolLayout::contiguous &&
        (config.max_sequence_length - 1) / config.block_size >= most_ids) {
        return invalid("max sequence length " + text(config.max_sequence_length) +
                       ": more than 2147483647 blocks of " + text(config.block_size) + " tokens");
    }
    for (const LayerGroup& group : config.geometry.groups) {
        const auto checked = checkOffsets(config, group);
        if (!checked) return checked;
    }
    return {};
}

}  // namespace

Geometry Geometry::uniform(int layers, int query_heads, int kv_heads, int head_dim) {
    Geometry geometry{.layers = layers, .query_heads = query_heads, .groups = {}};
    LayerGroup group{.layers = {}, .kv_heads = kv_heads, .head_dim = head_dim, .window = 0};
    group.layers.resize(static_cast<std::size_t>(std::max(layers, 0)));
    std::iota(group.layers.begin(), group.layers.end(), 0);
    geometry.groups.push_back(std::move(group));
    return geometry;
}

Result<void> checkBlockSize(int block_size) {
    const bool power_of_two = block_size > 0 && (block_size & (block_size - 1)) == 0;
    if (power_of_two && block_size <= most_block_size) return {};
    return invalid("block size " + text(block_size) + ": a power of two from 1 to " +
                   text(most_block_size));
}

Result<void> checkLayerGroup(const LayerGroup& group) {
    if (group.layers.empty()) return invalid("geometry: a layer group without layers");
    auto checked = checkCount("KV heads", group.kv_heads, 1, most_count);
    if (checked) checked = checkCount("head dim", group.head_dim, 1, most_count);
    if (checked) checked = checkCount("window", group.window, 0);
    return checked;
}

Result<void> checkGeometry(const Geometry& geometry) {
    auto checked = checkCount("layers", geometry.layers, 1, most_count);
    if (checked) checked = checkCount("query heads", geometry.query_heads, 1, most_count);
    if (!checked) return checked;
    if (geometry.groups.empty()) return invalid("geometry: no layer has KV");

    std::vector<bool> seen(static_cast<std::size_t>(geometry.layers), false);
    for (const LayerGroup& group : geometry.groups) {
        checked = checkLayerGroup(group);
        if (!checked) return checked;
        if (geometry.query_heads % group.kv_heads != 0) {
            return invalid("query heads " + text(geometry.query_heads) +
                           " are not a multiple of the " + text(group.kv_heads) + " KV heads");
        }
        int previous = -1;
        for (const int layer : group.layers) {
            checked = checkCount("layer", layer, 0, geometry.layers - 1);
            if (!checked) return checked;
            if (layer <= previous || seen[static_cast<std::size_t>(layer)]) {
                return invalid("geometry: layer " + text(layer) +
                               " is out of order or in two groups");
            }
            seen[static_cast<std::size_t>(layer)] = true;
            previous = layer;
        }
    }
    return {};
}

Result<Grid> chooseGrid(const Geometry& geometry, int ranks, Grid requested) {
    auto checked = checkGeometry(geometry);
    if (checked) checked = checkCount("ranks", ranks, 1);
    if (!checked) return tl::unexpected(checked.error());

    if (requested == Grid{}) {
        checked = checkHeads(geometry, ranks, "ranks");
        if (!checked) return tl::unexpected(checked.error());
        return Grid{.heads = ranks, .context = 1};
    }
    const std::string name = "grid " + text(requested.heads) + "x" + text(requested.context);
    if (requested.heads < 1 || requested.context < 1) {
        return invalid(name + ": both axes are at least 1");
    }
    if (requested.context > 1) {
        return invalid(name + ": the context axis is 1 in this version");
    }
    if (requested.heads != ranks) {
        return invalid(name + " has " + text(requested.heads) + " ranks, not " + text(ranks));
    }
    checked = checkHeads(geometry, requested.heads, name);
    if (!checked) return tl::unexpected(checked.error());
    return requested;
}

Result<void> validate(const CacheConfig& config) {
    auto checked = checkGeometry(config.geometry);
    if (checked) checked = checkDecodable(config.geometry);
    if (!checked) return checked;
    if (config.grid != Grid{}) {
        const auto grid = chooseGrid(config.geometry, config.grid.heads, config.grid);
        if (!grid) return tl::unexpected(grid.error());
    }
    checked = checkFormats(config);
    if (checked) checked = checkKvScales(config);
    for (const LayerGroup& group : config.geometry.groups) {
        if (checked) checked = checkRotary(group.rotary.value_or(config.rotary), group.head_dim);
    }
    if (!checked) return checked;
    if (!std::isfinite(config.softmax_scale) || config.softmax_scale < 0) {
        return invalid("softmax scale " + std::to_string(config.softmax_scale) +
                       ": above 0, or 0 for 1 / sqrt(head dim)");
    }
    checked = checkSoftcap(config.logit_softcap);
    if (!checked) return checked;
    if (config.layout != PoolLayout::contiguous) {
        checked = checkBlockSize(config.block_size);
        if (!checked) return checked;
    }
    return checkSizes(config);
}

}  // namespace kvgrid
