#include "launch/reference.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <optional>
#include <random>
#include <set>
#include <variant>

namespace kvgrid::launch {

namespace {

oracle::Format oracleFormat(NumberFormat format) {
    switch (format) {
    case NumberFormat::fp16:
        return oracle::Format::fp16;
    case NumberFormat::bf16:
        return oracle::Format::bf16;
    case NumberFormat::fp8_e4m3:
        return oracle::Format::e4m3;
    case NumberFormat::int8:
        return oracle::Format::int8;
    case NumberFormat::fp32:
        break;
    }
    return oracle::Format::fp32;
}

// The value that the bits of a 16-bit format stand for, from the formats' definitions.
double decoded(std::uint16_t bits, oracle::Format format) {
    const int mantissa_bits = format == oracle::Format::bf16 ? 7 : 10;
    const int bias = format == oracle::Format::bf16 ? 127 : 15;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == 2 * bias + 1) return std::nan("");
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

bool hasScale(oracle::Format format) {
    return format == oracle::Format::e4m3 || format == oracle::Format::int8;
}

// What a row is worth once it is stored.
void appendWorth(std::span<const float> row, oracle::Format format,
                 std::optional<double> fixed_scale, std::vector<double>& out) {
    if (!hasScale(format)) {
        for (const float value : row)
            out.push_back(oracle::rounded(value, format));
        return;
    }
    const oracle::ScaledRow scaled = oracle::quantised(row, format, fixed_scale);
    for (std::size_t i = 0; i < row.size(); ++i)
        out.push_back(scaled.worth(i));
}

}  // namespace

oracle::Rotary oracleRotary(const RotaryEmbedding& rotary) {
    using Scaling = oracle::Rotary::Scaling;
    oracle::Rotary same{.dim = rotary.dim, .theta = rotary.theta};
    if (const auto* linear = std::get_if<LinearScaling>(&rotary.scaling)) {
        same.scaling = Scaling::linear;
        same.factor = linear->factor;
    }
    if (const auto* llama3 = std::get_if<Llama3Scaling>(&rotary.scaling)) {
        same.scaling = Scaling::llama3;
        same.factor = llama3->factor;
        same.slow_turns = llama3->low_freq_factor;
        same.fast_turns = llama3->high_freq_factor;
        same.original_max_position = llama3->original_max_position;
    }
    if (const auto* yarn = std::get_if<YarnScaling>(&rotary.scaling)) {
        same.scaling = Scaling::yarn;
        same.factor = yarn->factor;
        same.slow_turns = yarn->beta_slow;
        same.fast_turns = yarn->beta_fast;
        same.original_max_position = yarn->original_max_position;
        same.whole_pairs = yarn->truncate;
        same.attention_factor = yarn->attention_factor > 0 ? yarn->attention_factor
                                : yarn->factor > 1         ? 0.1 * std::log(yarn->factor) + 1.0
                                                           : 1.0;
    }
    return same;
}

std::vector<float> widened(NumberFormat format, std::span<const std::byte> bytes) {
    std::vector<float> values(bytes.size() / bytesPerElement(format));
    if (format == NumberFormat::fp32) {
        std::memcpy(values.data(), bytes.data(), bytes.size());
        return values;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
        values[i] = static_cast<float>(decoded(bits, oracleFormat(format)));
    }
    return values;
}

double errorBound(NumberFormat output_format) noexcept {
    if (output_format == NumberFormat::fp16) return 1e-3;
    if (output_format == NumberFormat::bf16) return 4e-3;
    return 1e-5;
}

Reference::Reference(const CacheConfig& config, std::uint64_t seed)
    : workload_(seed, config.input_format, config.geometry.groups.front().head_dim),
      layers_(static_cast<std::size_t>(config.geometry.layers)),
      kv_format_(oracleFormat(config.kv_format)),
      gathered_format_(hasScales(config.kv_format) ? oracleFormat(config.input_format)
                                                   : kv_format_),
      scale_(config.softmax_scale > 0 ? config.softmax_scale
                                      : 1.0 / std::sqrt(workload_.headDim())),
      softcap_(config.logit_softcap),
      sinks_(config.attention_sinks),
      kv_heads_(config.geometry.groups.front().kv_heads),
      group_size_(config.geometry.query_heads / kv_heads_) {
    for (const LayerGroup& group : config.geometry.groups) {
        for (const int layer : group.layers) {
            const auto i = static_cast<std::size_t>(layer);
            layers_[i] = {.window = group.window,
                          .rotary = oracleRotary(group.rotary.value_or(config.rotary))};
            if (!config.kv_scales.empty()) layers_[i].scales = config.kv_scales[i];
        }
    }
}

bool Reference::quantises() const noexcept {
    return hasScale(kv_format_);
}

std::int64_t Reference::firstSeen(int layer, std::int64_t position) const noexcept {
    const std::int64_t window = layerAt(layer).window;
    return window == 0 || window > position ? 0 : position - window + 1;
}

Reference::KeysValues Reference::keysValues(const Unit& unit, std::int64_t first,
                                            std::int64_t end) const {
    return keysValues(unit, first, end, kv_format_);
}

Reference::KeysValues Reference::unquantised(const Unit& unit, std::int64_t first,
                                             std::int64_t end) const {
    return keysValues(unit, first, end, oracle::Format::fp32);
}

Reference::KeysValues Reference::keysValues(const Unit& unit, std::int64_t first, std::int64_t end,
                                            oracle::Format format) const {
    const auto head_dim = static_cast<std::size_t>(headDim());
    KeysValues stored{.first = first, .k = {}, .v = {}};
    stored.k.reserve(static_cast<std::size_t>(end - first) * head_dim);
    stored.v.reserve(static_cast<std::size_t>(end - first) * head_dim);
    const auto kv_head = static_cast<std::size_t>(unit.kv_head);
    std::optional<double> k_scale, v_scale;
    if (const std::optional<KvScales>& scales = layerAt(unit.layer).scales) {
        k_scale = scales->k[kv_head];
        v_scale = scales->v[kv_head];
    }
    std::vector<float> head(head_dim);
    for (std::int64_t position = first; position < end; ++position) {
        const TokenAt token{.key = unit.key, .position = position, .layer = unit.layer};
        workload_.fillHead(Tensor::k, token, unit.kv_head, head);
        oracle::rotate(head, position, layerAt(unit.layer).rotary);
        appendWorth(head, format, k_scale, stored.k);
        workload_.fillHead(Tensor::v, token, unit.kv_head, head);
        appendWorth(head, format, v_scale, stored.v);
    }
    return stored;
}

std::vector<double> Reference::attend(const Unit& unit, const KeysValues& stored, int query_head,
                                      std::int64_t position) const {
    const auto head_dim = static_cast<std::size_t>(headDim());
    std::vector<float> head(head_dim);
    workload_.fillHead(Tensor::q, {.key = unit.key, .position = position, .layer = unit.layer},
                       query_head, head);
    oracle::rotate(head, position, layerAt(unit.layer).rotary);
    const std::vector<double> q(head.begin(), head.end());
    const std::int64_t first = firstSeen(unit.layer, position);
    const auto skipped = static_cast<std::size_t>(first - stored.first) * head_dim;
    const auto seen = static_cast<std::size_t>(position + 1 - first) * head_dim;
    oracle::ScoreTerms terms{.softcap = softcap_};
    if (sinks_) terms.sink = workload_.sink(unit.layer, query_head);
    return oracle::attention(q, std::span(stored.k).subspan(skipped, seen),
                             std::span(stored.v).subspan(skipped, seen), scale_, terms)
        .out;
}

std::int64_t Reference::countDifferences(std::span<const std::uint16_t> stored, int heads, int head,
                                         std::span<const double> expected) const {
    const auto head_dim = static_cast<std::size_t>(headDim());
    const std::size_t row = static_cast<std::size_t>(heads) * head_dim;
    std::int64_t different = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const std::size_t at =
            i / head_dim * row + static_cast<std::size_t>(head) * head_dim + i % head_dim;
        const double value = decoded(stored[at], gathered_format_);
        const double right = oracle::rounded(expected[i], gathered_format_);
        if (std::bit_cast<std::uint64_t>(value) != std::bit_cast<std::uint64_t>(right)) ++different;
    }
    return different;
}

std::vector<Unit> pickUnits(int layers, std::int64_t sequences, Heads heads, std::int64_t count,
                            std::uint64_t seed) {
    const std::int64_t all = layers * sequences * heads.count;
    std::set<std::int64_t> picked;
    std::mt19937_64 random(seed);
    while (count < all && static_cast<std::int64_t>(picked.size()) < count)
        picked.insert(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(all)));
    for (std::int64_t i = 0; count >= all && i < all; ++i)
        picked.insert(i);

    std::vector<Unit> units;
    units.reserve(picked.size());
    for (const std::int64_t i : picked) {
        units.push_back({.layer = static_cast<int>(i / heads.count / sequences),
                         .key = i / heads.count % sequences,
                         .kv_head = heads.first + static_cast<int>(i % heads.count)});
    }
    return units;
}

}  // namespace kvgrid::launch
