#include "launch/model_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "launch/json_fields.h"
#include "launch/model_families.h"

namespace kvgrid::launch {

namespace {

constexpr std::int64_t most_layers = 1 << 14;
constexpr std::int64_t most_heads = 1 << 16;
constexpr std::int64_t most_width = 1 << 24;  // of head dim and hidden size

constexpr Keys query_heads_keys{"num_attention_heads", "n_head", "n_heads"};
constexpr Keys kv_heads_keys{"num_key_value_heads", "multi_query_group_num",
                             "attn_config.kv_n_heads"};
constexpr Keys head_dim_keys{"head_dim", "kv_channels"};
constexpr Keys hidden_keys{"hidden_size", "n_embd", "d_model"};
constexpr Keys window_keys{"sliding_window", "attn_config.sliding_window_size"};
constexpr Keys positions_keys{"max_position_embeddings", "n_positions", "max_seq_len", "n_ctx",
                              "seq_length"};
constexpr Keys theta_keys{"rope_parameters.rope_theta", "rope_theta", "rotary_emb_base",
                          "attn_config.rope_theta"};
constexpr Keys rotary_share_keys{"rope_parameters.partial_rotary_factor", "partial_rotary_factor",
                                 "rotary_pct"};

// Shapes whose cache would be counted wrong, by the key that shows them.
struct RefusedKey {
    std::string_view key;
    std::string_view why;
    bool unless_layer_types = false;  // layer_types says the same in a form that is read
};
constexpr std::array refused_keys{
    RefusedKey{"kv_lora_rank",
               "latent attention (MLA) caches a latent, no KV heads: not supported yet"},
    RefusedKey{"block_configs", "layers of different shapes are not supported"},
    RefusedKey{"num_key_value_heads_per_layer", "layers of different shapes are not supported"},
    RefusedKey{"swa_num_key_value_heads", "layers of different shapes are not supported"},
    RefusedKey{"swa_head_dim", "layers of different shapes are not supported"},
    RefusedKey{"global_head_dim", "layers of different shapes are not supported"},
    RefusedKey{"num_global_key_value_heads", "layers of different shapes are not supported"},
    RefusedKey{"cross_attention_layers", "cross attention is not supported"},
    RefusedKey{"hybrid_override_pattern", "this way to list layers is not read", true},
    RefusedKey{"hybrid_layer_pattern", "this way to list layers is not read", true},
    RefusedKey{"attn_layer_period", "this way to list layers is not read", true},
    RefusedKey{"attn_layer_indices", "this way to list layers is not read", true},
    RefusedKey{"full_attn_idxs", "this way to list layers is not read", true},
    RefusedKey{"layers_block_type", "this way to list layers is not read", true},
    RefusedKey{"block_types", "this way to list layers is not read", true},
    RefusedKey{"attention_types", "this way to list layers is not read", true},
    RefusedKey{"attention_layers", "this way to list layers is not read", true},
};

// Parts of attention that a true value switches on, and that are not computed yet.
struct Switch {
    std::string_view key;
    std::string_view why;
};
constexpr std::array switches{
    Switch{"alibi", "ALiBi is not computed"},
    Switch{"use_alibi", "ALiBi is not computed"},
    Switch{"attn_config.alibi", "ALiBi is not computed"},
    Switch{"use_dynamic_ntk", "a rotary base that grows with the length is not computed"},
    Switch{"use_logn_attn", "a query scale that grows with the length is not computed"},
    Switch{"scale_attn_by_inverse_layer_idx", "a scale of its own for each layer is not computed"},
};

enum class LayerKind : std::uint8_t { full, sliding, chunked, without_kv };

struct NamedKind {
    std::string_view name;
    LayerKind kind;
};
constexpr std::array layer_kinds{
    NamedKind{"full_attention", LayerKind::full},
    NamedKind{"attention", LayerKind::full},
    NamedKind{"sliding_attention", LayerKind::sliding},
    NamedKind{"chunked_attention", LayerKind::chunked},
    NamedKind{"linear_attention", LayerKind::without_kv},
    NamedKind{"mamba", LayerKind::without_kv},
    NamedKind{"conv", LayerKind::without_kv},
    NamedKind{"recurrent", LayerKind::without_kv},
};

// Reads one config, in the order of its methods. Throws Error.
class Reader {
public:
    Reader(const JsonFields& outer, const JsonFields& model, ModelConfig& config)
        : outer_(outer),
          model_(model),
          config_(config) {}

