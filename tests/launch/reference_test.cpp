// What verify and bench hold outputs against: right values pass, wrong ones are seen.
#include "launch/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <tuple>

#include "launch/spot_check.h"

namespace kvgrid::launch {
namespace {

constexpr int kv_heads = 2;
constexpr int query_heads = 6;
constexpr int head_dim = 64;

CacheConfig config() {
    CacheConfig made;
    made.geometry = Geometry::uniform(3, query_heads, kv_heads, head_dim);
    made.rotary = {.dim = head_dim, .theta = 10000.0, .scaling = Llama3Scaling{}};
    return made;
}

// The bits of a bf16 value.
std::uint16_t bits(double value) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >>
                                      16);
}

TEST(Reference, FirstTokenIsItsOwnValue) {
    const Reference reference(config(), 5);
    const Unit unit{.layer = 1, .key = 2, .kv_head = 1};
    const auto stored = reference.keysValues(unit, 0, 3);
    const auto out = reference.attend(unit, stored, 4, 0);
    for (std::size_t i = 0; i < out.size(); ++i)
        EXPECT_EQ(out[i], stored.v[i]);
}

TEST(Reference, LaterTokensAreNotSeen) {
    const Reference reference(config(), 5);
    const Unit unit{.layer = 0, .key = 0, .kv_head = 0};
    auto stored = reference.keysValues(unit, 0, 8);
    const auto before = reference.attend(unit, stored, 1, 4);
    std::fill(stored.v.begin() + 5 * head_dim, stored.v.end(),
              std::numeric_limits<double>::quiet_NaN());
    EXPECT_EQ(reference.attend(unit, stored, 1, 4), before);
}

// A softcap near 0 makes all scores 0: three tokens weigh 1 each, and the head's sink its own.
TEST(Reference, SoftcapAndSinksCount) {
    const Unit unit{.layer = 1, .key = 2, .kv_head = 1};
    CacheConfig capped = config();
    capped.logit_softcap = 1e-9;
    for (const bool sinks : {false, true}) {
        capped.attention_sinks = sinks;
        const Reference reference(capped, 5);
        const auto stored = reference.keysValues(unit, 0, 3);
        for (const int head : {3, 5}) {
            const double sink = Workload(5, capped.input_format, head_dim).sink(1, head);
            const auto out = reference.attend(unit, stored, head, 2);
            for (std::size_t i = 0; i < out.size(); ++i) {
                const double sum =
                    stored.v[i] + stored.v[i + head_dim] + stored.v[i + 2 * head_dim];
                EXPECT_NEAR(out[i], sum / (3 + (sinks ? std::exp(sink) : 0)), 1e-8);
            }
        }
    }
}

// Layers 0 and 2 see all; layer 1 sees 3 tokens, with an embedding of its own.
CacheConfig windows() {
    CacheConfig made = config();
    made.geometry.groups.push_back(made.geometry.groups.front());
    made.geometry.groups[0].layers = {0, 2};
    made.geometry.groups[1].layers = {1};
    made.geometry.groups[1].window = 3;
    made.geometry.groups[1].rotary = RotaryEmbedding{.dim = 32, .theta = 5.0, .scaling = {}};
    return made;
}

TEST(Reference, TokensBehindTheWindowAreNotSeen) {
    const Reference reference(windows(), 5);
    EXPECT_EQ(reference.firstSeen(0, 100), 0);
    EXPECT_EQ(reference.firstSeen(1, 100), 98);
    EXPECT_EQ(reference.firstSeen(1, 3), 1);
    EXPECT_EQ(reference.firstSeen(1, 2), 0);
    EXPECT_EQ(reference.firstSeen(1, 0), 0);

    const Unit unit{.layer = 1, .key = 0, .kv_head = 0};
    auto stored = reference.keysValues(unit, 0, 8);
    const auto before = reference.attend(unit, stored, 1, 4);
    // The oracle over the three tokens alone.
    const auto three = reference.keysValues(unit, 2, 5);
    EXPECT_EQ(three.k,
              std::vector(stored.k.begin() + 2 * head_dim, stored.k.begin() + 5 * head_dim));
    EXPECT_EQ(reference.attend(unit, three, 1, 4), before);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    std::fill(stored.v.begin(), stored.v.begin() + 2 * head_dim, nan);
    std::fill(stored.v.begin() + 5 * head_dim, stored.v.end(), nan);
    EXPECT_EQ(reference.attend(unit, stored, 1, 4), before);
    stored.v[2 * head_dim] = nan;
    EXPECT_TRUE(std::isnan(reference.attend(unit, stored, 1, 4)[0]));
}

