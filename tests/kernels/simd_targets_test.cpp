// Every instruction set that the CPU operations are compiled for and this machine has: each is
// right, and each keeps its own bits whatever surrounds a row.
#include "kernels/cpu/simd_targets.h"
// Highway comes after the choice of targets.
#include <hwy/targets.h>

#include "kernels/cpu/multiply_adds.h"
#include "tests/kernels/paged_world.h"

namespace kvgrid::test {
namespace {

class SimdTargetsTest : public ::testing::Test {
protected:
    ~SimdTargetsTest() override { choose(0); }

    // 0: the best.
    static void choose(std::int64_t target) {
        hwy::SetSupportedTargetsForTest(target);
        hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    }

    std::unique_ptr<Device> device_ = makeCpuDevice(2);
};

TEST_F(SimdTargetsTest, EachIsRight) {
    int targets = 0;
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
        choose(target);
        SCOPED_TRACE(device_->description());
        EXPECT_NE(device_->description().find(hwy::TargetName(target)), std::string::npos);
        ++targets;
        for (const NumberFormat format : kv_formats)
            for (const int head_dim : {64, 80, 96, 128, 256})
                for (const int group : {1, 2, 4, 7, 13}) {
                    const Model model{.format = format,
                                      .query_heads = group,
                                      .kv_heads = 1,
                                      .head_dim = head_dim};
                    const PagedWorld world(*device_, model, {.block_size = 32},
                                           {{.id = 0, .length = 400}});
                    for (const std::int64_t window : {0, 3, 290}) {
                        const auto attendRows = [&](std::int64_t first, std::int32_t rows) {
                            return attend(world,
                                          {{.slot = 0,
                                            .rows = rows,
                                            .first_row = 0,
                                            .first_position = first}},
                                          {.window = window});
                        };
                        const States states = attendRows(395, 5);
                        for (std::int64_t row = 0; row < 5; ++row) {
                            expectOracle(world, states, row, 0, 395 + row, window);
                            EXPECT_TRUE(
                                sameBits(rowsOf(states, model, row, 1), attendRows(395 + row, 1)));
                        }
                    }
                }
    }
    // The portable code, and on every x86-64 of the last ten years two more.
    EXPECT_GE(targets, 1);
}

TEST_F(SimdTargetsTest, EachSoftcapsRowsByThemselves) {
    const Model model{
        .query_heads = 3, .kv_heads = 1, .head_dim = 64, .scale = 1.0F, .softcap = 2.0F};
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
        choose(target);
        SCOPED_TRACE(device_->description());
        const PagedWorld world(*device_, model, {.block_size = 32}, {{.id = 0, .length = 400}});
        const States states =
            attend(world, {{.slot = 0, .rows = 20, .first_row = 0, .first_position = 380}});
        for (std::int64_t row = 0; row < 20; ++row) {
            expectOracle(world, states, row, 0, 380 + row);
            EXPECT_TRUE(sameBits(
                rowsOf(states, model, row, 1),
                attend(world,
                       {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 380 + row}})));
        }
        Model broken = model;
        broken.number = [](Kind kind, int, std::int64_t, int, int) {
            return kind == Kind::k ? std::numeric_limits<float>::quiet_NaN() : 1.0F;
        };
        const PagedWorld nan(*device_, broken, {}, {{.id = 0, .length = 20}});
        for (const float out :
             attend(nan, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 19}}).out)
            EXPECT_TRUE(std::isnan(out));
    }
}