    void read() {
        config_.model_type = model_.text({"model_type"}).value_or("");
        family_ = familyOf(config_.model_type);
        refuse();
        readHeads();
        config_.max_positions = model_.integer(positions_keys, 1).value_or(0);
        readDtype();
        readRotary();
        readLayers();
        readSoftmax();
        readObstacles();
    }

private:
    void refuse() const {
        const bool layer_types = model_.has("layer_types");
        for (const RefusedKey& refused : refused_keys) {
            if (!model_.has(refused.key) || (refused.unless_layer_types && layer_types)) continue;
            model_.fail(refused.key, std::string(refused.why));
        }
        if (model_.boolean({"is_encoder_decoder"}).value_or(false)) {
            model_.fail("is_encoder_decoder", "encoder-decoder models are not supported");
        }
        if (model_.integer({"num_kv_shared_layers"}, 0).value_or(0) > 0) {
            model_.fail("num_kv_shared_layers", "layers that share K and V are not supported");
        }
    }

    void readHeads() {
        config_.geometry.layers =
            static_cast<int>(model_.requiredInteger(layers_keys, 1, most_layers));
        const auto query_heads = model_.requiredInteger(query_heads_keys, 1, most_heads);
        config_.geometry.query_heads = static_cast<int>(query_heads);
        shape_.kv_heads = static_cast<int>(kvHeads(query_heads));
        if (query_heads % shape_.kv_heads != 0) {
            model_.fail(model_.find(query_heads_keys).key,
                        fmt::format("{} is not a multiple of the {} KV heads", query_heads,
                                    shape_.kv_heads));
        }
        shape_.head_dim = static_cast<int>(headDim(query_heads));
        const auto v_head_dim = model_.integer({"v_head_dim"}, 1, most_width);
        if (v_head_dim.value_or(shape_.head_dim) != shape_.head_dim) {
            model_.fail("v_head_dim", fmt::format("{}, but K has {}: not supported", *v_head_dim,
                                                  shape_.head_dim));
        }
    }

    // Falcon's num_kv_heads lies beside multi_query: true, unless the architecture is the new one.
    std::int64_t kvHeads(std::int64_t query_heads) const {
        if (const auto heads = model_.integer(kv_heads_keys, 1, most_heads)) return *heads;
        const bool new_falcon = model_.boolean({"new_decoder_architecture"}).value_or(false);
        const bool multi_query = model_.boolean({"multi_query"}).value_or(family_.multi_query);
        if (multi_query && !new_falcon) return 1;
        return model_.integer({"num_kv_heads", "n_head_kv"}, 1, most_heads).value_or(query_heads);
    }

    std::int64_t headDim(std::int64_t query_heads) const {
        if (const auto head_dim = model_.integer(head_dim_keys, 1, most_width)) return *head_dim;
        const auto hidden = model_.requiredInteger(hidden_keys, 1, most_width);
        if (hidden % query_heads != 0) {
            model_.fail(model_.find(hidden_keys).key,
                        fmt::format("{} is not a multiple of the {} query heads, and there is no "
                                    "head_dim",
                                    hidden, query_heads));
        }
        return hidden / query_heads;
    }

    void readDtype() {
        auto text = model_.text({"torch_dtype", "dtype"});
        if (!text) text = outer_.text({"torch_dtype", "dtype"});
        if (text == "float16") config_.dtype = NumberFormat::fp16;
        if (text == "bfloat16") config_.dtype = NumberFormat::bf16;
        if (text == "float32") config_.dtype = NumberFormat::fp32;
    }

    void readLayers() {
        const std::vector<LayerKind> kinds = layerKinds();
        std::map<bool, LayerGroup> groups;  // by whether they slide
        for (std::size_t layer = 0; layer < kinds.size(); ++layer) {
            if (kinds[layer] == LayerKind::without_kv) continue;
            // A window that no position meets makes no layer another, a rotary embedding does.
            const bool sliding =
                kinds[layer] == LayerKind::sliding && (window_ > 0 || sliding_rotary_);
            LayerGroup& group = groups.try_emplace(sliding, shape_).first->second;
            if (sliding) {
                group.window = window_;
                group.rotary = sliding_rotary_;
            }
            group.layers.push_back(static_cast<int>(layer));
        }
        if (groups.empty()) model_.fail("layer_types", "no layer has KV");
        for (auto& [sliding, group] : groups)
            config_.geometry.groups.push_back(std::move(group));
    }

