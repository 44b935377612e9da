#include "launch/model_families.h"

#include <algorithm>
#include <array>

namespace kvgrid::launch {

namespace {

constexpr std::array families{
    Family{.model_type = "bloom", .positions = Positions::alibi},
    Family{.model_type = "chatglm", .positions = Positions::interleaved, .rotary_share = 0.5},
    Family{.model_type = "codegen", .positions = Positions::interleaved},
    Family{.model_type = "cohere", .positions = Positions::interleaved},
    Family{.model_type = "cohere2",
           .positions = Positions::interleaved,
           .window = 4096,
           .full_every = 4},
    Family{.model_type = "ernie4_5", .positions = Positions::interleaved},
    Family{.model_type = "ernie4_5_moe", .positions = Positions::interleaved},
    Family{.model_type = "falcon", .multi_query = true},
    Family{.model_type = "gemma2", .window = 4096, .full_every = 2, .softcap = 50},
    Family{.model_type = "gemma3",
           .theta = 1e6,
           .sliding_theta = 1e4,
           .window = 4096,
           .full_every = 6},
    Family{.model_type = "gemma3_text",
           .theta = 1e6,
           .sliding_theta = 1e4,
           .window = 4096,
           .full_every = 6},
    Family{.model_type = "glm", .positions = Positions::interleaved, .rotary_share = 0.5},
    Family{.model_type = "glm4", .positions = Positions::interleaved, .rotary_share = 0.5},
    Family{.model_type = "gpt2", .positions = Positions::learned},
    Family{.model_type = "gpt_bigcode", .positions = Positions::learned, .multi_query = true},
    Family{.model_type = "gpt_neo", .positions = Positions::learned},
    Family{.model_type = "gpt_neox", .rotary_share = 0.25},
    Family{.model_type = "gpt_oss", .window = 128, .full_every = 2, .sinks = true},
    Family{.model_type = "gptj", .positions = Positions::interleaved},
    Family{.model_type = "llama4", .positions = Positions::interleaved},
    Family{.model_type = "llama4_text", .positions = Positions::interleaved},
    Family{.model_type = "mistral", .window = 4096},
    Family{.model_type = "mpt", .positions = Positions::alibi},
    Family{.model_type = "nemotron", .rotary_share = 0.5},
    Family{.model_type = "opt", .positions = Positions::learned},
    Family{.model_type = "persimmon", .rotary_share = 0.5},
    Family{.model_type = "phi", .rotary_share = 0.5},
    Family{.model_type = "qwen2", .window_off = true},
    Family{.model_type = "qwen2_moe", .window_off = true},
    Family{.model_type = "qwen3", .window_off = true},
    Family{.model_type = "qwen3_moe", .window_off = true},
    Family{.model_type = "qwen3_next", .rotary_share = 0.25, .linear_every = 4},
    Family{.model_type = "stablelm", .rotary_share = 0.25},
};

}  // namespace

Family familyOf(std::string_view model_type) noexcept {
    const auto* found = std::find_if(families.begin(), families.end(), [&](const Family& family) {
        return family.model_type == model_type;
    });
    if (found == families.end()) return Family{};
    return *found;
}

}  // namespace kvgrid::launch
