// The angles that the cache rotates by are those that the oracle defines, bit for bit: a cosine
// that differs in its last bit would now and then round a stored K the other way.
#include "shard/rotary_angles.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "launch/reference.h"

namespace kvgrid {
namespace {

// Elements of 1 and 0 come back as cosines and sines.
void expectTheOraclesAngles(const RotaryEmbedding& rotary) {
    const RotaryAngles angles(rotary);
    const auto half = static_cast<std::size_t>(rotary.dim) / 2;
    ASSERT_EQ(angles.pairs(), half);
    std::vector<float> cosines(half), sines(half);
    std::mt19937_64 random(7);  // NOLINT(cert-msc51-cpp): the same positions each time
    for (int i = 0; i < 500; ++i) {
        const auto position = static_cast<std::int64_t>(random() % (std::uint64_t{1} << 20));
        std::vector<float> head(2 * half);
        std::fill_n(head.begin(), half, 1.0F);
        oracle::rotate(head, position, launch::oracleRotary(rotary));
        angles.at(position, cosines.data(), sines.data());
        for (std::size_t at = 0; at < half; ++at) {
            ASSERT_EQ(head[at], cosines[at]) << position << " " << at;
            ASSERT_EQ(head[half + at], sines[at]) << position << " " << at;
        }
    }
}

TEST(RotaryAngles, AreTheOracles) {
    for (const int dim : {2, 32, 64, 80, 96, 128, 256}) {
        for (const double theta : {10'000.0, 150'000.0, 1'000'000.0}) {
            for (const RotaryScaling& scaling : std::initializer_list<RotaryScaling>{
                     std::monostate{}, LinearScaling{.factor = 3}, Llama3Scaling{},
                     Llama3Scaling{.factor = 32}, YarnScaling{.factor = 32, .truncate = false},
                     YarnScaling{.factor = 4, .original_max_position = 32768},
                     YarnScaling{.factor = 0.5}, YarnScaling{.factor = 40, .attention_factor = 1},
                     YarnScaling{.factor = 2, .original_max_position = 100}}) {
                expectTheOraclesAngles({.dim = dim, .theta = theta, .scaling = scaling});
            }
        }
    }
    // The linear part is cut off at its end; it is no longer than one pair.
    expectTheOraclesAngles({.dim = 64,
                            .theta = 2,
                            .scaling = YarnScaling{.factor = 32, .original_max_position = 250}});
    expectTheOraclesAngles({.dim = 64,
                            .theta = 1e4,
                            .scaling = YarnScaling{.factor = 32, .original_max_position = 6}});
}

}  // namespace
}  // namespace kvgrid
