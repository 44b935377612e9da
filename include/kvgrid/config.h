// What a cache is made for: the model's geometry, the grid of ranks, and the sizes of the tiers.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include <kvgrid/error.h>
#include <kvgrid/types.h>

namespace kvgrid {

// How a model reads contexts longer than those it was first trained on. In all scalings a pair of
// elements keeps a share of its frequency and has the rest divided by `factor`.

// No pair keeps anything (position interpolation: Chen et al., arXiv 2306.15595).
struct LinearScaling {
    double factor = 1.0;

    friend bool operator==(const LinearScaling&, const LinearScaling&) = default;
};

// Pairs that turn more often than high_freq_factor within the original context keep their
// frequency, those that turn less often than low_freq_factor nothing of it; in between the share is
// linear in the turns (Llama 3.1: Meta, "The Llama 3 Herd of Models", 2024, and its reference
// code).
struct Llama3Scaling {
    double factor = 8.0;
    double low_freq_factor = 1.0;
    double high_freq_factor = 4.0;
    double original_max_position = 8192.0;

    friend bool operator==(const Llama3Scaling&, const Llama3Scaling&) = default;
};

// The same with beta_fast and beta_slow turns, but in between the share is linear in the number of
// the pair; and cosines and sines are multiplied by attention_factor (YaRN: Peng et al., arXiv
// 2309.00071, as Hugging Face's rope type "yarn" has it).
struct YarnScaling {
    double factor = 1.0;
    double original_max_position = 4096.0;
    double beta_fast = 32.0;
    double beta_slow = 1.0;
    bool truncate = true;           // the linear part begins and ends at whole pairs
    double attention_factor = 0.0;  // 0: 0.1 ln(factor) + 1, but at least 1

    friend bool operator==(const YarnScaling&, const YarnScaling&) = default;
};

using RotaryScaling = std::variant<std::monostate, LinearScaling, Llama3Scaling, YarnScaling>;

// Rotary position embedding (Su et al., arXiv 2104.09864), "rotate half" pairing: element i with
// element i + dim / 2. The angle is fp64(position) x inverse frequency, reduced before it becomes
// fp32. dim = 0: none (the engine rotated already, or the model has none).
struct RotaryEmbedding {
    int dim = 0;  // rotated elements of a head, the first ones; even, at most head_dim
    double theta = 10000.0;
    RotaryScaling scaling;  // std::monostate: none

    friend bool operator==(const RotaryEmbedding&, const RotaryEmbedding&) = default;
};

// Layers alike in KV heads, head dim, window and format. They share blocks and block tables.
struct LayerGroup {
    std::vector<int> layers;  // indices in [0, Geometry::layers), ascending
    int kv_heads = 0;
    int head_dim = 0;
    std::int64_t window = 0;  // tokens a query sees, itself included; 0: all of them
    // Of these layers alone (Gemma 3 has one for layers with a window); none: CacheConfig::rotary.
    std::optional<RotaryEmbedding> rotary = std::nullopt;
};

// What the model's attention looks like. Layers without KV (recurrent ones) are in no group.
struct Geometry {
    int layers = 0;
    int query_heads = 0;
    std::vector<LayerGroup> groups;

    // All layers alike.
    [[nodiscard]] static Geometry uniform(int layers, int query_heads, int kv_heads, int head_dim);
};

// The ranks as a grid: world size = heads x context. 0 x 0: chosen by Cache::create.
struct Grid {
    int heads = 0;
    int context = 0;

    friend bool operator==(const Grid&, const Grid&) = default;
};

// The grid for `ranks` ranks, or why there is none (the message lists the rank counts that would
// do). A requested grid of 0 x 0 means auto. The context axis is 1 in this version.
[[nodiscard]] Result<Grid> chooseGrid(const Geometry& geometry, int ranks, Grid requested = {});

// The fixed scales of one layer's K and V, which a checkpoint with a calibrated KV cache ships as
// `k_scale` and `v_scale`: an element is worth stored x scale. The cache keeps them as it keeps
// scales of rows, in fp16: rounded to nearest once, by 2^-11 of themselves at most.
struct KvScales {
    static constexpr float least = 0x1p-14F;  // fp16 has fewer bits below
    static constexpr float most = 1000.0F;    // a GPU's weights of V, in fp16, overflow above

    std::vector<float> k;  // [KV heads of the layer, all ranks' together], in [least, most]
    std::vector<float> v;  // likewise

    friend bool operator==(const KvScales&, const KvScales&) = default;
};

struct CacheConfig {
    Geometry geometry;
    Grid grid;
    NumberFormat kv_format = NumberFormat::bf16;      // fp16, bf16, fp8_e4m3 or int8
    NumberFormat input_format = NumberFormat::bf16;   // of q, k and v: fp32, fp16 or bf16
    NumberFormat output_format = NumberFormat::fp32;  // of attention outputs: fp32, fp16 or bf16
    // Fixed scales, of every layer or of none, with fp8_e4m3 and int8 only; without them each row
    // has a scale of its own. K and V beyond scale x 448 (x 127 with int8) saturate there; a row
    // with an infinity or a NaN becomes NaN.
    std::vector<KvScales> kv_scales = {};  // [layers], or empty
    RotaryEmbedding rotary;
    double softmax_scale = 0.0;  // of q.k; 0: 1 / sqrt(head_dim)
    // A score becomes softcap * tanh(score / softcap) before the softmax (Gemma 2, arXiv
    // 2408.00118); 0: none.
    double logit_softcap = 0.0;
    bool attention_sinks = false;  // every layer has learned sinks: see Cache::setSinks

    PoolLayout layout = PoolLayout::block_major;
    int block_size = 64;  // tokens, a power of two in [1, 256]; ignored by contiguous
    // Of each layer group on this rank; the least over ranks counts. The pool of a group with a
    // window is no larger than what max_sequences windows and the tokens of a step need. A window
    // frees no part of a contiguous block.
    std::int64_t device_blocks = 0;
    std::int64_t host_blocks = 0;  // likewise; 0: no offload

    int max_sequences = 0;                 // allocated at a time
    std::int64_t max_sequence_length = 0;  // tokens
    std::int64_t max_step_tokens = 0;      // new tokens of all sequences of a step together
};

// Everything that can be said about a configuration without a device. Names the argument.
[[nodiscard]] Result<void> validate(const CacheConfig& config);

}  // namespace kvgrid
