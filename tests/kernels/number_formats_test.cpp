// Conversions: every 16-bit number, and fp32 against a slow reference that searches for the
// nearest.
#include "kernels/number_formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <kvgrid/error.h>

#include "kernels/cpu/convert.h"
#include "launch/oracle.h"

namespace kvgrid {
namespace {

struct Layout {
    int mantissa_bits;
    int exponent_bias;
    std::uint16_t infinity;  // e4m3 has none: what comes after its largest number is NaN
    std::uint16_t sign = 0x8000;
};
constexpr Layout fp16_layout{10, 15, 0x7C00};
constexpr Layout bf16_layout{7, 127, 0x7F80};
constexpr Layout e4m3_layout{3, 7, 0x7F, 0x80};

// A finite number from its definition.
double definition(std::uint16_t bits, const Layout& layout) {
    const int exponent = (bits & (layout.sign - 1)) >> layout.mantissa_bits;
    const int mantissa = bits & ((1 << layout.mantissa_bits) - 1);
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, 1 - layout.exponent_bias - layout.mantissa_bits)
                      : std::ldexp(mantissa + (1 << layout.mantissa_bits),
                                   exponent - layout.exponent_bias - layout.mantissa_bits);
    return (bits & layout.sign) != 0 ? -magnitude : magnitude;
}

// The nearest representable number, ties to the even mantissa, by bisection. As if the exponent had
// one more value, numbers beyond half a unit above the largest become infinity.
std::uint16_t nearest(float value, const Layout& layout) {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? layout.sign : 0);
    const double magnitude = std::fabs(static_cast<double>(value));
    std::uint16_t below = 0;
    std::uint16_t above = layout.infinity;
    while (above - below > 1) {
        const auto middle = static_cast<std::uint16_t>((below + above) / 2);
        (definition(middle, layout) <= magnitude ? below : above) = middle;
    }
    const double low = definition(below, layout);
    const double high = definition(above, layout);  // of infinity's bits: 2^(largest exponent + 1)
    const bool up = magnitude - low > high - magnitude ||
                    (magnitude - low == high - magnitude && below % 2 == 1);
    return sign | (up ? above : below);
}

template <NumberFormat format>
void everyNumberRoundTrips(const Layout& layout) {
    for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
        const auto bits = static_cast<std::uint16_t>(i);
        const float value = Stored<format>::toFloat(bits);
        const auto magnitude = static_cast<std::uint16_t>(bits & 0x7FFF);
        if (magnitude > layout.infinity) {
            EXPECT_TRUE(std::isnan(value));
            const std::uint16_t back = Stored<format>::fromFloat(value);
            EXPECT_GT(back & 0x7FFF, layout.infinity);
            EXPECT_EQ(back & 0x8000, bits & 0x8000);
        } else if (magnitude == layout.infinity) {
            EXPECT_TRUE(std::isinf(value));
            EXPECT_EQ(Stored<format>::fromFloat(value), bits);
        } else {
            ASSERT_EQ(static_cast<double>(value), definition(bits, layout)) << bits;
            ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0);
            ASSERT_EQ(Stored<format>::fromFloat(value), bits);
        }
    }
}

TEST(NumberFormatsTest, EveryFp16RoundTrips) {
    everyNumberRoundTrips<NumberFormat::fp16>(fp16_layout);
}
TEST(NumberFormatsTest, EveryBf16RoundTrips) {
    everyNumberRoundTrips<NumberFormat::bf16>(bf16_layout);
}

// Each number of the format, the midpoint to its neighbour, and the floats beside both.
std::vector<float> floatsAround(const Layout& layout) {
    std::vector<float> values;
    for (std::uint16_t bits = 0; bits < layout.infinity; ++bits) {
        const double low = definition(bits, layout);
        const double high = definition(static_cast<std::uint16_t>(bits + 1), layout);
        for (const double center : {low, (low + high) / 2}) {
            const auto value = static_cast<float>(center);
            for (const float near :
                 {value, std::nextafter(value, INFINITY), std::nextafter(value, -INFINITY)})
                if (std::isfinite(near)) {
                    values.push_back(near);
                    values.push_back(-near);
                }
        }
    }
    return values;
}

