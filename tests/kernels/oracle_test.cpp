// The oracle itself: values worked out by hand, and the scaling bands by another formula.
#include "launch/oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>

namespace kvgrid::oracle {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

TEST(OracleTest, AttentionOfTwoTokensByHand) {
    // Scores 2 ln 3 / 2 = ln 3 and 0: weights 3/4 and 1/4.
    const std::vector<double> q{std::log(3.0), 5.0};
    const std::vector<double> k{2.0, 0.0, 0.0, 0.0};
    const std::vector<double> v{1.0, 10.0, 5.0, -30.0};
    const State state = attention(q, k, v, 0.5);
    EXPECT_NEAR(state.out[0], 0.75 * 1 + 0.25 * 5, 1e-14);
    EXPECT_NEAR(state.out[1], 0.75 * 10 - 0.25 * 30, 1e-14);
    EXPECT_NEAR(state.lse, std::log(4.0), 1e-14);
}

TEST(OracleTest, OneTokenAndNone) {
    const std::vector<double> q{1.0, 2.0};
    const std::vector<double> k{3.0, -1.0};
    const std::vector<double> v{0.25, 7.0};
    const State one = attention(q, k, v, 2.0);
    EXPECT_EQ(one.out, v);
    EXPECT_EQ(one.lse, 2.0);
    const State none = attention(q, {}, {}, 2.0);
    EXPECT_EQ(none.out, (std::vector<double>{0.0, 0.0}));
    EXPECT_EQ(none.lse, -infinity);
}

TEST(OracleTest, SoftcapByHand) {
    // Scores of 2 artanh(1/2) = ln 3 and of -inf under a cap of 2: 1 and -2.
    const std::vector<double> q{1.0};
    const std::vector<double> k{std::log(3.0), -1e300};
    const std::vector<double> v{1.0, 0.0};
    const State state = attention(q, k, v, 1.0, {.softcap = 2.0});
    EXPECT_NEAR(state.out[0], 1.0 / (1.0 + std::exp(-3.0)), 1e-14);
    EXPECT_NEAR(state.lse, std::log(std::exp(1.0) + std::exp(-2.0)), 1e-14);
    // The scale comes first.
    EXPECT_NEAR(attention(q, k, v, 0.5, {.softcap = 1.0}).lse,
                std::log(std::exp(0.5) + std::exp(-1.0)), 1e-14);
}

TEST(OracleTest, ASinkJoinsTheSumOnly) {
    const std::vector<double> q{1.0};
    const std::vector<double> k{0.0, std::log(2.0)};
    const std::vector<double> v{3.0, 6.0};
    const State state = attention(q, k, v, 1.0, {.sink = std::log(5.0)});
    EXPECT_NEAR(state.out[0], (1 * 3.0 + 2 * 6.0) / 8, 1e-14);
    EXPECT_NEAR(state.lse, std::log(8.0), 1e-14);
    const State alone = attention(q, {}, {}, 1.0, {.sink = 7.0});
    EXPECT_EQ(alone.out[0], 0.0);
    EXPECT_EQ(alone.lse, 7.0);
    EXPECT_EQ(attention(q, k, v, 1.0, {.sink = 1e6}).out[0], 0.0);
    // Neither scaled nor capped.
    EXPECT_NEAR(attention(q, k, v, 0.5, {.softcap = 1.0, .sink = 40.0}).lse, 40.0, 1e-14);
}

TEST(OracleTest, LargeScoresDoNotOverflow) {
    const std::vector<double> q{1.0};
    const std::vector<double> k{1e5, 1e5, -1e5};
    const std::vector<double> v{1.0, 3.0, 1000.0};
    const State state = attention(q, k, v, 1.0);
    EXPECT_EQ(state.out[0], 2.0);
    EXPECT_NEAR(state.lse, 1e5 + std::numbers::ln2, 1e-10);
    const State negative =
        attention(q, std::vector<double>{-1e6, -1e6}, std::vector<double>{1.0, 3.0}, 1.0);
    EXPECT_EQ(negative.out[0], 2.0);
    EXPECT_NEAR(negative.lse, -1e6 + std::numbers::ln2, 1e-9);
}

TEST(OracleTest, QuantisedByHand) {
    EXPECT_EQ(rounded(17.0, Format::e4m3), 16.0);  // a tie, to even
    EXPECT_EQ(rounded(19.0, Format::e4m3), 20.0);  // likewise
    EXPECT_EQ(rounded(0x1p-10, Format::e4m3), 0.0);
    EXPECT_EQ(rounded(0x1.8p-9, Format::e4m3), 0x1p-8);
    EXPECT_EQ(rounded(464.0, Format::e4m3), 448.0);
    EXPECT_TRUE(std::isnan(rounded(465.0, Format::e4m3)));
    EXPECT_EQ(rounded(-2.5, Format::int8), -2.0);
    EXPECT_FALSE(std::signbit(rounded(-0.5, Format::int8)));

    const ScaledRow even = quantised(std::vector<float>{-254.0F, 3.0F, 0.9F}, Format::int8);
    EXPECT_EQ(even.scale, 2.0);
    EXPECT_EQ(even.numbers, (std::vector<double>{-127.0, 2.0, 0.0}));
    EXPECT_EQ(even.worth(0), -254.0);
    // 1 / 448 is 1170.3 x 2^-19, of which fp16 holds the integers.
    const ScaledRow up = quantised(std::vector<float>{1.0F, 0.0F}, Format::e4m3);
    EXPECT_EQ(up.scale, 1171 * 0x1p-19);
    EXPECT_EQ(up.numbers[0], 448.0);
    EXPECT_EQ(quantised(std::vector<float>{0.0F, -0.0F}, Format::int8).scale, 0x1p-24);
    EXPECT_EQ(quantised(std::vector<float>{1e30F}, Format::e4m3).scale, infinity);
    EXPECT_TRUE(std::isnan(quantised(std::vector<float>{1e30F, 1.0F}, Format::e4m3).worth(1)));
    const ScaledRow broken = quantised(std::vector<float>{1.0F, std::nanf(""), 2.0F}, Format::int8);
    EXPECT_TRUE(std::isnan(broken.scale));
    EXPECT_EQ(broken.numbers, (std::vector<double>{0.0, 0.0, 0.0}));
}

TEST(OracleTest, QuantisedWithAFixedScaleByHand) {
    const ScaledRow row = quantised(std::vector<float>{-254.0F, 3.0F, 0.9F}, Format::int8, 0.5);
    EXPECT_EQ(row.scale, 0.5);
    EXPECT_EQ(row.numbers, (std::vector<double>{-127.0, 6.0, 2.0}));
    EXPECT_EQ(row.worth(0), -63.5);
    // 1e-3 is 1048.576 x 2^-20, of which fp16 holds the integers.
    const ScaledRow fp16 = quantised(std::vector<float>{1.0F, 1e-3F, -9e9F}, Format::e4m3, 1e-3);
    EXPECT_EQ(fp16.scale, 1049 * 0x1p-20);
    EXPECT_EQ(fp16.numbers, (std::vector<double>{448.0, 1.0, -448.0}));
    for (const float wrong : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
        const ScaledRow broken = quantised(std::vector<float>{1.0F, wrong}, Format::e4m3, 1.0);
        EXPECT_TRUE(std::isnan(broken.worth(0)));
        EXPECT_TRUE(std::isnan(broken.worth(1)));
    }
}

TEST(OracleTest, RoundedByHand) {
    EXPECT_EQ(rounded(1.0 + 0x1p-11, Format::fp16), 1.0);               // a tie, to even
    EXPECT_EQ(rounded(1.0 + 3 * 0x1p-11, Format::fp16), 1.0 + 0x1p-9);  // a tie, to even
    EXPECT_EQ(rounded(1.0 + 0x1.0001p-11, Format::fp16), 1.0 + 0x1p-10);
    EXPECT_EQ(rounded(65519.0, Format::fp16), 65504.0);
    EXPECT_EQ(rounded(65520.0, Format::fp16), infinity);
    EXPECT_EQ(rounded(-1e300, Format::fp16), -infinity);
    EXPECT_EQ(rounded(0x1p-24, Format::fp16), 0x1p-24);
    EXPECT_EQ(rounded(0x1p-25, Format::fp16), 0.0);
    EXPECT_EQ(rounded(0x1.8p-24, Format::fp16), 0x1p-23);
    EXPECT_EQ(rounded(1.0 + 0x1p-8, Format::bf16), 1.0);
    EXPECT_EQ(rounded(1.0 + 3 * 0x1p-8, Format::bf16), 1.0 + 0x1p-6);
    EXPECT_EQ(rounded(std::numbers::pi, Format::bf16), 3.140625);
    EXPECT_EQ(rounded(0.1, Format::fp32), static_cast<double>(0.1F));
    EXPECT_EQ(rounded(0x1p-133, Format::bf16), 0x1p-133);
    EXPECT_TRUE(std::signbit(rounded(-0.0, Format::bf16)));
    EXPECT_TRUE(std::isnan(rounded(std::nan(""), Format::fp16)));
    EXPECT_EQ(rounded(infinity, Format::bf16), infinity);
}

TEST(OracleTest, RotateByHand) {
    // dim 2: one pair, frequency 1. Position 1 turns (1, 0) by one radian.
    std::vector<float> head{1.0F, 0.0F, 9.0F};
    rotate(head, 1, {.dim = 2});
    EXPECT_EQ(head[0], static_cast<float>(std::cos(1.0)));
    EXPECT_EQ(head[1], static_cast<float>(std::sin(1.0)));
    EXPECT_EQ(head[2], 9.0F);  // beyond the rotated part
    // dim 4, theta 10000: frequencies 1 and 1/100; element i pairs with i + 2.
    head = {1.0F, 2.0F, 3.0F, 4.0F};
    rotate(head, 50, {.dim = 4});
    EXPECT_NEAR(head[0], 1 * std::cos(50.0) - 3 * std::sin(50.0), 1e-6);
    EXPECT_NEAR(head[1], 2 * std::cos(0.5) - 4 * std::sin(0.5), 1e-6);
    EXPECT_NEAR(head[2], 3 * std::cos(50.0) + 1 * std::sin(50.0), 1e-6);
    EXPECT_NEAR(head[3], 4 * std::cos(0.5) + 2 * std::sin(0.5), 1e-6);
    const std::vector<float> before = head;
    rotate(head, 0, {.dim = 4});
    EXPECT_EQ(head, before);
    rotate(head, 77, {.dim = 0});
    EXPECT_EQ(head, before);
}

// Where (1, 0) of a pair goes at position 1: its angle, and its length.
struct Turned {
    double angle, length;
};
Turned turned(int pair, const Rotary& rotary) {
    std::vector<float> head(static_cast<std::size_t>(rotary.dim), 0.0F);
    head[static_cast<std::size_t>(pair)] = 1.0F;
    rotate(head, 1, rotary);
    const double x = head[static_cast<std::size_t>(pair)];
    const double y = head[static_cast<std::size_t>(pair + rotary.dim / 2)];
    return {std::atan2(y, x), std::hypot(x, y)};
}

struct Bands {
    int kept = 0, blended = 0, slowed = 0;
    friend bool operator==(const Bands&, const Bands&) = default;
};

// Checks every pair's angle against frequency x (share + (1 - share) / factor), and counts.
template <typename ShareOf>
Bands checkBands(const Rotary& rotary, const ShareOf& share_of) {
    Bands bands;
    for (int pair = 0; pair < rotary.dim / 2; ++pair) {
        const double frequency = std::exp(-2 * std::log(rotary.theta) * pair / rotary.dim);
        const double share = share_of(pair, frequency);
        const Turned to = turned(pair, rotary);
        EXPECT_NEAR(to.angle / (frequency * (share + (1.0 - share) / rotary.factor)), 1.0, 1e-6)
            << "pair " << pair;
        EXPECT_NEAR(to.length, rotary.attention_factor, 1e-6) << "pair " << pair;
        ++(share == 1.0 ? bands.kept : share == 0.0 ? bands.slowed : bands.blended);
    }
    return bands;
}

TEST(OracleTest, PlainAndLinear) {
    const Rotary plain{.dim = 128, .theta = 500000.0};
    EXPECT_EQ(checkBands(plain, [](int, double) { return 1.0; }), (Bands{.kept = 64}));
    const Rotary linear{
        .dim = 128, .theta = 500000.0, .scaling = Rotary::Scaling::linear, .factor = 8.0};
    EXPECT_EQ(checkBands(linear, [](int, double) { return 0.0; }), (Bands{.slowed = 64}));
}

// Llama 3.1's bands: wavelengths below 8192 / 4 stay, above 8192 / 1 grow eightfold, and between
// them the frequency is blended linearly in (turns within the original context), from 1 to 4 turns.
TEST(OracleTest, Llama3ScalingBands) {
    const Rotary scaled{
        .dim = 128, .theta = 500000.0, .scaling = Rotary::Scaling::llama3, .factor = 8.0};
    const Bands bands = checkBands(scaled, [](int, double frequency) {
        const double turns = 8192.0 * frequency / (2.0 * std::numbers::pi);
        return std::min(1.0, std::max(0.0, (turns - 1.0) / 3.0));
    });
    // The model's known split.
    EXPECT_EQ(bands, (Bands{.kept = 29, .blended = 6, .slowed = 29}));
}

// YaRN as gpt-oss has it, whose own code writes the bounds as d / 2 x log(context / (beta 2 pi)) /
// log(base): 8.09 for 32 turns and 17.40 for 1.
TEST(OracleTest, YarnScalingBands) {
    Rotary scaled{.dim = 64,
                  .theta = 150000.0,
                  .scaling = Rotary::Scaling::yarn,
                  .factor = 32.0,
                  .slow_turns = 1.0,
                  .fast_turns = 32.0,
                  .original_max_position = 4096.0,
                  .attention_factor = 1.3465735902799727};
    const Bands split{.kept = 9, .blended = 9, .slowed = 14};
    const auto shareBetween = [](double begin, double end) {
        return [=](int pair, double) {
            return std::min(1.0, std::max(0.0, (end - pair) / (end - begin)));
        };
    };
    EXPECT_EQ(checkBands(scaled, shareBetween(8.0927791, 17.3980245)), split);
    scaled.whole_pairs = true;
    EXPECT_EQ(checkBands(scaled, shareBetween(8.0, 18.0)), split);
    // From the first pair on where even it makes too few turns, and to dim - 1, beyond the last.
    scaled.original_max_position = 128.0;
    EXPECT_EQ(checkBands(scaled, shareBetween(0.0, 9.0)).blended, 8);
    // With no pair between them the ramp is a step.
    scaled.original_max_position = 6.0;
    EXPECT_EQ(checkBands(scaled, [](int pair, double) { return pair == 0 ? 1.0 : 0.0; }),
              (Bands{.kept = 1, .slowed = 31}));
    scaled.original_max_position = 250.0;
    scaled.theta = 2.0;
    EXPECT_EQ(checkBands(scaled, shareBetween(10.0, 63.0)), (Bands{.kept = 11, .blended = 21}));
}

TEST(OracleTest, RelativeError) {
    const std::vector<double> reference{3.0, 4.0};
    EXPECT_EQ(relativeError(std::vector<float>{3.0F, 4.0F}, reference), 0.0);
    EXPECT_EQ(relativeError(std::vector<float>{3.0F, 4.5F}, reference), 0.1);
    EXPECT_EQ(relativeError(std::vector<float>{0.0F, 0.0F}, reference), 1.0);
    EXPECT_EQ(relativeError(std::vector<float>{0.0F, 0.0F}, std::vector<double>{0.0, 0.0}), 0.0);
    EXPECT_EQ(relativeError(std::vector<float>{0.0F, 1e-30F}, std::vector<double>{0.0, 0.0}),
              infinity);
    EXPECT_EQ(relativeError(std::vector<float>{3.0F, std::nanf("")}, reference), infinity);
    EXPECT_EQ(relativeError(std::vector<float>{3.0F, INFINITY}, reference), infinity);
    EXPECT_EQ(relativeError(std::vector<float>{3.0F}, reference), infinity);
}

}  // namespace
}  // namespace kvgrid::oracle