    std::vector<LayerKind> layerKinds() {
        const auto layers = static_cast<std::size_t>(config_.geometry.layers);
        readWindow();
        if (const auto types = model_.texts({"layer_types"})) return listedKinds(*types, layers);

        std::vector<LayerKind> kinds(layers, LayerKind::full);
        const auto linear_every =
            model_.integer({"full_attention_interval"}, 1).value_or(family_.linear_every);
        if (window_ > 0 || sliding_rotary_) markSliding(kinds);
        for (std::size_t layer = 0; linear_every > 0 && layer < layers; ++layer) {
            if ((static_cast<std::int64_t>(layer) + 1) % linear_every != 0) {
                kinds[layer] = LayerKind::without_kv;
            }
        }
        return kinds;
    }

    // A window that no position of the model meets is none.
    void readWindow() {
        const bool on = model_.boolean({"use_sliding_window"}).value_or(!family_.window_off);
        if (!on) return;
        const std::int64_t absent = model_.isNull("sliding_window") ? 0 : family_.window;
        window_ = model_.integer(window_keys, 1).value_or(absent);
        if (config_.max_positions > 0 && window_ >= config_.max_positions) window_ = 0;
    }

    void markSliding(std::vector<LayerKind>& kinds) const {
        const auto layers = static_cast<std::int64_t>(kinds.size());
        const auto full_every =
            model_.integer({"sliding_window_pattern", "_sliding_window_pattern"}, 1)
                .value_or(family_.full_every);
        const std::int64_t first =
            family_.window_off ? model_.integer({"max_window_layers"}, 0).value_or(0) : 0;
        for (std::int64_t layer = first; layer < layers; ++layer) {
            if (full_every > 0 && (layer + 1) % full_every == 0) continue;
            kinds[static_cast<std::size_t>(layer)] = LayerKind::sliding;
        }
    }

    std::vector<LayerKind> listedKinds(const std::vector<std::string>& types,
                                       std::size_t layers) const {
        if (types.size() != layers) {
            model_.fail("layer_types",
                        fmt::format("{} entries for {} layers", types.size(), layers));
        }
        std::vector<LayerKind> kinds;
        for (const std::string& type : types) {
            const auto* found =
                std::find_if(layer_kinds.begin(), layer_kinds.end(),
                             [&](const NamedKind& kind) { return kind.name == type; });
            const std::string key = fmt::format("layer_types[{}]", kinds.size());
            if (found == layer_kinds.end()) {
                model_.fail(key, "'" + type + "' is not a kind of layer that is known");
            }
            if (found->kind == LayerKind::sliding && !model_.find(window_keys) &&
                family_.window == 0) {
                model_.fail("sliding_window", "is missing, but " + key + " slides");
            }
            kinds.push_back(found->kind);
        }
        return kinds;
    }

    void readRotary() {
        const auto position_type = model_.text({"position_embedding_type"}).value_or("");
        if (position_type == "alibi") family_.positions = Positions::alibi;
        if (position_type == "nope" || position_type == "absolute") {
            family_.positions = Positions::learned;
        }
        if (family_.positions == Positions::alibi) {
            obstacle("model_type", config_.model_type + " has ALiBi, which is not computed");
        }
        const bool interleaved = family_.positions == Positions::interleaved;
        if (!interleaved && family_.positions != Positions::rotate_half) return;
        config_.rotary.dim = static_cast<int>(rotaryDim());
        config_.rotary.theta = model_.positive(theta_keys).value_or(family_.theta);
        if (interleaved) {
            obstacle("model_type", fmt::format("{} rotates neighbouring elements, which is not "
                                               "computed yet",
                                               config_.model_type));
        }
        if (family_.sliding_theta > 0) {
            sliding_rotary_ = config_.rotary;
            sliding_rotary_->theta =
                model_.positive({"rope_local_base_freq"}).value_or(family_.sliding_theta);
        }
        readScaling();
    }

