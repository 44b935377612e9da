// The data of verify and bench: a pure function of its coordinates, rounded as promised.
#include "launch/workload.h"

#include <gtest/gtest.h>

#include <xxhash.h>
#include <bit>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "launch/oracle.h"

namespace kvgrid::launch {
namespace {

constexpr int head_dim = 64;

std::vector<float> head(const Workload& workload, Tensor tensor, const TokenAt& token, int index) {
    std::vector<float> values(head_dim);
    workload.fillHead(tensor, token, index, values);
    return values;
}

TEST(Workload, IsTheSameFromEveryHeadRange) {
    const Workload workload(7, NumberFormat::fp32, head_dim);
    const TokenAt token{.key = 3, .position = 100'000, .layer = 5};
    std::vector<float> all(8 * head_dim);
    workload.fill(Tensor::k, token, {.first = 0, .count = 8}, all.data());
    std::vector<float> some(2 * head_dim);
    workload.fill(Tensor::k, token, {.first = 4, .count = 2}, some.data());
    EXPECT_EQ(std::memcmp(some.data(), all.data() + 4 * head_dim, some.size() * sizeof(float)), 0);
    const std::vector<float> one = head(workload, Tensor::k, token, 7);
    EXPECT_EQ(std::memcmp(one.data(), all.data() + 7 * head_dim, one.size() * sizeof(float)), 0);
}

TEST(Workload, DependsOnEveryCoordinate) {
    const Workload workload(7, NumberFormat::fp32, head_dim);
    const Workload other_seed(8, NumberFormat::fp32, head_dim);
    const TokenAt token{.key = 1, .position = 2, .layer = 3};
    std::set<std::vector<float>> seen{
        head(workload, Tensor::q, token, 4),
        head(workload, Tensor::k, token, 4),
        head(workload, Tensor::v, token, 4),
        head(workload, Tensor::q, token, 5),
        head(workload, Tensor::q, {.key = 2, .position = 2, .layer = 3}, 4),
        head(workload, Tensor::q, {.key = 1, .position = 3, .layer = 3}, 4),
        head(workload, Tensor::q, {.key = 2, .position = 1, .layer = 3}, 4),
        head(workload, Tensor::q, {.key = 1, .position = 2, .layer = 4}, 4),
        head(workload, Tensor::q, {.key = 3, .position = 2, .layer = 1}, 4),
        head(other_seed, Tensor::q, token, 4)};
    EXPECT_EQ(seen.size(), 10U);
}

TEST(Workload, IsAboutNormal) {
    const Workload workload(0, NumberFormat::fp32, head_dim);
    double sum = 0;
    double squares = 0;
    double neighbours = 0;
    int count = 0;
    for (int position = 0; position < 10'000; ++position) {
        const auto values = head(workload, Tensor::v, {.position = position}, 0);
        for (std::size_t i = 0; i < values.size(); ++i) {
            const double value = values[i];
            EXPECT_LE(std::abs(value), 3.46);
            sum += value;
            squares += value * value;
            neighbours += value * values[i == 0 ? values.size() - 1 : i - 1];
            ++count;
        }
    }
    EXPECT_NEAR(sum / count, 0, 0.005);
    EXPECT_NEAR(squares / count, 1, 0.005);
    EXPECT_NEAR(neighbours / count, 0, 0.005);
}

// The value of 16-bit bits by way of fp32, whose upper half bf16 is.
float fromBf16(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

float fromFp16(std::uint16_t bits) {
    const int exponent = (bits >> 10) & 31;
    if ((bits & 0x7fff) == 0) return 0.0F;
    const double magnitude = std::ldexp(1024 + (bits & 1023), exponent - 25);
    return static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

TEST(Workload, RoundsToTheFormatTiesToEven) {
    const Workload exact(3, NumberFormat::fp32, head_dim);
    for (const NumberFormat format : {NumberFormat::bf16, NumberFormat::fp16}) {
        const bool is_bf16 = format == NumberFormat::bf16;
        const Workload rounded(3, format, head_dim);
        std::set<std::uint16_t> distinct;
        for (int position = 0; position < 200; ++position) {
            const TokenAt token{.position = position};
            std::vector<std::uint16_t> bits(head_dim);
            rounded.fill(Tensor::k, token, {.first = 2, .count = 1}, bits.data());
            const auto floats = head(rounded, Tensor::k, token, 2);
            const auto full = head(exact, Tensor::k, token, 2);
            for (std::size_t i = 0; i < bits.size(); ++i) {
                const double expected =
                    oracle::rounded(full[i], is_bf16 ? oracle::Format::bf16 : oracle::Format::fp16);
                ASSERT_EQ(is_bf16 ? fromBf16(bits[i]) : fromFp16(bits[i]), expected) << full[i];
                ASSERT_EQ(floats[i], expected);
                distinct.insert(bits[i]);
            }
        }
        EXPECT_GT(distinct.size(), 400U);
    }
}

TEST(Workload, SinksDependOnSeedLayerAndHead) {
    const Workload workload(7, NumberFormat::bf16, head_dim);
    std::set<float> seen{workload.sink(0, 0), workload.sink(0, 1), workload.sink(1, 0),
                         Workload(8, NumberFormat::bf16, head_dim).sink(0, 0)};
    EXPECT_EQ(seen.size(), 4U);
    for (int head = 0; head < 1000; ++head)
        EXPECT_LE(std::abs(workload.sink(3, head) - 8), 3.46);
}

// Digests in documents and reports would change with the data.
TEST(Workload, HasNotChanged) {
    const Workload workload(0, NumberFormat::bf16, head_dim);
    std::vector<std::uint16_t> bits(4 * head_dim);
    workload.fill(Tensor::q, {.key = 1, .position = 2, .layer = 3}, {.first = 0, .count = 4},
                  bits.data());
    EXPECT_EQ(XXH3_64bits(bits.data(), bits.size() * sizeof(bits[0])), 17106201514519102437U);
}

}  // namespace
}  // namespace kvgrid::launch