TEST(Reference, LayersRotateAsTheirGroupDoes) {
    CacheConfig own = config();
    own.rotary = *windows().geometry.groups[1].rotary;
    for (const int layer : {0, 1, 2}) {
        const Unit unit{.layer = layer, .key = 0, .kv_head = 0};
        const Reference expected(layer == 1 ? own : config(), 5);
        EXPECT_EQ(Reference(windows(), 5).keysValues(unit, 0, 50).k,
                  expected.keysValues(unit, 0, 50).k)
            << layer;
    }
}

TEST(Reference, KeysAreRotatedButNormsStay) {
    const Reference reference(config(), 5);
    CacheConfig plain = config();
    plain.rotary = {};
    const Reference unrotated(plain, 5);
    const Unit unit{.layer = 2, .key = 1, .kv_head = 0};
    const auto turned = reference.keysValues(unit, 0, 100);
    const auto original = unrotated.keysValues(unit, 0, 100);
    EXPECT_EQ(turned.v, original.v);
    EXPECT_TRUE(std::equal(turned.k.begin(), turned.k.begin() + head_dim, original.k.begin()));
    double turned_norm = 0;
    double original_norm = 0;
    for (std::size_t i = 99 * head_dim; i < turned.k.size(); ++i) {
        turned_norm += turned.k[i] * turned.k[i];
        original_norm += original.k[i] * original.k[i];
        EXPECT_EQ(turned.k[i], oracle::rounded(turned.k[i], oracle::Format::bf16));
    }
    EXPECT_NE(turned.k, original.k);
    EXPECT_NEAR(turned_norm / original_norm, 1, 0.01);
}

TEST(Reference, CountsDifferingElements) {
    const Reference reference(config(), 5);
    const Unit unit{.layer = 0, .key = 0, .kv_head = 1};
    constexpr int tokens = 5;
    const auto expected = reference.keysValues(unit, 0, tokens).k;
    std::vector<std::uint16_t> stored(tokens * kv_heads * head_dim, 0x7fc0);  // NaN
    for (std::size_t i = 0; i < expected.size(); ++i)
        stored[i / head_dim * kv_heads * head_dim + head_dim + i % head_dim] = bits(expected[i]);
    EXPECT_EQ(reference.countDifferences(stored, kv_heads, 1, expected), 0);
    EXPECT_EQ(reference.countDifferences(stored, kv_heads, 0, expected), tokens * head_dim);
    stored.back() ^= 1;
    EXPECT_EQ(reference.countDifferences(stored, kv_heads, 1, expected), 1);
}

// A row has 127 steps either way of one size, which fp16 holds; nothing is off by more than half
// one.
TEST(Reference, LowBitRowsAreWorthStepsOfTheirScale) {
    CacheConfig low = config();
    low.kv_format = NumberFormat::int8;
    const Reference reference(low, 5);
    EXPECT_TRUE(reference.quantises());
    EXPECT_FALSE(Reference(config(), 5).quantises());
    const Unit unit{.layer = 1, .key = 0, .kv_head = 1};
    const auto stored = reference.keysValues(unit, 0, 20);
    const auto before = reference.unquantised(unit, 0, 20);
    for (std::size_t row = 0; row < 20; ++row) {
        double amax = 0;
        for (std::size_t i = row * head_dim; i < (row + 1) * head_dim; ++i)
            amax = std::max(amax, std::fabs(before.k[i]));
        double scale = 0;
        for (std::size_t i = row * head_dim; i < (row + 1) * head_dim; ++i)
            if (std::fabs(before.k[i]) == amax) scale = std::fabs(stored.k[i]) / 127;
        EXPECT_EQ(scale, oracle::rounded(scale, oracle::Format::fp16));
        EXPECT_GE(scale * 127, amax * (1 - 1e-7));
        EXPECT_LE(scale * 127, amax * (1 + 0x1p-10));
        for (std::size_t i = row * head_dim; i < (row + 1) * head_dim; ++i) {
            EXPECT_EQ(stored.k[i] / scale, std::nearbyint(stored.k[i] / scale));
            EXPECT_LE(std::fabs(stored.k[i] - before.k[i]), scale * 0.500001);
        }
    }
    EXPECT_NE(stored.v, before.v);
}