    std::int64_t rotaryDim() const {
        if (const auto dim = model_.integer({"rotary_dim"}, 2, shape_.head_dim)) {
            if (*dim % 2 != 0) model_.fail("rotary_dim", fmt::format("{} is odd", *dim));
            return *dim;
        }
        const auto given = model_.find(rotary_share_keys);
        const std::string_view key = given ? given.key : "partial_rotary_factor";
        const double share = model_.positive(rotary_share_keys).value_or(family_.rotary_share);
        if (share > 1) model_.fail(key, fmt::format("{} is above 1", share));
        const auto dim = static_cast<std::int64_t>(share * shape_.head_dim);
        if (dim < 2 || dim % 2 != 0) {
            model_.fail(key, fmt::format("{} of head_dim {} is {}, not an even number of elements",
                                         share, shape_.head_dim, dim));
        }
        return dim;
    }

    void readScaling() {
        const auto found = model_.find({"rope_scaling", "rope_parameters"});
        if (!found) return;
        const std::string key(found.key);
        const JsonFields scaling = *model_.object({found.key});
        const auto full = scaling.object({"full_attention"});
        const auto sliding = scaling.object({"sliding_attention"});
        if (!full && !sliding) return readScaling(key, scaling, config_.rotary);
        if (!sliding_rotary_) sliding_rotary_ = config_.rotary;
        if (full) readRotaryOfKind(key + ".full_attention", *full, config_.rotary);
        if (sliding) readRotaryOfKind(key + ".sliding_attention", *sliding, *sliding_rotary_);
        if (sliding_rotary_ == config_.rotary) sliding_rotary_.reset();
    }

    void readRotaryOfKind(const std::string& key, const JsonFields& fields,
                          RotaryEmbedding& rotary) {
        rotary.theta = fields.positive({"rope_theta"}).value_or(rotary.theta);
        readScaling(key, fields, rotary);
    }

    void readScaling(const std::string& key, const JsonFields& scaling, RotaryEmbedding& rotary) {
        if (scaling.number({"llama_4_scaling_beta"}).value_or(0) != 0) {
            obstacle(key + ".llama_4_scaling_beta",
                     "a query scale that grows with the position is not computed",
                     scaling.integer({"original_max_position_embeddings"}, 1).value_or(0));
        }
        const std::string type_key = scaling.has("rope_type") ? "rope_type" : "type";
        const auto type = scaling.text({type_key});
        if (!type && key == "rope_scaling") scaling.fail("rope_type", "is missing");
        if (!type || type == "default") return;
        if (type == "linear") {
            rotary.scaling = LinearScaling{.factor = required(scaling, "factor")};
        } else if (type == "llama3") {
            rotary.scaling = readLlama3(scaling);
        } else if (type == "yarn") {
            rotary.scaling = readYarn(scaling);
        } else {
            obstacle(key + "." + type_key, fmt::format("'{}' is not computed yet", *type));
        }
    }

    static double required(const JsonFields& scaling, std::string_view key) {
        const auto value = scaling.positive({key});
        if (!value) scaling.fail(key, "is missing");
        return *value;
    }

    // mscale and mscale_all_dim are DeepSeek's way to give the attention factor.
    [[nodiscard]] YarnScaling readYarn(const JsonFields& scaling) const {
        const auto original = scaling.positive({"original_max_position_embeddings"});
        if (!original && config_.max_positions == 0) {
            scaling.fail("original_max_position_embeddings", "is missing");
        }
        YarnScaling yarn{
            .factor = required(scaling, "factor"),
            .original_max_position = original.value_or(static_cast<double>(config_.max_positions)),
            .beta_fast = scaling.positive({"beta_fast"}).value_or(32),
            .beta_slow = scaling.positive({"beta_slow"}).value_or(1),
            .truncate = scaling.boolean({"truncate"}).value_or(true),
            .attention_factor = scaling.positive({"attention_factor"}).value_or(0)};
        if (yarn.beta_fast <= yarn.beta_slow) scaling.fail("beta_fast", "is not above beta_slow");
        const auto mscale = scaling.number({"mscale"}).value_or(0);
        const auto mscale_all = scaling.number({"mscale_all_dim"}).value_or(0);
        if (yarn.attention_factor == 0 && mscale != 0 && mscale_all != 0) {
            const double logarithm = 0.1 * std::log(std::max(yarn.factor, 1.0));
            yarn.attention_factor = (mscale * logarithm + 1) / (mscale_all * logarithm + 1);
            if (!(yarn.attention_factor > 0)) scaling.fail("mscale", "gives no factor above 0");
        }
        return yarn;
    }

