// attend against the oracle: shapes, lengths, causality, faults of comparable systems.
#include "kernels/attention_state.h"
#include "tests/kernels/paged_world.h"

namespace kvgrid::test {
namespace {

template <typename Traits>
class AttendTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;

    // Decodes the last token of sequences of these lengths together, and checks each.
    void checkDecode(const Model& model, const Placement& placement,
                     const std::vector<std::int64_t>& lengths) {
        std::vector<Sequence> sequences;
        Runs runs;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
            const int slot = static_cast<int>(i);
            sequences.push_back({.id = slot, .length = lengths[i]});
            runs.push_back(
                {.slot = slot, .rows = 1, .first_row = slot, .first_position = lengths[i] - 1});
        }
        const PagedWorld world(*device_, model, placement, sequences);
        const States states = attend(world, runs);
        for (const auto& run : runs)
            expectOracle(world, states, run.first_row, run.slot, run.first_position);
    }
};
TYPED_TEST_SUITE(AttendTest, Devices, DeviceNames);

TYPED_TEST(AttendTest, HeadDimsAndFormats) {
    for (const NumberFormat format : kv_formats)
        for (const int head_dim : {64, 80, 96, 128, 256})
            this->checkDecode(
                {.format = format, .query_heads = 8, .kv_heads = 2, .head_dim = head_dim}, {},
                {1, 2, 15, 16, 17, 255, 256, 257, 700});
}

TYPED_TEST(AttendTest, GroupsFrom1To128) {
    for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 17, 18, 71, 127, 128})
        this->checkDecode({.query_heads = 2 * group, .kv_heads = 2, .head_dim = 64}, {}, {3, 290});
    this->checkDecode({.query_heads = 128, .kv_heads = 1, .head_dim = 256}, {}, {270});
    for (const NumberFormat format : kv_formats)
        for (const int group : {20, 48, 71, 128})
            this->checkDecode(
                {.format = format, .query_heads = group, .kv_heads = 1, .head_dim = 128}, {},
                {3, 290, 1100});
}

// Where blocks, stripes and the lanes' second and third rounds begin.
TYPED_TEST(AttendTest, LengthsAtBoundaries) {
    constexpr std::int64_t round = std::int64_t{lane_count} * stripe_tokens;
    const Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64};
    this->checkDecode(model, {}, {63, 64, 65, 511, 512, 513});
    this->checkDecode(model, {}, {round - 1, round, round + 1});
    this->checkDecode(model, {.block_size = 256}, {2 * round + 1, 2 * round + 256, 3 * round + 1});
    this->checkDecode(model, {.layout = Layout::contiguous}, {5 * round + 700});
}

TYPED_TEST(AttendTest, SeveralTokensAreCausal) {
    const Model model{.query_heads = 6, .kv_heads = 2, .head_dim = 64};
    const PagedWorld world(*this->device_, model, {.block_size = 16},
                           {{.id = 0, .length = 600}, {.id = 1, .length = 40}});
    // A prompt from the start, and tokens that cross from one stripe to the next.
    const States states =
        attend(world, {{.slot = 1, .rows = 40, .first_row = 0, .first_position = 0},
                       {.slot = 0, .rows = 100, .first_row = 40, .first_position = 470}});
    for (std::int64_t row = 0; row < 40; row += 3)
        expectOracle(world, states, row, 1, row);
    for (std::int64_t row = 0; row < 100; row += 7)
        expectOracle(world, states, 40 + row, 0, 470 + row);
}

// New tokens from one stripe to three, behind a context and from the start.
TYPED_TEST(AttendTest, PromptsAreCausal) {
    for (const NumberFormat format : kv_formats)
        for (const int head_dim : {80, 128, 256}) {
            const Model model{
                .format = format, .query_heads = 4, .kv_heads = 1, .head_dim = head_dim};
            const PagedWorld world(*this->device_, model, {},
                                   {{.id = 0, .length = 700}, {.id = 1, .length = 1500}});
            const States states =
                attend(world, {{.slot = 0, .rows = 700, .first_row = 0, .first_position = 0},
                               {.slot = 1, .rows = 300, .first_row = 700, .first_position = 1200}});
            for (const std::int64_t row : {0, 1, 31, 32, 255, 256, 300, 511, 513, 699})
                expectOracle(world, states, row, 0, row);
            for (const std::int64_t row : {0, 17, 79, 80, 200, 299})
                expectOracle(world, states, 700 + row, 1, 1200 + row);
        }
}

