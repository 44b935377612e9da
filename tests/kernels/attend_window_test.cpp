// attend with sliding windows: what a row sees, what it must not even read, and which bits may not
// change.
#include "kernels/attention_state.h"
#include "tests/kernels/paged_world.h"

namespace kvgrid::test {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t round_tokens = std::int64_t{lane_count} * stripe_tokens;

float plainValue(Kind kind, int sequence, std::int64_t position, int head, int element) {
    return hashed(9, kind, static_cast<std::uint64_t>(sequence),
                  static_cast<std::uint64_t>(position), static_cast<std::uint64_t>(head),
                  static_cast<std::uint64_t>(element));
}

// The model with NaN in K and V of each sequence before a position.
Model poisonedBefore(Model model, std::vector<std::int64_t> first) {
    model.number = [first = std::move(first)](Kind kind, int sequence, std::int64_t position,
                                              int head, int element) {
        if (kind != Kind::q && position < first[static_cast<std::size_t>(sequence)]) return nan;
        return plainValue(kind, sequence, position, head, element);
    };
    return model;
}

template <typename Traits>
class AttendWindowTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;

    // Decodes the last token of sequences of these lengths together. Before the window is NaN.
    void checkDecode(const Model& model, const Placement& placement,
                     const std::vector<std::int64_t>& lengths, std::int64_t window) {
        std::vector<Sequence> sequences;
        std::vector<std::int64_t> first;
        Runs runs;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
            const int slot = static_cast<int>(i);
            sequences.push_back({.id = slot, .length = lengths[i]});
            first.push_back(std::max<std::int64_t>(0, lengths[i] - window));
            runs.push_back(
                {.slot = slot, .rows = 1, .first_row = slot, .first_position = lengths[i] - 1});
        }
        const PagedWorld world(*device_, poisonedBefore(model, first), placement, sequences);
        const States states = attend(world, runs, {.window = window});
        for (const Run& run : runs)
            expectOracle(world, states, run.first_row, run.slot, run.first_position, window);
    }
};
TYPED_TEST_SUITE(AttendWindowTest, Devices, DeviceNames);

TYPED_TEST(AttendWindowTest, SizesAndLengths) {
    const Model model{.query_heads = 4, .kv_heads = 2, .head_dim = 64};
    for (const std::int64_t window :
         {std::int64_t{1}, std::int64_t{2}, std::int64_t{255}, std::int64_t{256}, std::int64_t{257},
          std::int64_t{600}, std::int64_t{1} << 40})
        this->checkDecode(model, {.block_size = 16}, {1, 2, 255, 256, 257, 512, 513, 700, 1300},
                          window);
}

// Where the lanes' second and third rounds begin: stripes behind the window are absent from every
// level of the fold.
TYPED_TEST(AttendWindowTest, LongSequences) {
    const Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64};
    for (const std::int64_t window :
         {std::int64_t{1}, std::int64_t{300}, round_tokens - 1, round_tokens, round_tokens + 1})
        this->checkDecode(model, {.block_size = 256},
                          {round_tokens, round_tokens + 1, 2 * round_tokens + 300,
                           3 * round_tokens + 17 * stripe_tokens},
                          window);
}

TYPED_TEST(AttendWindowTest, HeadDimsFormatsAndGroups) {
    for (const NumberFormat format : kv_formats)
        for (const int head_dim : {64, 80, 96, 128, 256})
            this->checkDecode(
                {.format = format, .query_heads = 6, .kv_heads = 2, .head_dim = head_dim}, {},
                {300, 700}, 290);
    for (const int group : {1, 8, 17, 71, 128})
        this->checkDecode({.query_heads = group, .kv_heads = 1, .head_dim = 64}, {}, {400}, 290);
}

