// Learned attention sinks: for each layer and query head of this rank a logit that joins the
// softmax's denominator and weighs no value (gpt-oss, arXiv 2508.10925). It is the attention state
// (0, logit), merged last.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <kvgrid/error.h>

#include "kernels/device.h"

namespace kvgrid {

class Sinks {
public:
    // 0 layers: the model has none. does_not_fit: the device memory.
    [[nodiscard]] static Result<Sinks> create(Device& device, int layers, int query_heads);

    // One logit a query head; -inf: that head has none. Stream-ordered; the logits must stay until
    // the stream is there. invalid_argument: a layer that is not there, another number of logits
    // than query heads, NaN or +inf.
    [[nodiscard]] Result<void> set(int layer, std::span<const float> logits, StreamView stream);

    // On the device, [query heads], at the same address as long as this lives; null when the model
    // has none. invalid_argument: a layer whose logits were never set.
    [[nodiscard]] Result<const float*> of(int layer) const;

private:
    Sinks(Device& device, int layers, int query_heads, Buffer logits);
    [[nodiscard]] Result<void> checkLayer(int layer) const;

    Device* device_;
    int query_heads_;
    Buffer logits_;          // [layers, query heads] fp32
    std::vector<bool> set_;  // [layers]
};

}  // namespace kvgrid
