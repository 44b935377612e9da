// Attention in fp64 from its definition. Standard library only; calls nothing of the product, so
// that an error in the product cannot hide here.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

namespace kvgrid::oracle {

// The formats, as the definition of a stored value: round to nearest, ties to even. e4m3 is NaN
// above 448, int8 any integer.
enum class Format { fp32, fp16, bf16, e4m3, int8 };
[[nodiscard]] double rounded(double value, Format format);

// A row as e4m3 or int8 store it: element i is worth numbers[i] * scale. Defined by fp32
// arithmetic: the scale is the largest |x| / the format's largest number (448 or 127), rounded to
// fp32 and then up to fp16, at least 2^-24; a number is x / scale, rounded to fp32 and then to the
// format, and 0 where that is NaN. So a row whose scale is infinite, or NaN for a NaN in it, has
// zeros, worth NaN. With a fixed scale, which a checkpoint may have, the scale is that one rounded
// to fp16, whatever the row has, as long as all of it is finite; quotients beyond the format's
// largest number become it.
struct ScaledRow {
    double scale;
    std::vector<double> numbers;

    [[nodiscard]] double worth(std::size_t i) const { return numbers[i] * scale; }
};
[[nodiscard]] ScaledRow quantised(std::span<const float> row, Format format,
                                  std::optional<double> fixed_scale = std::nullopt);

// Rotary position embedding, "rotate half" pairing (Su et al., arXiv 2104.09864), and how it is
// stretched: not, evenly, as Llama 3.1 does, or as YaRN does (Peng et al., arXiv 2309.00071).
struct Rotary {
    enum class Scaling { none, linear, llama3, yarn };

    int dim = 0;  // 0: none
    double theta = 10000.0;
    Scaling scaling = Scaling::none;
    double factor = 1.0;
    // llama3, yarn: pairs that make fewer turns within the original context than the first are
    // slowed by the factor, pairs that make more than the second keep their pace.
    double slow_turns = 1.0;
    double fast_turns = 4.0;
    double original_max_position = 8192.0;
    bool whole_pairs = false;       // yarn: between them the ramp is from whole pair to whole pair
    double attention_factor = 1.0;  // of cos and sin
};

// Rotates one head in place. Stored values are defined by fp32 arithmetic (cos and sin are the fp64
// values of position x inverse frequency, times attention_factor, each operation rounded to fp64,
// then rounded to fp32; one multiplication each, then one addition, no fused operations), because
// the rounding of a stored K to 16 bits depends on it.
void rotate(std::span<float> head, std::int64_t position, const Rotary& rotary);

struct State {
    std::vector<double> out;  // [head_dim]
    // Natural logarithm of the sum of exponentials, sink included; -inf of nothing.
    double lse;
};

// What some models do to scores besides scaling them.
struct ScoreTerms {
    // A score becomes softcap * tanh(score / softcap); 0: none (Gemma 2, arXiv 2408.00118).
    double softcap = 0.0;
    // A logit that joins the softmax and weighs no value; -inf: none (gpt-oss, arXiv 2508.10925).
    double sink = -std::numeric_limits<double>::infinity();
};

// One query head over `tokens` keys and values.
//   q [head_dim], k and v [tokens, head_dim], scale multiplies q.k
[[nodiscard]] State attention(std::span<const double> q, std::span<const double> k,
                              std::span<const double> v, double scale,
                              const ScoreTerms& terms = {});

// ||x - reference|| / ||reference||; infinite when x has a NaN; 0 for two zero vectors.
[[nodiscard]] double relativeError(std::span<const float> x, std::span<const double> reference);

}  // namespace kvgrid::oracle