// K and V of each layer and head by their own, however large their row is.
TEST(Reference, FixedScalesAreThoseOfTheHead) {
    CacheConfig fixed = config();
    fixed.kv_format = NumberFormat::int8;
    fixed.kv_scales = {{.k = {1e-3F, 1e-3F}, .v = {1e-3F, 1e-3F}},
                       {.k = {0.25F, 0.01F}, .v = {1.0F, 50.0F}},
                       {.k = {1e-3F, 1e-3F}, .v = {1e-3F, 1e-3F}}};
    const Reference reference(fixed, 5);
    for (const int head : {0, 1}) {
        const Unit unit{.layer = 1, .key = 0, .kv_head = head};
        const auto before = reference.unquantised(unit, 0, 20);
        const auto stored = reference.keysValues(unit, 0, 20);
        const double k_scale = oracle::rounded(head == 0 ? 0.25 : 0.01F, oracle::Format::fp16);
        const double v_scale = head == 0 ? 1.0 : 50.0;
        for (std::size_t i = 0; i < stored.k.size(); ++i) {
            const double k = std::clamp(before.k[i], -127 * k_scale, 127 * k_scale);
            EXPECT_NEAR(stored.k[i], k, k_scale * 0.500001);
            EXPECT_EQ(stored.k[i] / k_scale, std::nearbyint(stored.k[i] / k_scale));
            EXPECT_EQ(stored.v[i], v_scale * std::nearbyint(before.v[i] / v_scale));
        }
    }
}

// They are given back rounded to the input format.
TEST(Reference, CountsDifferencesOfLowBitElements) {
    CacheConfig low = config();
    low.kv_format = NumberFormat::fp8_e4m3;
    const Reference reference(low, 5);
    const auto expected = reference.keysValues({.layer = 0, .key = 0, .kv_head = 0}, 0, 5).v;
    std::vector<std::uint16_t> given;
    for (const double worth : expected)
        given.push_back(bits(oracle::rounded(worth, oracle::Format::bf16)));
    EXPECT_EQ(reference.countDifferences(given, 1, 0, expected), 0);
    given[7] ^= 1;
    EXPECT_EQ(reference.countDifferences(given, 1, 0, expected), 1);
}

TEST(PickUnits, GivesAllOrADistinctSample) {
    const auto all = pickUnits(3, 4, {.first = 2, .count = 2}, 1000, 0);
    EXPECT_EQ(all.size(), 24U);
    const auto some = pickUnits(30, 40, {.first = 2, .count = 2}, 100, 0);
    std::set<std::tuple<int, std::int64_t, int>> distinct;
    for (const Unit& unit : some) {
        EXPECT_LT(unit.layer, 30);
        EXPECT_LT(unit.key, 40);
        EXPECT_TRUE(unit.kv_head == 2 || unit.kv_head == 3);
        distinct.emplace(unit.layer, unit.key, unit.kv_head);
    }
    EXPECT_EQ(distinct.size(), 100U);
    const auto again = pickUnits(30, 40, {.first = 2, .count = 2}, 100, 0);
    const auto other = pickUnits(30, 40, {.first = 2, .count = 2}, 100, 1);
    const auto same = [](const Unit& a, const Unit& b) {
        return a.layer == b.layer && a.key == b.key && a.kv_head == b.kv_head;
    };
    EXPECT_TRUE(std::equal(some.begin(), some.end(), again.begin(), again.end(), same));
    EXPECT_FALSE(std::equal(some.begin(), some.end(), other.begin(), other.end(), same));
}