// Each row has a window of its own.
TYPED_TEST(AttendWindowTest, SeveralTokensAreCausal) {
    for (const std::int64_t window : {1, 2, 31, 255, 256, 257, 480}) {
        const Model model = poisonedBefore({.query_heads = 6, .kv_heads = 2, .head_dim = 64},
                                           {std::max<std::int64_t>(0, 471 - window), 0});
        const PagedWorld world(*this->device_, model, {.block_size = 16},
                               {{.id = 0, .length = 600}, {.id = 1, .length = 300}});
        const States states =
            attend(world,
                   {{.slot = 1, .rows = 300, .first_row = 0, .first_position = 0},
                    {.slot = 0, .rows = 100, .first_row = 300, .first_position = 470}},
                   {.window = window});
        for (std::int64_t row = 0; row < 300; row += 23)
            expectOracle(world, states, row, 1, row, window);
        for (std::int64_t row = 0; row < 100; row += 9)
            expectOracle(world, states, 300 + row, 0, 470 + row, window);
    }
}

// What a later row of a unit sees begins within the tokens that are listed, and so do its scores
// and their scales.
TYPED_TEST(AttendWindowTest, RowsSoftcapAndScaleWhatTheySee) {
    for (const NumberFormat format : kv_formats) {
        const Model model{
            .format = format, .query_heads = 6, .kv_heads = 2, .head_dim = 64, .softcap = 3.0F};
        const PagedWorld world(*this->device_, model, {.block_size = 4},
                               {{.id = 0, .length = 530}});
        for (const std::int64_t window : {1, 3, 250}) {
            const States states =
                attend(world, {{.slot = 0, .rows = 40, .first_row = 0, .first_position = 490}},
                       {.window = window});
            for (std::int64_t row = 0; row < 40; row += 3)
                expectOracle(world, states, row, 0, 490 + row, window);
        }
    }
}

// The last tokens before the window are loud: one too many would take all the mass.
TYPED_TEST(AttendWindowTest, TheEdgeIsExact) {
    for (const std::int64_t window : {1, 60, 256, 300}) {
        for (const std::int64_t loud : {700 - window, 699 - window}) {
            Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64, .scale = 1.0F};
            model.number = [loud](Kind kind, int sequence, std::int64_t position, int head,
                                  int element) {
                if (kind == Kind::k && element == 0) return position == loud ? 12.0F : 0.0F;
                if (kind == Kind::q && element == 0) return 1.0F;
                return 0.25F * plainValue(kind, sequence, position, head, element);
            };
            const PagedWorld world(*this->device_, model, {}, {{.id = 0, .length = 700}});
            const States states =
                attend(world, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 699}},
                       {.window = window});
            expectOracle(world, states, 0, 0, 699, window);
        }
    }
}

// ---- bits ----

const Runs two_runs{{.slot = 0, .rows = 1, .first_row = 0, .first_position = 1336},
                    {.slot = 1, .rows = 30, .first_row = 1, .first_position = 500}};
const Model bits_model{.query_heads = 6, .kv_heads = 2, .head_dim = 64};

// Blocks behind the window that are there, that were freed (ids out of range), or that hold NaN:
// another sequence's.
TYPED_TEST(AttendWindowTest, WhatLiesBehindChangesNoBit) {
    struct Case {
        NumberFormat format;
        std::int64_t window;
    };
    std::vector<Case> cases;
    for (const std::int64_t window : {1, 2, 200, 256, 257, 400})
        cases.push_back({NumberFormat::bf16, window});
    for (const NumberFormat format : kv_formats)
        cases.push_back({format, 100});
    for (const auto& [format, window] : cases) {
        Model model = bits_model;
        model.format = format;
        const std::int64_t first_0 = 1337 - window;
        const std::int64_t first_1 = 501 - window;
        const AttendOptions options{.window = window};
        const States expected =
            attend(PagedWorld(*this->device_, model, {.block_size = 16},
                              {{.id = 0, .length = 1337}, {.id = 1, .length = 530}}),
                   two_runs, options);
        Model poisoned = model;
        poisoned.number = [&](Kind kind, int sequence, std::int64_t position, int head,
                              int element) {
            if (kind != Kind::q && position < (sequence == 0 ? first_0 : first_1)) return nan;
            return model.value(kind, sequence, position, head, element);
        };
        for (int block_size = 1; block_size <= 256; block_size *= 4) {
            for (const bool freed : {false, true}) {
                const auto begin = [&](std::int64_t first) {
                    return freed ? first / block_size * block_size : 0;
                };
                const PagedWorld world(*this->device_, poisoned, {.block_size = block_size},
                                       {{.id = 0, .length = 1337, .first = begin(first_0)},
                                        {.id = 1, .length = 530, .first = begin(first_1)}});
                EXPECT_TRUE(sameBits(expected, attend(world, two_runs, options)))
                    << name(format) << " window " << window << " block size " << block_size
                    << " freed " << freed;
            }
        }
    }
}

