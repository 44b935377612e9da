// The angles that the cache rotates by are those that the oracle defines, bit for bit: a cosine
// that differs in its last bit would now and then round a stored K the other way.
#include "shard/block_tables.h"

#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "launch/reference.h"

namespace kvgrid {
namespace {

// Elements of 1 and 0 come back as cosines and sines.
void expectTheOraclesAngles(const RotaryEmbedding& rotary) {
    const std::vector<double> frequencies = inverseFrequencies(rotary);
    const auto half = static_cast<std::size_t>(rotary.dim) / 2;
    ASSERT_EQ(frequencies.size(), half);
    std::mt19937_64 random(7);  // NOLINT(cert-msc51-cpp): the same positions each time
    for (int i = 0; i < 500; ++i) {
        const auto position = static_cast<std::int64_t>(random() % (std::uint64_t{1} << 20));
        std::vector<float> head(2 * half);
        std::fill_n(head.begin(), half, 1.0F);
        oracle::rotate(head, position, launch::oracleRotary(rotary));
        for (std::size_t at = 0; at < half; ++at) {
            const double angle = static_cast<double>(position) * frequencies[at];
            ASSERT_EQ(head[at], static_cast<float>(std::cos(angle))) << position << " " << at;
            ASSERT_EQ(head[half + at], static_cast<float>(std::sin(angle)))
                << position << " " << at;
        }
    }
}

TEST(InverseFrequencies, AreTheOracles) {
    for (const int dim : {2, 32, 64, 80, 96, 128, 256}) {
        for (const double theta : {10'000.0, 500'000.0, 1'000'000.0}) {
            expectTheOraclesAngles({.dim = dim, .theta = theta, .llama3 = std::nullopt});
            expectTheOraclesAngles({.dim = dim, .theta = theta, .llama3 = Llama3Scaling{}});
            expectTheOraclesAngles(
                {.dim = dim, .theta = theta, .llama3 = Llama3Scaling{.factor = 32}});
        }
    }
}

}  // namespace
}  // namespace kvgrid