// Two sequences of 20 and 12 tokens, the last two of each observed.
class SpotCheckTest : public testing::Test {
protected:
    SpotCheckTest()
        : reference_(config(), 9),
          check_(reference_, pickUnits(3, 2, {.first = 0, .count = kv_heads}, 100, 0), 2) {}

    std::vector<float> outputs(int layer, int step) const {
        std::vector<float> out;
        for (std::int64_t key = 0; key < 2; ++key) {
            const std::int64_t length = lengths_[static_cast<std::size_t>(key)];
            for (int head = 0; head < query_heads; ++head) {
                const Unit unit{
                    .layer = layer, .key = key, .kv_head = head / (query_heads / kv_heads)};
                const auto stored = reference_.keysValues(unit, 0, length);
                for (const double value : reference_.attend(unit, stored, head, length - 2 + step))
                    out.push_back(static_cast<float>(value));
            }
        }
        return out;
    }

    void takeAll() {
        for (int layer = 0; layer < 3; ++layer) {
            for (int step = 0; step < 2; ++step)
                check_.take(layer, step, outputs(layer, step));
        }
    }

    const std::vector<std::int64_t> lengths_{20, 12};
    Reference reference_;
    SpotCheck check_;
};

TEST_F(SpotCheckTest, RightOutputsPass) {
    takeAll();
    const auto found = check_.compare(lengths_, 1e-5, 3);
    EXPECT_EQ(found.checked, 3 * 2 * 2 * query_heads);
    EXPECT_EQ(found.wrong, 0);
    EXPECT_LT(found.max_rel_error, 1e-7);
    EXPECT_GT(found.max_rel_error, 0);
}

TEST_F(SpotCheckTest, WhatStoringCostIsMeasuredForLowBitFormatsOnly) {
    takeAll();
    EXPECT_EQ(check_.compare(lengths_, 1e-5, 1).unquantised_rel_error, 0);
    CacheConfig low = config();
    low.kv_format = NumberFormat::int8;
    const Reference reference(low, 9);
    SpotCheck check(reference, {{.layer = 0, .key = 0, .kv_head = 0}}, 1);
    const auto stored = reference.keysValues(check.units()[0], 0, 20);
    std::vector<float> out;
    for (int head = 0; head < query_heads; ++head)
        for (const double value : reference.attend(check.units()[0], stored, head, 19))
            out.push_back(static_cast<float>(value));
    check.take(0, 0, out);
    const std::vector<std::int64_t> lengths{20};
    const auto found = check.compare(lengths, 1e-5, 1);
    EXPECT_EQ(found.wrong, 0);
    EXPECT_GT(found.unquantised_rel_error, 1e-3);
    EXPECT_LT(found.unquantised_rel_error, 5e-2);
}

TEST_F(SpotCheckTest, OneWrongElementIsSeen) {
    takeAll();
    auto out = outputs(1, 1);
    out[(query_heads + 4) * head_dim + 7] += 0.01F;
    check_.take(1, 1, out);
    EXPECT_EQ(check_.compare(lengths_, 1e-5, 1).wrong, 1);
}

TEST_F(SpotCheckTest, NanIsWrong) {
    takeAll();
    auto out = outputs(2, 0);
    out.front() = std::numeric_limits<float>::quiet_NaN();
    check_.take(2, 0, out);
    const auto found = check_.compare(lengths_, 1e-5, 2);
    EXPECT_EQ(found.wrong, 1);
    EXPECT_EQ(found.max_rel_error, std::numeric_limits<double>::infinity());
}

TEST_F(SpotCheckTest, OutputsThatNeverCameAreWrong) {
    EXPECT_EQ(check_.compare(lengths_, 1e-5, 2).wrong, 3 * 2 * 2 * query_heads);
}

}  // namespace
}  // namespace kvgrid::launch