// vllm#57156: unused blocks and tails are NaN in every test here; this one has nothing else around
// a single valid token.
TYPED_TEST(AttendTest, OneValidTokenAmongNan) {
    for (const NumberFormat format : kv_formats) {
        const Model model{.format = format, .query_heads = 4, .kv_heads = 2, .head_dim = 96};
        const PagedWorld world(*this->device_, model, {.block_size = 256, .spare_blocks = 5},
                               {{.id = 0, .length = 1}});
        const States states =
            attend(world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 0}});
        for (int head = 0; head < 4; ++head) {
            const StoredRow row = model.row(Kind::v, 0, 0, head / 2);
            for (std::size_t element = 0; element < 96; ++element)
                EXPECT_EQ(states.out[static_cast<std::size_t>(head) * 96 + element],
                          row.worth[element]);
        }
    }
}

// flashinfer#4450, #4267: a finite stand-in for minus infinity gives zeros. All scores are equal,
// or differ by whole numbers, so that fp32 holds them exactly.
TYPED_TEST(AttendTest, HugelyNegativeScores) {
    Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64, .scale = 1.0F};
    for (const float magnitude : {1024.0F, 65536.0F, 0x1p40F}) {
        model.number = [magnitude](Kind kind, int, std::int64_t position, int, int element) {
            if (kind == Kind::q) return element == 0 ? -1.0F : 0.0F;
            if (kind == Kind::k) return element == 0 ? magnitude : 0.0F;
            return hashed(3, kind, 0, static_cast<std::uint64_t>(position), 0,
                          static_cast<std::uint64_t>(element));
        };
        this->checkDecode(model, {}, {1, 100, 256, 4 * 256});
    }
}

// Scores have a standard deviation of 2.7: they lie far within the cap of 50, and mostly at that of
// 1.
TYPED_TEST(AttendTest, SoftcapBendsScores) {
    for (const float softcap : {1.0F, 3.0F, 50.0F})
        for (const int group : {1, 3, 18})
            this->checkDecode({.query_heads = 2 * group,
                               .kv_heads = 2,
                               .head_dim = 64,
                               .scale = 1.0F,
                               .softcap = softcap},
                              {}, {1, 15, 16, 17, 255, 256, 257, 700});
}

// A softcap bounds what a hugely negative or positive score can be; NaN it leaves.
TYPED_TEST(AttendTest, SoftcapOfHugeScoresAndOfNan) {
    Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64, .scale = 1.0F, .softcap = 4.0F};
    for (const float magnitude : {1024.0F, 0x1p40F}) {
        model.number = [magnitude](Kind kind, int, std::int64_t position, int, int element) {
            if (kind == Kind::q) return element == 0 ? 1.0F : 0.0F;
            if (kind == Kind::k && element == 0) return position % 2 == 0 ? -magnitude : magnitude;
            return hashed(8, kind, 0, static_cast<std::uint64_t>(position), 0,
                          static_cast<std::uint64_t>(element));
        };
        this->checkDecode(model, {}, {1, 100, 600});
    }
    model.number = [](Kind kind, int, std::int64_t position, int, int element) {
        if (kind == Kind::k && position == 7) return std::numeric_limits<float>::quiet_NaN();
        return hashed(8, kind, 0, static_cast<std::uint64_t>(position), 0,
                      static_cast<std::uint64_t>(element));
    };
    const PagedWorld world(*this->device_, model, {}, {{.id = 0, .length = 300}});
    for (const float out :
         attend(world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 299}}).out)
        EXPECT_TRUE(std::isnan(out));
    const States before =
        attend(world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 6}});
    expectOracle(world, before, 0, 0, 6);
}

// vllm#47079, sglang#33065: a base-2 lse merged as a natural one, or the reverse. The stripes'
// masses differ by factors from e^0.5 to e^60.
TYPED_TEST(AttendTest, VeryUnequalMassBetweenStripes) {
    Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64, .scale = 1.0F};
    for (const float step : {0.5F, 2.0F, 20.0F}) {
        for (const bool rising : {true, false}) {
            model.number = [step, rising](Kind kind, int, std::int64_t position, int, int element) {
                const auto stripe = static_cast<float>(position / stripe_tokens);
                if (kind == Kind::q) return element == 0 ? 1.0F : 0.0F;
                if (kind == Kind::k)
                    return element == 0 ? step * (rising ? stripe : 3 - stripe) : 0.0F;
                return hashed(4, kind, 0, static_cast<std::uint64_t>(position), 0,
                              static_cast<std::uint64_t>(element));
            };
            this->checkDecode(model, {}, {4 * 256, 3 * 256 + 1});
        }
    }
}

