// What the file of a model does not say because the code of its family says it: defaults of the
// classes in Hugging Face transformers (configuration_*.py and modeling_*.py of each model_type).
#pragma once

#include <cstdint>
#include <string_view>

namespace kvgrid::launch {

// How a model knows positions.
enum class Positions : std::uint8_t {
    rotate_half,  // rotary embedding, element i with element i + dim / 2
    interleaved,  // rotary embedding, element 2i with element 2i + 1
    learned,      // added before the first layer: attention sees none
    alibi,        // a bias in the scores
};

struct Family {
    std::string_view model_type;
    Positions positions = Positions::rotate_half;
    double rotary_share = 1.0;      // of a head that is rotated
    double theta = 10000.0;         // of the rotary embedding, unless the file says so
    double sliding_theta = 0;       // of that which layers with a window have instead; 0: the same
    bool multi_query = false;       // one KV head unless the file says otherwise
    std::int64_t window = 0;        // tokens; 0: none unless the file says so
    bool window_off = false;        // a window counts only with use_sliding_window: true
    std::int64_t full_every = 0;    // of layers with a window, each n-th is full; 0: none
    std::int64_t linear_every = 0;  // each n-th layer has KV, the others are recurrent; 0: all have
    double softcap = 0;             // of scores; 0: none unless the file says so
    bool sinks = false;             // a learned logit a head joins the softmax
};

// A type that is not in the table: rotary embedding in rotate-half pairing, and nothing special.
[[nodiscard]] Family familyOf(std::string_view model_type) noexcept;

}  // namespace kvgrid::launch
