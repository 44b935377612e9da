#include "shard/rotary_angles.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <variant>

namespace kvgrid {

namespace {

// What the scalings have in common: a pair keeps a share of its frequency, in [0, 1], and has the
// rest divided by the scaling's factor. `plain` is the frequency without scaling.
struct Pair {
    const RotaryEmbedding& rotary;
    double index;
    double plain;

    [[nodiscard]] double scaled(double kept, double factor) const {
        return (1.0 - kept) * plain / factor + kept * plain;
    }

    double operator()(std::monostate) const { return plain; }

    double operator()(const LinearScaling& scaling) const { return scaled(0.0, scaling.factor); }

    double operator()(const Llama3Scaling& scaling) const {
        const double turns = scaling.original_max_position * plain / (2.0 * std::numbers::pi);
        const double kept = (turns - scaling.low_freq_factor) /
                            (scaling.high_freq_factor - scaling.low_freq_factor);
        return scaled(std::clamp(kept, 0.0, 1.0), scaling.factor);
    }

    double operator()(const YarnScaling& scaling) const {
        double first = pairOfTurns(scaling.beta_fast, scaling.original_max_position);
        double last = pairOfTurns(scaling.beta_slow, scaling.original_max_position);
        if (scaling.truncate) {
            first = std::floor(first);
            last = std::ceil(last);
        }
        first = std::max(first, 0.0);
        last = std::min(last, rotary.dim - 1.0);
        if (first == last) last += 0.001;
        return scaled(1.0 - std::clamp((index - first) / (last - first), 0.0, 1.0), scaling.factor);
    }

    // Which pair, as a real number, turns so often within so many positions.
    [[nodiscard]] double pairOfTurns(double turns, double positions) const {
        return rotary.dim * std::log(positions / (turns * 2.0 * std::numbers::pi)) /
               (2.0 * std::log(rotary.theta));
    }
};

double attentionFactor(const RotaryScaling& scaling) {
    const auto* yarn = std::get_if<YarnScaling>(&scaling);
    if (yarn == nullptr) return 1.0;
    if (yarn->attention_factor != 0.0) return yarn->attention_factor;
    return yarn->factor > 1.0 ? 0.1 * std::log(yarn->factor) + 1.0 : 1.0;
}

}  // namespace

RotaryAngles::RotaryAngles(const RotaryEmbedding& rotary)
    : attention_factor_(attentionFactor(rotary.scaling)) {
    for (int i = 0; i < rotary.dim / 2; ++i) {
        const Pair pair{rotary, static_cast<double>(i),
                        std::pow(rotary.theta, -2.0 * i / rotary.dim)};
        inverse_frequencies_.push_back(std::visit(pair, rotary.scaling));
    }
}

void RotaryAngles::at(std::int64_t position, float* cosines, float* sines) const {
    for (std::size_t i = 0; i < pairs(); ++i) {
        const double angle = static_cast<double>(position) * inverse_frequencies_[i];
        cosines[i] = static_cast<float>(std::cos(angle) * attention_factor_);
        sines[i] = static_cast<float>(std::sin(angle) * attention_factor_);
    }
}

}  // namespace kvgrid