// A row's running maximum is another one in each tile, or that of the first.
TYPED_TEST(AttendTest, ScoresThatRiseWithinAStripe) {
    for (const NumberFormat format : kv_formats)
        for (const int head_dim : {64, 128})
            for (const int group : {4, 40}) {
                const Model model = modelOfRisingScores(format, group, head_dim);
                this->checkDecode(model, {}, {40, 256, 700});
            }
}

// A large score in one token takes nearly all the mass, whichever token it is.
TYPED_TEST(AttendTest, OneTokenDominates) {
    Model model{.query_heads = 4, .kv_heads = 1, .head_dim = 64, .scale = 1.0F};
    for (const std::int64_t loud : {0, 255, 256, 600}) {
        model.number = [loud](Kind kind, int, std::int64_t position, int, int element) {
            if (kind == Kind::k && element == 0) return position == loud ? 12.0F : 0.0F;
            if (kind == Kind::q && element == 0) return 1.0F;
            return hashed(5, kind, 0, static_cast<std::uint64_t>(position), 0,
                          static_cast<std::uint64_t>(element)) *
                   0.25F;
        };
        this->checkDecode(model, {}, {700});
    }
}

// Input that is not finite shows in the output instead of dropping out of the sum.
TYPED_TEST(AttendTest, NanInAValidTokenIsNotHidden) {
    for (const NumberFormat format : kv_formats)
        for (const Kind poisoned : {Kind::k, Kind::v}) {
            Model model{.format = format, .query_heads = 2, .kv_heads = 1, .head_dim = 64};
            model.number = [poisoned](Kind kind, int, std::int64_t position, int, int element) {
                if (kind == poisoned && position == 7 && element == 3)
                    return std::numeric_limits<float>::quiet_NaN();
                return hashed(6, kind, 0, static_cast<std::uint64_t>(position), 0,
                              static_cast<std::uint64_t>(element));
            };
            const PagedWorld world(*this->device_, model, {}, {{.id = 0, .length = 300}});
            const States states =
                attend(world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 299}});
            EXPECT_TRUE(std::isnan(states.out[3]));
            // A row before it does not see it.
            const States before =
                attend(world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 6}});
            expectOracle(world, before, 0, 0, 6);
        }
}

// A row too large for its scale is NaN, wherever q points; so is one with an infinity.
TYPED_TEST(AttendTest, RowsThatNoScaleHoldsAreNotHidden) {
    for (const NumberFormat format : kv_formats) {
        if (!hasScales(format)) continue;
        for (const Kind broken : {Kind::k, Kind::v})
            for (const float value : {3e38F, -3e38F, std::numeric_limits<float>::infinity(),
                                      -std::numeric_limits<float>::infinity()}) {
                Model model{.format = format, .query_heads = 2, .kv_heads = 1, .head_dim = 64};
                model.number = [=](Kind kind, int, std::int64_t position, int, int element) {
                    if (kind == broken && position == 7 && element == 3) return value;
                    return kind == Kind::q
                               ? 1.0F
                               : hashed(6, kind, 0, static_cast<std::uint64_t>(position), 0,
                                        static_cast<std::uint64_t>(element));
                };
                const PagedWorld world(*this->device_, model, {}, {{.id = 0, .length = 300}});
                const States states =
                    attend(world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 299}});
                for (const float number : states.out)
                    EXPECT_TRUE(std::isnan(number));
            }
    }
}

// TensorRT-LLM#16916: scales far from 1, another one for each row.
TYPED_TEST(AttendTest, ScalesFarApart) {
    for (const NumberFormat format : kv_formats) {
        if (!hasScales(format)) continue;
        Model model{.format = format, .query_heads = 6, .kv_heads = 2, .head_dim = 128};
        model.number = [](Kind kind, int id, std::int64_t position, int head, int element) {
            const float value = hashed(
                7, kind, static_cast<std::uint64_t>(id), static_cast<std::uint64_t>(position),
                static_cast<std::uint64_t>(head), static_cast<std::uint64_t>(element));
            if (kind == Kind::q) return value;
            return std::ldexp(value, static_cast<int>((position * 7 + head * 3) % 11) -
                                         (kind == Kind::k ? 8 : 5));
        };
        this->checkDecode(model, {.block_size = 16}, {5, 300, 1000});
    }
}

