#include "shard/sinks.h"

#include <cmath>
#include <cstddef>
#include <string>
#include <utility>

namespace kvgrid {

Result<Sinks> Sinks::create(Device& device, int layers, int query_heads) {
    Result<Buffer> logits =
        Buffer::onDevice(device, static_cast<std::size_t>(layers) *
                                     static_cast<std::size_t>(query_heads) * sizeof(float));
    if (!logits) return tl::unexpected<Failure>(logits.error());
    return Sinks(device, layers, query_heads, std::move(*logits));
}

Sinks::Sinks(Device& device, int layers, int query_heads, Buffer logits)
    : device_(&device),
      query_heads_(query_heads),
      logits_(std::move(logits)),
      set_(static_cast<std::size_t>(layers), false) {}

Result<void> Sinks::checkLayer(int layer) const {
    const auto layers = static_cast<int>(set_.size());
    if (layer >= 0 && layer < layers) return {};
    return failure(
        ErrorCode::invalid_argument,
        "layer " + std::to_string(layer) + " is not in [0, " + std::to_string(layers) + ")");
}

Result<void> Sinks::set(int layer, std::span<const float> logits, StreamView stream) {
    const auto refused = [layer](const std::string& why) {
        return failure(ErrorCode::invalid_argument,
                       "sinks of layer " + std::to_string(layer) + ": " + why);
    };
    if (set_.empty()) return refused("the cache was configured without attention sinks");
    if (Result<void> checked = checkLayer(layer); !checked) return checked;
    if (logits.size() != static_cast<std::size_t>(query_heads_)) {
        return refused(std::to_string(logits.size()) + " logits for " +
                       std::to_string(query_heads_) + " query heads");
    }
    for (std::size_t head = 0; head < logits.size(); ++head) {
        if (std::isnan(logits[head]) || logits[head] == HUGE_VALF) {
            return refused("logit " + std::to_string(head) + " is " + std::to_string(logits[head]));
        }
    }
    device_->copy(logits_.as<float>() + std::ptrdiff_t{layer} * query_heads_, logits.data(),
                  logits.size_bytes(), stream);
    set_[static_cast<std::size_t>(layer)] = true;
    return {};
}

Result<const float*> Sinks::of(int layer) const {
    if (set_.empty()) return nullptr;
    if (Result<void> checked = checkLayer(layer); !checked)
        return tl::unexpected<Failure>(checked.error());
    if (!set_[static_cast<std::size_t>(layer)]) {
        return failure(ErrorCode::invalid_argument,
                       "the sinks of layer " + std::to_string(layer) + " were never set");
    }
    return logits_.as<const float>() + std::ptrdiff_t{layer} * query_heads_;
}

}  // namespace kvgrid