    static Llama3Scaling readLlama3(const JsonFields& scaling) {
        const Llama3Scaling llama3{
            .factor = required(scaling, "factor"),
            .low_freq_factor = required(scaling, "low_freq_factor"),
            .high_freq_factor = required(scaling, "high_freq_factor"),
            .original_max_position = required(scaling, "original_max_position_embeddings")};
        if (llama3.high_freq_factor <= llama3.low_freq_factor) {
            scaling.fail("high_freq_factor", "is not above low_freq_factor");
        }
        return llama3;
    }

    void readSoftmax() {
        if (const auto scalar = model_.positive({"query_pre_attn_scalar"})) {
            config_.softmax_scale = 1.0 / std::sqrt(*scalar);
        }
        if (const auto scale = model_.positive({"attention_multiplier"})) {
            config_.softmax_scale = *scale;
        }
        if (!model_.boolean({"scale_attn_weights"}).value_or(true)) config_.softmax_scale = 1.0;
        config_.attention_sinks = family_.sinks;
        const double absent = model_.isNull("attn_logit_softcapping") ? 0 : family_.softcap;
        config_.logit_softcap = model_.positive({"attn_logit_softcapping"}).value_or(absent);
    }

    void readObstacles() {
        for (const Switch& part : switches) {
            if (!model_.boolean({part.key}).value_or(false)) continue;
            obstacle(std::string(part.key), std::string(part.why));
        }
        if (model_.number({"rope_ratio"}).value_or(1) != 1) {
            obstacle("rope_ratio", "a scaled rotary base is not computed yet");
        }
        if (const auto chunk = model_.integer({"attention_chunk_size"}, 1)) {
            obstacle(
                "attention_chunk_size",
                fmt::format("attention within chunks of {} tokens is not computed yet", *chunk),
                *chunk);
        }
        if (someLayersWithoutRotary()) {
            obstacle("no_rope_layers", "layers without rotary embedding are not computed yet");
        }
        readGeometryObstacles();
    }

    // A list of 1 (rotary) and 0 (none) a layer; an empty one means the class's pattern.
    bool someLayersWithoutRotary() const {
        const auto found = model_.find({"no_rope_layers"});
        if (!found) return false;
        if (!found.value->is_array()) model_.fail(found.key, "is not a list");
        if (found.value->empty()) return true;
        return std::any_of(found.value->begin(), found.value->end(), [&](const auto& item) {
            return wholeNumber(model_, found.key, item, 0, 1) == 0;
        });
    }

    void readGeometryObstacles() {
        constexpr std::array head_dims{64, 80, 96, 128, 256};
        if (std::find(head_dims.begin(), head_dims.end(), shape_.head_dim) == head_dims.end()) {
            obstacle("head_dim", fmt::format("{}: only {} are computed", shape_.head_dim,
                                             fmt::join(head_dims, ", ")));
        }
        constexpr int most_group = 128;
        if (config_.geometry.query_heads / shape_.kv_heads > most_group) {
            obstacle("num_attention_heads",
                     fmt::format("{} query heads a KV head: at most {} are computed",
                                 config_.geometry.query_heads / shape_.kv_heads, most_group));
        }
    }

    void obstacle(std::string key, std::string why, std::int64_t beyond = 0) {
        config_.obstacles.push_back({std::move(key), std::move(why), beyond});
    }

    const JsonFields& outer_;
    const JsonFields& model_;
    ModelConfig& config_;
    Family family_;
    LayerGroup shape_;                               // of every layer: KV heads and head dim
    std::int64_t window_ = 0;                        // of sliding layers
    std::optional<RotaryEmbedding> sliding_rotary_;  // none: that of all layers
};

}  // namespace

void readModel(const JsonFields& outer, const JsonFields& model, ModelConfig& config) {
    Reader(outer, model, config).read();
}

}  // namespace kvgrid::launch
