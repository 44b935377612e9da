#include "launch/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

namespace kvgrid::oracle {
namespace {

// A binary format by its numbers: `precision` significant bits (the hidden one included) and the
// exponents of its smallest normal and largest finite binade.
struct BinaryFormat {
    int precision;
    int smallest_exponent;
    int largest_exponent;
};

constexpr BinaryFormat fp32{24, -126, 127};
constexpr BinaryFormat fp16{11, -14, 15};
constexpr BinaryFormat bf16{8, -126, 127};
constexpr BinaryFormat e4m3{4, -6, 8};
constexpr double largest_e4m3 = 448.0;
constexpr double largest_int8 = 127.0;

double toNearest(double value) {
    return std::nearbyint(value);
}
double upwards(double value) {
    return std::ceil(value);
}

double roundedTo(double value, const BinaryFormat& format,
                 double (*to_integer)(double) = toNearest) {
    if (value == 0.0 || !std::isfinite(value)) return value;
    int exponent = 0;
    std::frexp(value, &exponent);  // |value| in [2^(exponent - 1), 2^exponent)
    const int unit = std::max(exponent - 1, format.smallest_exponent) - (format.precision - 1);
    const double result = std::ldexp(to_integer(std::ldexp(value, -unit)), unit);
    if (std::fabs(result) >= std::ldexp(1.0, format.largest_exponent + 1))
        return std::copysign(std::numeric_limits<double>::infinity(), value);
    return result;
}

// How much of its pace pair i keeps, in [0, 1].
double keptShare(int i, double plain, const Rotary& rotary) {
    switch (rotary.scaling) {
    case Rotary::Scaling::none:
        return 1.0;
    case Rotary::Scaling::linear:
        return 0.0;
    case Rotary::Scaling::llama3: {
        const double turns = rotary.original_max_position * plain / (2.0 * std::numbers::pi);
        if (turns > rotary.fast_turns) return 1.0;
        if (turns < rotary.slow_turns) return 0.0;
        return (turns - rotary.slow_turns) / (rotary.fast_turns - rotary.slow_turns);
    }
    case Rotary::Scaling::yarn:
        break;
    }
    // turns = original_max_position theta^(-2 pair / dim) / 2 pi, solved for the pair.
    const auto pair_that_turns = [&rotary](double turns) {
        return rotary.dim *
               std::log(rotary.original_max_position / (turns * 2.0 * std::numbers::pi)) /
               (2.0 * std::log(rotary.theta));
    };
    double begin = pair_that_turns(rotary.fast_turns);
    double end = pair_that_turns(rotary.slow_turns);
    if (rotary.whole_pairs) {
        begin = std::floor(begin);
        end = std::ceil(end);
    }
    if (begin < 0.0) begin = 0.0;
    if (end > rotary.dim - 1.0) end = rotary.dim - 1.0;
    if (begin == end) end += 0.001;
    const double ramp = (i - begin) / (end - begin);
    if (ramp < 0.0) return 1.0;
    return ramp > 1.0 ? 0.0 : 1.0 - ramp;
}

// Radians that elements i and i + dim / 2 turn per position.
double inverseFrequency(int i, const Rotary& rotary) {
    const double plain = std::pow(rotary.theta, -2.0 * i / rotary.dim);
    const double kept = keptShare(i, plain, rotary);
    return (1.0 - kept) * plain / rotary.factor + kept * plain;
}

}  // namespace

double rounded(double value, Format format) {
    switch (format) {
    case Format::fp16:
        return roundedTo(value, fp16);
    case Format::bf16:
        return roundedTo(value, bf16);
    case Format::e4m3: {
        const double result = roundedTo(value, e4m3);
        return std::fabs(result) <= largest_e4m3 ? result : std::nan("");
    }
    case Format::int8:
        return std::nearbyint(value) + 0.0;  // there is no -0
    case Format::fp32:
        break;
    }
    return roundedTo(value, fp32);
}

ScaledRow quantised(std::span<const float> row, Format format, std::optional<double> fixed_scale) {
    double amax = 0.0;
    for (const float x : row)
        if (!(std::fabs(x) <= amax)) amax = std::isnan(amax) ? amax : std::fabs(double{x});
    const double largest = format == Format::e4m3 ? largest_e4m3 : largest_int8;
    const double least = 0x1p-24;
    double scale = roundedTo(roundedTo(amax / largest, fp32), fp16, upwards);
    if (scale < least) scale = least;
    if (fixed_scale && std::isfinite(amax)) scale = roundedTo(*fixed_scale, fp16);
    ScaledRow result{scale, {}};
    for (const float x : row) {
        const double quotient = roundedTo(x / result.scale, fp32);
        const double number =
            std::fabs(quotient) > largest ? std::copysign(largest, quotient) : quotient;
        result.numbers.push_back(std::isnan(number) ? 0.0 : rounded(number, format));
    }
    return result;
}

void rotate(std::span<float> head, std::int64_t position, const Rotary& rotary) {
    const int half = rotary.dim / 2;
    for (int i = 0; i < half; ++i) {
        const double angle = static_cast<double>(position) * inverseFrequency(i, rotary);
        const auto cosine = static_cast<float>(std::cos(angle) * rotary.attention_factor);
        const auto sine = static_cast<float>(std::sin(angle) * rotary.attention_factor);
        const auto low = static_cast<std::size_t>(i);
        const auto high = low + static_cast<std::size_t>(half);
        // volatile: each product is rounded to fp32 by itself, whatever this file is compiled with.
        const volatile float low_cosine = head[low] * cosine;
        const volatile float low_sine = head[low] * sine;
        const volatile float high_cosine = head[high] * cosine;
        const volatile float high_sine = head[high] * sine;
        head[low] = low_cosine - high_sine;
        head[high] = high_cosine + low_sine;
    }
}

State attention(std::span<const double> q, std::span<const double> k, std::span<const double> v,
                double scale, const ScoreTerms& terms) {
    const std::size_t head_dim = q.size();
    const std::size_t tokens = k.size() / head_dim;
    State state{std::vector<double>(head_dim, 0.0), terms.sink};
    if (tokens == 0) return state;

    std::vector<double> weights(tokens);
    for (std::size_t t = 0; t < tokens; ++t) {
        double dot = 0.0;
        for (std::size_t d = 0; d < head_dim; ++d)
            dot += q[d] * k[t * head_dim + d];
        weights[t] = dot * scale;
        if (terms.softcap != 0.0)
            weights[t] = terms.softcap * std::tanh(weights[t] / terms.softcap);
    }
    const double top = std::max(terms.sink, *std::max_element(weights.begin(), weights.end()));
    double sum = std::exp(terms.sink - top);
    for (double& weight : weights) {
        weight = std::exp(weight - top);
        sum += weight;
    }
    for (std::size_t t = 0; t < tokens; ++t)
        for (std::size_t d = 0; d < head_dim; ++d)
            state.out[d] += weights[t] / sum * v[t * head_dim + d];
    state.lse = top + std::log(sum);
    return state;
}

double relativeError(std::span<const float> x, std::span<const double> reference) {
    constexpr double infinite = std::numeric_limits<double>::infinity();
    if (x.size() != reference.size()) return infinite;
    double error = 0.0;
    double norm = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double difference = static_cast<double>(x[i]) - reference[i];
        error += difference * difference;
        norm += reference[i] * reference[i];
    }
    if (error == 0.0) return 0.0;
    const double relative = std::sqrt(error / norm);
    return std::isnan(relative) ? infinite : relative;
}

}  // namespace kvgrid::oracle