std::vector<float> randomFloats() {
    std::mt19937 random(1);
    std::vector<float> values;
    while (values.size() < 300'000) {
        const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        if (std::isfinite(value)) values.push_back(value);
    }
    for (std::uint32_t bits :
         {0x00000001U, 0x007FFFFFU, 0x00800000U, 0x7F7FFFFFU, 0x33000000U, 0x33000001U, 0x477FEFFFU,
          0x477FF000U, 0x477FFFFFU, 0x47800000U, 0x387FC000U, 0x387FE000U})
        values.push_back(std::bit_cast<float>(bits));
    return values;
}

template <NumberFormat format>
void roundsToNearestEven(const Layout& layout, oracle::Format oracle_format) {
    for (const auto& values : {floatsAround(layout), randomFloats()})
        for (const float value : values) {
            const std::uint16_t expected = nearest(value, layout);
            ASSERT_EQ(Stored<format>::fromFloat(value), expected) << std::hexfloat << value;
            const double rounded = oracle::rounded(value, oracle_format);
            if (expected == layout.infinity || expected == (layout.infinity | 0x8000))
                ASSERT_TRUE(std::isinf(rounded)) << std::hexfloat << value;
            else
                ASSERT_EQ(rounded, definition(expected, layout)) << std::hexfloat << value;
        }
}

TEST(NumberFormatsTest, Fp16RoundsToNearestEven) {
    roundsToNearestEven<NumberFormat::fp16>(fp16_layout, oracle::Format::fp16);
}
TEST(NumberFormatsTest, Bf16RoundsToNearestEven) {
    roundsToNearestEven<NumberFormat::bf16>(bf16_layout, oracle::Format::bf16);
}

template <NumberFormat format>
void specialsStaySpecial(std::uint16_t infinity) {
    constexpr float inf = std::numeric_limits<float>::infinity();
    EXPECT_EQ(Stored<format>::fromFloat(inf), infinity);
    EXPECT_EQ(Stored<format>::fromFloat(-inf), infinity | 0x8000);
    EXPECT_EQ(Stored<format>::fromFloat(0.0F), 0);
    EXPECT_EQ(Stored<format>::fromFloat(-0.0F), 0x8000);
    // NaN whose payload is only in the bits that are cut off must not become infinity.
    for (const std::uint32_t bits :
         {0x7F800001U, 0x7F801FFFU, 0x7FC00000U, 0x7FFFFFFFU, 0xFF800001U, 0xFFFFFFFFU}) {
        const std::uint16_t stored = Stored<format>::fromFloat(std::bit_cast<float>(bits));
        EXPECT_GT(stored & 0x7FFF, infinity);
        EXPECT_EQ(stored >> 15, bits >> 31);
    }
}

TEST(NumberFormatsTest, SpecialsStaySpecial) {
    specialsStaySpecial<NumberFormat::fp16>(0x7C00);
    specialsStaySpecial<NumberFormat::bf16>(0x7F80);
}

static_assert(fp16ToFloat(0x3C00) == 1.0F && fp16FromFloat(65520.0F) == 0x7C00 &&
              fp16FromFloat(0x1p-25F) == 0);
static_assert(bf16ToFloat(0xC000) == -2.0F && bf16FromFloat(1.00390625F) == 0x3F80);

TEST(NumberFormatsTest, EveryE4m3RoundTrips) {
    for (int i = 0; i <= 0xFF; ++i) {
        const auto bits = static_cast<std::uint8_t>(i);
        const float value = e4m3ToFloat(bits);
        ASSERT_EQ(std::signbit(value), i >= 0x80);
        if ((i & 0x7F) == 0x7F) {
            EXPECT_TRUE(std::isnan(value));
            EXPECT_EQ(e4m3FromFloat(value), 0x7F);
        } else {
            ASSERT_EQ(static_cast<double>(value), definition(bits, e4m3_layout)) << i;
            ASSERT_EQ(e4m3FromFloat(value), bits);
        }
    }
    EXPECT_EQ(e4m3ToFloat(0x7E), 448.0F);
}