// Scores over the whole range of the exponential and beyond it, and one that is no number.
TEST_F(SimdTargetsTest, EachWeighsScoresFarApart) {
    Model model{.query_heads = 1, .kv_heads = 1, .head_dim = 64, .scale = 1.0F};
    const auto number = [](Kind kind, int, std::int64_t position, int, int element) {
        if (kind == Kind::v) return static_cast<float>((position * 7 + element) % 5) - 2.0F;
        if (kind == Kind::q) return element == 0 ? 1.0F : 0.0F;
        return element == 0 ? -0.5F * static_cast<float>(position) : 0.0F;
    };
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
        choose(target);
        SCOPED_TRACE(device_->description());
        model.number = number;
        const PagedWorld world(*device_, model, {.block_size = 32}, {{.id = 0, .length = 250}});
        const auto attendLast = [](const PagedWorld& in) {
            return attend(in, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 249}});
        };
        expectOracle(world, attendLast(world), 0, 0, 249);
        model.number = [&](Kind kind, int sequence, std::int64_t position, int head, int element) {
            return kind == Kind::k && position == 100
                       ? std::numeric_limits<float>::quiet_NaN()
                       : number(kind, sequence, position, head, element);
        };
        const PagedWorld broken(*device_, model, {.block_size = 32}, {{.id = 0, .length = 250}});
        for (const float out : attendLast(broken).out)
            EXPECT_TRUE(std::isnan(out));
    }
}

// Special fp16 numbers, where a target without a conversion instruction has code of its own.
TEST_F(SimdTargetsTest, Fp16SubnormalsAndSpecials) {
    Model model{.format = NumberFormat::fp16, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
        choose(target);
        SCOPED_TRACE(device_->description());
        for (const std::uint16_t bits :
             {0x0001, 0x03FF, 0x0400, 0x8001, 0x7BFF, 0xFBFF, 0x8000, 0x7C00, 0xFC00, 0x7E00}) {
            model.number = [bits](Kind kind, int, std::int64_t, int, int element) {
                return kind == Kind::v && element == 5 ? fp16ToFloat(bits) : 0.0F;
            };
            const PagedWorld world(*device_, model, {}, {{.id = 0, .length = 1}});
            const States states =
                attend(world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 0}});
            const float expected = fp16ToFloat(bits);
            if (std::isnan(expected))
                EXPECT_TRUE(std::isnan(states.out[5]));
            else
                EXPECT_EQ(states.out[5], expected);
        }
    }
}

// Every number of the low-bit formats, in K and V, one query head a KV head and many; the row's
// largest one makes the scale 1.
TEST_F(SimdTargetsTest, EveryLowBitNumber) {
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
        choose(target);
        SCOPED_TRACE(device_->description());
        for (const NumberFormat format : {NumberFormat::fp8_e4m3, NumberFormat::int8})
            for (int first = 0; first < 256; first += 64) {
                const auto number = [format, first](int element) {
                    const auto bits = static_cast<std::uint8_t>(first + element);
                    if (format == NumberFormat::int8)
                        return std::max(-127.0F,
                                        static_cast<float>(static_cast<std::int8_t>(bits)));
                    const float value = e4m3ToFloat(bits);
                    return std::isnan(value) ? 0.0F : value;
                };
                // Query head h takes element h of K alone, which is then its score. By a small q: a
                // way that holds K as far smaller numbers would lose it.
                Model model{.format = format, .query_heads = 64, .head_dim = 80, .scale = 0x1p40F};
                model.number = [&number, format](Kind kind, int, std::int64_t, int head,
                                                 int element) {
                    if (kind == Kind::q) return element == head ? 0x1p-40F : 0.0F;
                    if (element < 64) return number(element);
                    return format == NumberFormat::int8 ? 127.0F : 448.0F;
                };
                for (const int kv_heads : {1, 64}) {
                    model.kv_heads = kv_heads;
                    const PagedWorld world(*device_, model, {}, {{.id = 0, .length = 1}});
                    const States states = attend(
                        world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 0}});
                    for (int element = 0; element < 64; ++element) {
                        const auto i = static_cast<std::size_t>(element);
                        EXPECT_EQ(states.out[i], number(element));
                        EXPECT_EQ(states.lse[i], number(element));
                    }
                }
            }
    }
}

TEST_F(SimdTargetsTest, EachCountsItsMultiplyAdds) {
    const std::unique_ptr<Device> one = makeCpuDevice(1);
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
        choose(target);
        SCOPED_TRACE(device_->description());
        const std::int64_t count = cpu::multiplyAdds(*one);
        EXPECT_GT(count, 0);
        EXPECT_EQ(cpu::multiplyAdds(*device_), 2 * count);
    }
}

}  // namespace
}  // namespace kvgrid::test