TYPED_TEST(AttendWindowTest, LayoutsThreadsAndBatchesChangeNoBit) {
    const std::vector<Sequence> sequences{{.id = 0, .length = 1337}, {.id = 1, .length = 530}};
    const AttendOptions options{.window = 300};
    const PagedWorld plain(*this->device_, bits_model, {}, sequences);
    const States expected = attend(plain, two_runs, options);
    for (const Layout layout : {Layout::layer_major, Layout::contiguous})
        EXPECT_TRUE(
            sameBits(expected, attend(PagedWorld(*this->device_, bits_model,
                                                 {.block_size = 32, .layout = layout}, sequences),
                                      two_runs, options)));
    for (const int threads : {1, 3, 16}) {
        const auto device = TestFixture::Make::makeParallel(threads);
        EXPECT_TRUE(sameBits(
            expected, attend(PagedWorld(*device, bits_model, {}, sequences), two_runs, options)))
            << threads << " threads";
    }
    for (std::int64_t row = 0; row < 30; ++row)
        EXPECT_TRUE(sameBits(
            rowsOf(expected, bits_model, 1 + row, 1),
            attend(plain, {{.slot = 1, .rows = 1, .first_row = 0, .first_position = 500 + row}},
                   options)))
            << "row " << row;
}

TYPED_TEST(AttendWindowTest, AWindowThatHoldsAllIsNone) {
    const PagedWorld world(*this->device_, bits_model, {},
                           {{.id = 0, .length = 1337}, {.id = 1, .length = 530}});
    const States expected = attend(world, two_runs);
    for (const std::int64_t window :
         {std::int64_t{1337}, std::int64_t{1338}, std::int64_t{1} << 40})
        EXPECT_TRUE(sameBits(expected, attend(world, two_runs, {.window = window})));
}

// As if the tokens behind the window did not exist: their blocks are absent, one token each.
TYPED_TEST(AttendWindowTest, IsTheStateOfTheTokensInside) {
    for (const std::int64_t window : {std::int64_t{1}, std::int64_t{257}, std::int64_t{5000}}) {
        const std::int64_t length = round_tokens + 700;
        const Runs run{{.slot = 0, .rows = 1, .first_row = 0, .first_position = length - 1}};
        const PagedWorld whole(*this->device_, bits_model, {.block_size = 256},
                               {{.id = 0, .length = length}});
        const PagedWorld inside(*this->device_, bits_model, {.block_size = 1},
                                {{.id = 0, .length = length, .first = length - window}});
        EXPECT_TRUE(sameBits(attend(whole, run, {.window = window}), attend(inside, run)))
            << "window " << window;
    }
}

TYPED_TEST(AttendWindowTest, ContextRanksMergeToTheWhole) {
    const Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64};
    constexpr std::int64_t length = 70 * 256 + 17;
    Device& device = *this->device_;
    const PagedWorld world(device, model, {.block_size = 256}, {{.id = 0, .length = length}});
    const Runs run{{.slot = 0, .rows = 2, .first_row = 0, .first_position = length - 2}};
    const States whole = attend(world, run, {.window = 900});
    for (const int ranks : {2, 8, 64}) {
        std::vector<float> out_parts;
        std::vector<float> lse_parts;
        for (int rank = 0; rank < ranks; ++rank) {
            const States states =
                attend(world, run, {.window = 900, .context_rank = rank, .context_ranks = ranks});
            out_parts.insert(out_parts.end(), states.out.begin(), states.out.end());
            lse_parts.insert(lse_parts.end(), states.lse.begin(), states.lse.end());
        }
        EXPECT_TRUE(sameBits(whole, mergeParts(device, model, ranks, out_parts, lse_parts)))
            << ranks << " ranks";
    }
}

}  // namespace
}  // namespace kvgrid::test
