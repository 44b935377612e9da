// The cosines and sines that a rotary embedding rotates by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvgrid/config.h>

namespace kvgrid {

class RotaryAngles {
public:
    explicit RotaryAngles(const RotaryEmbedding& rotary);

    // Pairs of elements that turn together: rotary dim / 2.
    [[nodiscard]] std::size_t pairs() const noexcept { return inverse_frequencies_.size(); }

    // Of one position, [pairs] each: the cosine and sine of fp64(position) x inverse frequency,
    // times the attention factor, rounded to fp32 at the end.
    void at(std::int64_t position, float* cosines, float* sines) const;

private:
    std::vector<double> inverse_frequencies_;  // [pairs], scaled
    double attention_factor_;
};

}  // namespace kvgrid
