// From the members of a config.json to the shape of the model's KV cache: one table a question,
// then one reader that asks them in order. Internal to model_config.
#pragma once

#include "launch/json_fields.h"
#include "launch/model_config.h"

namespace kvgrid::launch {

inline constexpr Keys layers_keys{"num_hidden_layers", "n_layer", "num_layers", "n_layers"};

// Fills everything of `config` but name and path. `model` holds the language model; `outer` is the
// whole file, where some keep the dtype. Throws Error (invalid_argument) naming file and key.
void readModel(const JsonFields& outer, const JsonFields& model, ModelConfig& config);

}  // namespace kvgrid::launch