// vllm#41623 and others: ids that point nowhere are as if their tokens did not exist.
TYPED_TEST(AttendTest, BlockIdsOutOfRangeAreAbsent) {
    for (const NumberFormat format : kv_formats) {
        const Model model{.format = format, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
        const PagedWorld world(
            *this->device_, model, {.block_size = 16},
            {{.id = 0, .length = 1000, .absent_blocks = {0, 5, 16, 17, 18, 40, 62}},
             {.id = 1, .length = 40, .absent_blocks = {2}}});
        const States states =
            attend(world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 999},
                           {.slot = 1, .rows = 40, .first_row = 1, .first_position = 0},
                           {.slot = 0, .rows = 30, .first_row = 41, .first_position = 250}});
        expectOracle(world, states, 0, 0, 999);
        for (std::int64_t row = 0; row < 40; ++row)
            expectOracle(world, states, 1 + row, 1, row);
        for (std::int64_t row = 0; row < 30; ++row)
            expectOracle(world, states, 41 + row, 0, 250 + row);
    }
}

void expectEmpty(const States& states) {
    for (const float number : states.out) {
        EXPECT_EQ(number, 0.0F);
        EXPECT_FALSE(std::signbit(number));
    }
    for (const float lse : states.lse)
        EXPECT_EQ(lse, empty_lse);
}

TYPED_TEST(AttendTest, NothingVisibleIsTheEmptyState) {
    const Model model{.query_heads = 4, .kv_heads = 2, .head_dim = 80};
    const PagedWorld world(*this->device_, model, {.block_size = 64},
                           {{.id = 0, .length = 300, .absent_blocks = {0, 1, 2, 3, 4}},
                            {.id = 1, .length = 100, .absent_blocks = {0}}});
    expectEmpty(attend(world, {{.slot = 0, .rows = 3, .first_row = 0, .first_position = 297}}));
    // The first rows of a block see nothing, the last ones do.
    const States states =
        attend(world, {{.slot = 1, .rows = 10, .first_row = 0, .first_position = 60}});
    expectEmpty(rowsOf(states, model, 0, 4));
    for (std::int64_t row = 4; row < 10; ++row)
        expectOracle(world, states, row, 1, 60 + row);
}

// flashinfer#4975, TensorRT-LLM#15383: a rank without tokens leaves old output.
TYPED_TEST(AttendTest, LengthOneOnManyContextRanks) {
    const Model model{.query_heads = 4, .kv_heads = 2, .head_dim = 64};
    const PagedWorld world(*this->device_, model, {},
                           {{.id = 0, .length = 1}, {.id = 1, .length = 1}});
    for (const std::int32_t slot : {0, 1})
        for (const int ranks : {2, 8, 64})
            for (int rank = 0; rank < ranks; ++rank) {
                const States states =
                    attend(world, {{.slot = slot, .rows = 1, .first_row = 0, .first_position = 0}},
                           {.context_rank = rank, .context_ranks = ranks});
                if (rank == slot % ranks)  // lane 0 of slot s is on rank (0 + s) mod C
                    expectOracle(world, states, 0, slot, 0);
                else
                    expectEmpty(states);
            }
}

TYPED_TEST(AttendTest, ContextRanksSeeTheirLanesOnly) {
    const Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64};
    constexpr std::int64_t position = 66 * 256 + 10;
    const PagedWorld world(*this->device_, model, {.block_size = 256},
                           {{.id = 0, .length = 1}, {.id = 1, .length = position + 1}});
    const double bound = errorBound(*this->device_, model.format);
    for (const int ranks : {2, 16})
        for (int rank = 0; rank < ranks; rank += 3) {
            const States states =
                attend(world, {{.slot = 1, .rows = 1, .first_row = 0, .first_position = position}},
                       {.context_rank = rank, .context_ranks = ranks});
            const oracle::State expected =
                oracleState(world, 1, position, 0, [rank, ranks](std::int64_t token) {
                    return (token / stripe_tokens % lane_count + 1) % ranks == rank;
                });
            EXPECT_LE(oracle::relativeError(std::span(states.out).first(64), expected.out), bound);
            EXPECT_NEAR(states.lse[0], expected.lse, bound * std::fabs(expected.lse));
        }
}

TYPED_TEST(AttendTest, RowsOfNoRunAreLeftAlone) {
    const Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64};
    // With one thread states go where they belong at once, with several through the workspace.
    for (const int threads : {1, 4}) {
        const auto device = TestFixture::Make::makeParallel(threads);
        const PagedWorld world(*device, model, {}, {{.id = 0, .length = 9}});
        const States states = attend(
            world, {{.slot = 0, .rows = 2, .first_row = 3, .first_position = 7}}, {.rows = 7});
        expectOracle(world, states, 3, 0, 7);
        expectOracle(world, states, 4, 0, 8);
        for (const std::int64_t row : {0, 1, 2, 5, 6})
            for (const float number : rowsOf(states, model, row, 1).out)
                EXPECT_TRUE(std::isnan(number));
        EXPECT_NO_THROW((void)attend(world, {}, {.rows = 1}));
    }
}

}  // namespace
}  // namespace kvgrid::test