TEST(NumberFormatsTest, E4m3RoundsToNearestEvenAndTooLargeIsNan) {
    for (const auto& values : {floatsAround(e4m3_layout), randomFloats()})
        for (const float value : values) {
            const std::uint16_t expected = nearest(value, e4m3_layout);
            ASSERT_EQ(e4m3FromFloat(value), (expected & 0x7F) == 0x7F ? 0x7F : expected)
                << std::hexfloat << value;
        }
    constexpr float inf = std::numeric_limits<float>::infinity();
    for (const float beyond : {std::nextafter(464.0F, inf), 1e30F, inf, -inf, NAN})
        EXPECT_EQ(e4m3FromFloat(beyond), 0x7F);
    EXPECT_EQ(e4m3FromFloat(464.0F), 0x7E);
    EXPECT_EQ(e4m3FromFloat(-0.0F), 0x80);
}

TEST(NumberFormatsTest, Int8RoundsToNearestEven) {
    for (int i = -127; i <= 127; ++i) {
        ASSERT_EQ(int8FromFloat(static_cast<float>(i)), i);
        const float tie = static_cast<float>(i) + 0.5F;
        ASSERT_EQ(int8FromFloat(std::nextafter(tie, -128.0F)), i);
        if (i == 127) break;
        ASSERT_EQ(int8FromFloat(tie), i % 2 == 0 ? i : i + 1);
        ASSERT_EQ(int8FromFloat(std::nextafter(tie, 128.0F)), i + 1);
    }
}

static_assert(e4m3ToFloat(0x38) == 1.0F && e4m3FromFloat(1.0625F) == 0x38 &&
              e4m3FromFloat(0x1p-10F) == 0 && int8FromFloat(-2.5F) == -2);

template <NumberFormat format>
void scaleIsTheLeastThatHoldsTheRow() {
    constexpr float largest = Stored<format>::largest;
    std::vector<float> values = floatsAround(fp16_layout);
    for (const float value : randomFloats())
        values.push_back(value);
    for (const float value : values)
        for (const float amax : {std::fabs(value), std::fabs(value) * largest}) {
            if (!std::isfinite(amax)) continue;
            const std::uint16_t scale = scaleFor(magnitudeBits(amax), largest);
            ASSERT_GE(scale, 1) << std::hexfloat << amax;
            ASSERT_LE(scale, 0x7C00);
            const float exact_scale = amax / largest;
            ASSERT_GE(fp16ToFloat(scale), exact_scale);
            if (scale > 1) {
                ASSERT_LT(fp16ToFloat(scale - 1), exact_scale);
            }
            if (scale == 0x7C00) continue;
            const float most = Stored<format>::toFloat(quantised<format>(amax, fp16ToFloat(scale)));
            ASSERT_LE(most, largest) << std::hexfloat << amax;
        }
    constexpr float inf = std::numeric_limits<float>::infinity();
    EXPECT_EQ(scaleFor(magnitudeBits(0.0F), largest), 1);
    EXPECT_EQ(scaleFor(magnitudeBits(65504.0F * largest), largest), 0x7BFF);
    EXPECT_EQ(scaleFor(magnitudeBits(std::nextafter(65504.0F * largest, inf)), largest), 0x7C00);
    EXPECT_EQ(scaleFor(magnitudeBits(-inf), largest), 0x7C00);
    EXPECT_EQ(scaleFor(magnitudeBits(-std::bit_cast<float>(0x7F800001U)), largest), 0x7E00);
}

TEST(NumberFormatsTest, ScalesAreTheLeastThatHoldTheRow) {
    scaleIsTheLeastThatHoldsTheRow<NumberFormat::fp8_e4m3>();
    scaleIsTheLeastThatHoldsTheRow<NumberFormat::int8>();
}

// What the rule promises of a row that cannot be held: its elements are zeros, worth NaN.
TEST(NumberFormatsTest, ABrokenRowIsNan) {
    constexpr float inf = std::numeric_limits<float>::infinity();
    for (const float scale : {inf, fp16ToFloat(0x7E00)})
        for (const float x : {0.0F, -1.0F, 3e38F, inf, -inf, NAN}) {
            const float e4m3 = e4m3ToFloat(quantised<NumberFormat::fp8_e4m3>(x, scale));
            EXPECT_EQ(e4m3, 0.0F);
            EXPECT_TRUE(std::isnan(e4m3 * scale));
            EXPECT_EQ(quantised<NumberFormat::int8>(x, scale), 0);
        }
}

// What a fixed scale cannot hold becomes the largest number: never NaN, never another sign.
TEST(NumberFormatsTest, FixedScalesSaturate) {
    constexpr float inf = std::numeric_limits<float>::infinity();
    for (const float scale : {0x1p-14F, 1e-3F, 1.0F, 50.0F, 65504.0F})
        for (const float beyond : {448.0F * scale, 465.0F * scale, 500.0F * scale, 3e38F}) {
            EXPECT_EQ(quantised<NumberFormat::fp8_e4m3>(beyond, scale), 0x7E);
            EXPECT_EQ(quantised<NumberFormat::fp8_e4m3>(-beyond, scale), 0xFE);
            EXPECT_EQ(quantised<NumberFormat::int8>(beyond, scale), 127);
            EXPECT_EQ(quantised<NumberFormat::int8>(-beyond, scale), -127);
        }
    EXPECT_EQ(quantised<NumberFormat::int8>(127.4F, 1.0F), 127);
    EXPECT_EQ(quantised<NumberFormat::int8>(-126.4F, 1.0F), -126);
    const std::uint16_t fixed = fp16FromFloat(1e-3F);
    for (const float amax : {0.0F, 1.0F, 3e38F})
        EXPECT_EQ(fixedScaleFor(magnitudeBits(amax), fixed), fixed);
    EXPECT_EQ(fixedScaleFor(magnitudeBits(-inf), fixed), 0x7C00);
    EXPECT_EQ(fixedScaleFor(magnitudeBits(NAN), fixed), 0x7E00);
}

// The vectorised rows give the bits of the shared scalar functions, at any length.
TEST(NumberFormatsTest, VectorisedRowsGiveTheSameBits) {
    std::vector<float> values = randomFloats();
    for (const std::uint32_t bits : {0x7F800000U, 0xFF800000U, 0x7F800001U, 0xFFC12345U})
        values.push_back(std::bit_cast<float>(bits));
    std::shuffle(values.begin(), values.end(), std::mt19937(2));
    for (const std::size_t count :
         {std::size_t{0}, std::size_t{1}, std::size_t{17}, values.size()}) {
        for (const NumberFormat format : {NumberFormat::fp16, NumberFormat::bf16}) {
            std::vector<std::uint16_t> stored(count + 1, 0xABCD);
            cpu::fromFloats(format, values.data(), static_cast<std::int64_t>(count), stored.data());
            std::vector<float> back(count + 1, 7.0F);
            cpu::toFloats(format, stored.data(), static_cast<std::int64_t>(count), back.data());
            for (std::size_t i = 0; i < count; ++i) {
                const bool is_fp16 = format == NumberFormat::fp16;
                ASSERT_EQ(stored[i], is_fp16 ? fp16FromFloat(values[i]) : bf16FromFloat(values[i]));
                ASSERT_EQ(std::bit_cast<std::uint32_t>(back[i]),
                          std::bit_cast<std::uint32_t>(is_fp16 ? fp16ToFloat(stored[i])
                                                               : bf16ToFloat(stored[i])));
            }
            EXPECT_EQ(stored[count], 0xABCD);
            EXPECT_EQ(back[count], 7.0F);
        }
        std::vector<float> copy(count);
        cpu::fromFloats(NumberFormat::fp32, values.data(), static_cast<std::int64_t>(count),
                        copy.data());
        EXPECT_TRUE(count == 0 || std::memcmp(copy.data(), values.data(), 4 * count) == 0);
    }
    float number = 1;
    EXPECT_THROW(cpu::toFloats(NumberFormat::int8, &number, 1, &number), Error);
    EXPECT_THROW(cpu::fromFloats(NumberFormat::fp8_e4m3, &number, 1, &number), Error);
    EXPECT_THROW((void)cpu::quantise(NumberFormat::bf16, &number, 1, &number), Error);
    EXPECT_THROW((void)cpu::quantise(NumberFormat::bf16, &number, 1, &number, 0x3C00), Error);
    EXPECT_THROW(cpu::dequantise(NumberFormat::fp16, &number, 0, 1, &number), Error);
}

}  // namespace
}  // namespace kvgrid
