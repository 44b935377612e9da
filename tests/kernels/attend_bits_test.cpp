// What must not change a single bit of attend, and the fold order written out from the words of
// attention_state.h.
#include <utility>
#include <vector>

#include "kernels/attention_state.h"
#include "tests/kernels/paged_world.h"

namespace kvgrid::test {
namespace {

template <typename Traits>
class AttendBitsTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;
    const Model model_{.query_heads = 6, .kv_heads = 2, .head_dim = 64};
};
TYPED_TEST_SUITE(AttendBitsTest, Devices, DeviceNames);

// One decoding sequence and one with several tokens, at lengths that leave tails.
const std::vector<Sequence> two_sequences{{.id = 0, .length = 1337}, {.id = 1, .length = 530}};
const Runs two_runs{{.slot = 0, .rows = 1, .first_row = 0, .first_position = 1336},
                    {.slot = 1, .rows = 30, .first_row = 1, .first_position = 500}};

TYPED_TEST(AttendBitsTest, BlockSizesLayoutsAndTables) {
    for (const NumberFormat format : kv_formats) {
        Model model = this->model_;
        model.format = format;
        const auto attended = [&](const Placement& placement) {
            return attend(PagedWorld(*this->device_, model, placement, two_sequences), two_runs);
        };
        const States expected = attended({});
        for (int block_size = 1; block_size <= 256; block_size *= 2)
            EXPECT_TRUE(sameBits(expected, attended({.block_size = block_size})))
                << "block size " << block_size;
        for (const Layout layout : {Layout::block_major, Layout::layer_major, Layout::contiguous})
            for (const unsigned permutation : {0U, 7U, 8U})
                EXPECT_TRUE(sameBits(expected, attended({.block_size = 32,
                                                         .layout = layout,
                                                         .layers = 3,
                                                         .layer = 2,
                                                         .permutation = permutation,
                                                         .spare_blocks = 11,
                                                         .spare_columns = 9})))
                    << "layout " << static_cast<int>(layout) << " permutation " << permutation;
    }
}

// Trees that are not cut, cut into few and into many units; of 8 and of 16 rows.
TYPED_TEST(AttendBitsTest, Threads) {
    std::vector<Model> models;
    for (const NumberFormat format : kv_formats)
        for (const int head_dim : {64, 80, 128})
            models.push_back(
                {.format = format, .query_heads = 4, .kv_heads = 2, .head_dim = head_dim});
    for (const auto& [group, head_dim] : {std::pair{3, 96}, {3, 256}, {13, 64}, {15, 128}})
        models.push_back({.query_heads = group, .kv_heads = 1, .head_dim = head_dim});
    const std::vector<Sequence> sequences{{.id = 0, .length = 18000}, {.id = 1, .length = 300}};
    const Runs runs{{.slot = 0, .rows = 1, .first_row = 0, .first_position = 17999},
                    {.slot = 1, .rows = 1, .first_row = 1, .first_position = 299}};
    for (const Model& model : models) {
        std::vector<States> results;
        for (const int threads : {1, 2, 3, 5, 16}) {
            const auto device = TestFixture::Make::makeParallel(threads);
            results.push_back(attend(PagedWorld(*device, model, {}, sequences), runs));
        }
        for (const States& result : results)
            EXPECT_TRUE(sameBits(results[0], result))
                << "group " << model.query_heads / model.kv_heads << " x " << model.head_dim;
    }
}

// Leaves of which a GPU has enough for each block of threads, so that a warp computes one, or no
// more than one, so that four do. Some are cut by a window or lack tokens, and the last is short.
TYPED_TEST(AttendBitsTest, FewLeavesForEachThread) {
    const Runs runs{{.slot = 0, .rows = 1, .first_row = 0, .first_position = 1336},
                    {.slot = 1, .rows = 2, .first_row = 1, .first_position = 511}};
    for (const NumberFormat format : kv_formats)
        for (const int head_dim : {64, 80, 96, 128, 256})
            for (const int group : {3, 7}) {
                const Model model{.format = format,
                                  .query_heads = 2 * group,
                                  .kv_heads = 2,
                                  .head_dim = head_dim,
                                  .softcap = group == 7 ? 20.0F : 0.0F};
                for (const std::int64_t window : {0, 300}) {
                    std::vector<States> results;
                    for (const int threads : {1, 64}) {
                        const auto device = TestFixture::Make::makeParallel(threads);
                        const PagedWorld world(
                            *device, model, {.block_size = 16},
                            {{.id = 0, .length = 1337, .absent_blocks = {1, 33, 36, 37, 79}},
                             {.id = 1, .length = 513}});
                        results.push_back(attend(world, runs, {.window = window}));
                    }
                    EXPECT_TRUE(sameBits(results[0], results[1]))
                        << name(format) << " x " << head_dim << ", group " << group << ", window "
                        << window;
                }
            }
}

// Small trees that a GPU cuts in each way: into 2 units and into 16, which their own warps fold,
// and into 32, which a kernel of its own does; of 8, 16 and (from sm_90 on) 64 rows, of which an
// odd number are there.
TYPED_TEST(AttendBitsTest, CutTrees) {
    const std::vector<std::int64_t> lengths{5 * stripe_tokens, 33 * stripe_tokens,
                                            64 * stripe_tokens + 1};
    Runs runs;
    std::vector<Sequence> sequences;
    for (int i = 0; i < 3; ++i) {
        runs.push_back({.slot = i, .rows = 1, .first_row = i, .first_position = lengths[i] - 1});
        sequences.push_back({.id = i, .length = lengths[i]});
    }
    for (const int group : {3, 13, 49}) {
        const Model model{.query_heads = group, .kv_heads = 1, .head_dim = 64};
        std::vector<States> results;
        for (const int threads : {1, 64}) {
            const auto device = TestFixture::Make::makeParallel(threads);
            results.push_back(attend(PagedWorld(*device, model, {}, sequences), runs));
        }
        EXPECT_TRUE(sameBits(results[0], results[1])) << "group " << group;
    }
}

TYPED_TEST(AttendBitsTest, BatchCompositionAndOrder) {
    for (const int threads : {1, 4}) {
        const auto device = TestFixture::Make::makeParallel(threads);
        const PagedWorld world(*device, this->model_, {},
                               {{.id = 0, .length = 700},
                                {.id = 1, .length = 1},
                                {.id = 2, .length = 260},
                                {.id = 3, .length = 4000}});
        const States together =
            attend(world, {{.slot = 3, .rows = 1, .first_row = 20, .first_position = 3999},
                           {.slot = 0, .rows = 9, .first_row = 1, .first_position = 650},
                           {.slot = 1, .rows = 1, .first_row = 0, .first_position = 0},
                           {.slot = 2, .rows = 10, .first_row = 10, .first_position = 250}});
        const auto alone = [&](std::int32_t slot, std::int32_t rows, std::int64_t position) {
            return attend(
                world, {{.slot = slot, .rows = rows, .first_row = 0, .first_position = position}});
        };
        EXPECT_TRUE(sameBits(rowsOf(together, this->model_, 20, 1), alone(3, 1, 3999)));
        EXPECT_TRUE(sameBits(rowsOf(together, this->model_, 1, 9), alone(0, 9, 650)));
        EXPECT_TRUE(sameBits(rowsOf(together, this->model_, 0, 1), alone(1, 1, 0)));
        EXPECT_TRUE(sameBits(rowsOf(together, this->model_, 10, 10), alone(2, 10, 250)));
    }
}

// Many threads would cut the states into more parts than the workspace, which is bounded, can hold.
TYPED_TEST(AttendBitsTest, MoreThreadsThanTheWorkspaceHasParts) {
    const Model model{.query_heads = 128, .kv_heads = 1, .head_dim = 256};
    const std::vector<Sequence> sequences{{.id = 0, .length = 600}};
    const Runs runs{{.slot = 0, .rows = 8, .first_row = 0, .first_position = 590}};
    std::vector<States> results;
    for (const int threads : {1, 64}) {
        const auto device = TestFixture::Make::makeParallel(threads);
        results.push_back(attend(PagedWorld(*device, model, {}, sequences), runs));
    }
    EXPECT_TRUE(sameBits(results[0], results[1]));
}

// A row's bits do not depend on the rows beside it: one call with many tokens equals one call a
// token.
TYPED_TEST(AttendBitsTest, SeveralTokensEqualOneByOne) {
    for (const NumberFormat format : kv_formats)
        for (const int group : {1, 2, 3, 4, 5, 9, 48, 71, 128}) {
            const Model model{
                .format = format, .query_heads = group, .kv_heads = 1, .head_dim = 64};
            const PagedWorld world(*this->device_, model, {.block_size = 16},
                                   {{.id = 0, .length = 560}});
            const States together =
                attend(world, {{.slot = 0, .rows = 150, .first_row = 0, .first_position = 410}});
            for (std::int64_t row = 0; row < 150; row += group < 8 ? 1 : 13)
                EXPECT_TRUE(sameBits(
                    rowsOf(together, model, row, 1),
                    attend(world,
                           {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 410 + row}})))
                    << "group " << group << " row " << row;
        }
}

// How many rows runs are said to have decides how the work is cut, also where it is not true.
TYPED_TEST(AttendBitsTest, RowsOfRunsSaidToBeFewerOrMore) {
    const Runs runs{{.slot = 0, .rows = 300, .first_row = 0, .first_position = 1000},
                    {.slot = 1, .rows = 1, .first_row = 300, .first_position = 776},
                    {.slot = 2, .rows = 17, .first_row = 301, .first_position = 0}};
    for (const NumberFormat format : kv_formats)
        for (const int head_dim : {64, 80, 96, 128, 256}) {
            const Model model{
                .format = format, .query_heads = 6, .kv_heads = 2, .head_dim = head_dim};
            const PagedWorld world(*this->device_, model, {.block_size = 16},
                                   {{.id = 0, .length = 1300, .absent_blocks = {3, 4, 17, 63}},
                                    {.id = 1, .length = 777},
                                    {.id = 2, .length = 17}});
            const States expected = attend(world, runs, {.run_rows = 1});
            for (const std::int64_t run_rows : {5, 10, 21, 300})
                EXPECT_TRUE(sameBits(expected, attend(world, runs, {.run_rows = run_rows})))
                    << "head dim " << head_dim << ", " << run_rows << " rows";
        }
}

// The same over blocks that hold tiles, that tiles hold, and that cross them, in each layout; of
// numbers whose exponents are far apart. Of the rows that are computed together some see nothing of
// a stripe that others see.
TYPED_TEST(AttendBitsTest, RowsOfRunsOverAnyBlocks) {
    constexpr std::int64_t first = 743;
    constexpr std::int32_t rows = 75;
    const Runs runs{{.slot = 0, .rows = rows, .first_row = 0, .first_position = first},
                    {.slot = 1, .rows = rows, .first_row = rows, .first_position = first}};
    std::vector<Placement> placements{{.block_size = 32, .layout = Layout::contiguous}};
    for (const Layout layout : {Layout::block_major, Layout::layer_major})
        for (const int block_size : {1, 3, 4, 8, 24, 48, 64, 100, 256})
            placements.push_back(
                {.block_size = block_size, .layout = layout, .layers = 3, .layer = 2});
    for (const NumberFormat format : {NumberFormat::bf16, NumberFormat::fp16})
        for (const int head_dim : {64, 128}) {
            Model model{.format = format, .query_heads = 6, .kv_heads = 2, .head_dim = head_dim};
            model.number = [](Kind kind, int id, std::int64_t position, int head, int element) {
                const float value = hashed(
                    8, kind, static_cast<std::uint64_t>(id), static_cast<std::uint64_t>(position),
                    static_cast<std::uint64_t>(head), static_cast<std::uint64_t>(element));
                return std::ldexp(value, 2 - static_cast<int>((position * 7 + element * 5) % 13));
            };
            std::vector<States> of_first[2];
            for (const Placement& placement : placements) {
                const PagedWorld world(
                    *this->device_, model, placement,
                    {{.id = 0, .length = first + rows},
                     {.id = 1, .length = first + rows, .absent_blocks = {0, 3, 7}}});
                for (const std::int64_t window : {0, 270}) {
                    const States expected = attend(world, runs, {.window = window, .run_rows = 1});
                    of_first[window == 0 ? 0 : 1].push_back(rowsOf(expected, model, 0, rows));
                    for (const std::int64_t run_rows : {15, 75})
                        EXPECT_TRUE(
                            sameBits(expected,
                                     attend(world, runs, {.window = window, .run_rows = run_rows})))
                            << name(format) << " x " << head_dim << ", block size "
                            << placement.block_size << ", layout "
                            << static_cast<int>(placement.layout) << ", window " << window << ", "
                            << run_rows << " rows";
                }
            }
            for (const auto& states : of_first)
                for (const States& other : states)
                    EXPECT_TRUE(sameBits(states[0], other)) << name(format) << " x " << head_dim;
        }
}

// The same where a row's running maximum is another one in each tile, or that of the first; by
// teams of warps and by warps alone, too.
TYPED_TEST(AttendBitsTest, ScoresThatRiseWithinAStripe) {
    constexpr std::int32_t rows = 40;
    const Runs runs{{.slot = 0, .rows = rows, .first_row = 0, .first_position = 700}};
    for (const NumberFormat format : kv_formats)
        for (const int head_dim : {64, 128})
            for (const int group : {5, 15}) {
                const Model model = modelOfRisingScores(format, group, head_dim);
                std::vector<States> results;
                for (const int threads : {1, 64}) {
                    const auto device = TestFixture::Make::makeParallel(threads);
                    const PagedWorld world(*device, model, {.block_size = 16},
                                           {{.id = 0, .length = 700 + rows}});
                    for (const std::int64_t run_rows : {1, 5, 10, 40})
                        results.push_back(attend(world, runs, {.run_rows = run_rows}));
                }
                for (const States& result : results)
                    EXPECT_TRUE(sameBits(results[0], result))
                        << name(format) << " x " << head_dim << ", group " << group;
            }
}

// The same over trees with lanes of several stripes, that a window begins within, of all lanes or
// some, folded by one thread or cut.
TYPED_TEST(AttendBitsTest, RowsOfRunsOverLongContexts) {
    const Model model{.query_heads = 3, .kv_heads = 1, .head_dim = 64, .softcap = 20.0F};
    constexpr std::int64_t length = (64 * 2 + 9) * 256 + 17;
    const Runs runs{{.slot = 1, .rows = 60, .first_row = 0, .first_position = length - 60}};
    for (const int threads : {1, 4}) {
        const auto device = TestFixture::Make::makeParallel(threads);
        const PagedWorld world(*device, model, {.block_size = 256},
                               {{.id = 0, .length = 1}, {.id = 1, .length = length}});
        for (const std::int64_t window : {0, 200, 5000, 20'000})
            for (const int ranks : {1, 2, 32}) {
                AttendOptions options{
                    .window = window, .context_rank = 1 % ranks, .context_ranks = ranks};
                options.run_rows = 1;
                const States expected = attend(world, runs, options);
                for (const std::int64_t run_rows : {9, 20, 60}) {
                    options.run_rows = run_rows;
                    EXPECT_TRUE(sameBits(expected, attend(world, runs, options)))
                        << threads << " threads, window " << window << ", " << ranks << " ranks, "
                        << run_rows << " rows";
                }
            }
    }
}

// What a query head gets does not depend on the others of its group, nor on other KV heads. It is
// what it would get alone, but for large groups on a CPU, which has another way for them.
TYPED_TEST(AttendBitsTest, HeadsAreIndependent) {
    constexpr std::int64_t length = 777;
    const Runs run{{.slot = 0, .rows = 1, .first_row = 0, .first_position = length - 1}};
    const auto statesOf = [&](const Model& model) {
        return attend(PagedWorld(*this->device_, model, {}, {{.id = 0, .length = length}}), run);
    };
    for (const int group : {4, 7, 9}) {
        const Model all{.query_heads = 2 * group, .kv_heads = 2, .head_dim = 64};
        const Model others{.query_heads = 2 * group, .kv_heads = 2, .head_dim = 64, .seed = 2};
        const States together = statesOf(all);
        for (int head = 0; head < 2 * group; ++head) {
            const auto expectSameBits = [&](const States& states, int its_head) {
                const auto outOf = [](const States& from, int of) {
                    return std::vector<float>(from.out.begin() + of * 64,
                                              from.out.begin() + (of + 1) * 64);
                };
                EXPECT_TRUE(sameBits(outOf(together, head), outOf(states, its_head)))
                    << "group " << group << ", head " << head;
                EXPECT_EQ(together.lse[static_cast<std::size_t>(head)],
                          states.lse[static_cast<std::size_t>(its_head)]);
            };
            Model among = all;
            among.number = [&](Kind kind, int id, std::int64_t position, int of, int element) {
                const bool its_own = of == (kind == Kind::q ? head : head / group);
                return (its_own ? all : others).value(kind, id, position, of, element);
            };
            expectSameBits(statesOf(among), head);
            if (this->device_->kind() == DeviceKind::cpu && group > 4) continue;
            Model alone{.query_heads = 1, .kv_heads = 1, .head_dim = 64};
            alone.number = [&](Kind kind, int id, std::int64_t position, int, int element) {
                return all.value(kind, id, position, kind == Kind::q ? head : head / group,
                                 element);
            };
            expectSameBits(statesOf(alone), 0);
        }
    }
}

// The same tokens absent, in blocks of different sizes.
TYPED_TEST(AttendBitsTest, AbsentTokens) {
    const Runs runs{{.slot = 0, .rows = 20, .first_row = 0, .first_position = 600}};
    for (const NumberFormat format : kv_formats) {
        Model model = this->model_;
        model.format = format;
        const States coarse =
            attend(PagedWorld(*this->device_, model, {.block_size = 64},
                              {{.id = 0, .length = 620, .absent_blocks = {1, 4}}}),
                   runs);
        const States fine = attend(
            PagedWorld(*this->device_, model, {.block_size = 16},
                       {{.id = 0, .length = 620, .absent_blocks = {4, 5, 6, 7, 16, 17, 18, 19}}}),
            runs);
        EXPECT_TRUE(sameBits(coarse, fine));
    }
}

// One state, with the merge of attention_state.h applied number by number.
struct State {
    std::vector<float> out;
    std::vector<float> lse;  // one for each query head
};

State merged(const State& left, const State& right) {
    State result = left;
    const std::size_t head_dim = left.out.size() / left.lse.size();
    for (std::size_t head = 0; head < left.lse.size(); ++head) {
        const MergeWeights weights = mergeWeights(left.lse[head], right.lse[head]);
        result.lse[head] = weights.lse;
        for (std::size_t i = head * head_dim; i < (head + 1) * head_dim; ++i)
            result.out[i] = mergeOut(weights, left.out[i], right.out[i]);
    }
    return result;
}

// The aligned binary tree over leaves[first, first + size), size a power of two; absent leaves
// empty.
State alignedTree(const std::vector<State>& leaves, const State& empty, std::size_t first,
                  std::size_t size) {
    if (size == 1) return first < leaves.size() ? leaves[first] : empty;
    return merged(alignedTree(leaves, empty, first, size / 2),
                  alignedTree(leaves, empty, first + size / 2, size / 2));
}

State foldByTheBook(const std::vector<State>& stripes, const State& empty) {
    std::vector<State> lanes;
    for (std::size_t lane = 0; lane < lane_count; ++lane) {
        std::vector<State> of_lane;
        for (std::size_t stripe = lane; stripe < stripes.size(); stripe += lane_count)
            of_lane.push_back(stripes[stripe]);
        lanes.push_back(alignedTree(of_lane, empty, 0, 8));
    }
    for (const std::size_t distance : {32U, 16U, 8U, 4U, 2U, 1U})
        for (std::size_t lane = 0; lane < distance; ++lane)
            lanes[lane] = merged(lanes[lane], lanes[lane + distance]);
    return lanes[0];
}

// Each leaf comes from a run over a table in which only that stripe's block exists.
TYPED_TEST(AttendBitsTest, FoldOrderByTheBook) {
    Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64, .scale = 0.7F};
    const State empty{std::vector<float>(128, 0.0F), {empty_lse, empty_lse}};
    for (const std::int64_t length :
         {3 * 256 + 1, 64 * 256 + 1, (64 * 2 + 33) * 256 + 5, (64 * 4 + 2) * 256 + 100}) {
        const std::int64_t stripes = (length + stripe_tokens - 1) / stripe_tokens;
        const Runs run{{.slot = 0, .rows = 1, .first_row = 0, .first_position = length - 1}};
        PagedWorld world(*this->device_, model, {.block_size = 256, .permutation = 0},
                         {{.id = 0, .length = length}});
        const States whole = attend(world, run);
        std::vector<State> leaves;
        for (std::int64_t stripe = 0; stripe < stripes; ++stripe) {
            world.hideAllBut(0, stripe);
            const States leaf = attend(world, run);
            leaves.push_back({leaf.out, leaf.lse});
        }
        const State expected = foldByTheBook(leaves, empty);
        EXPECT_TRUE(sameBits(expected.out, whole.out)) << "length " << length;
        EXPECT_TRUE(sameBits(expected.lse, whole.lse)) << "length " << length;
    }
}

// The states of C context ranks, merged as parts in the order of their lowest lanes, are the state
// of one rank bit for bit.
TYPED_TEST(AttendBitsTest, ContextRanksMergeToTheWhole) {
    const Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64};
    constexpr std::int64_t length = 70 * 256 + 17;
    Device& device = *this->device_;
    const PagedWorld world(device, model, {.block_size = 256},
                           {{.id = 0, .length = 1}, {.id = 1, .length = length}});
    const Runs run{{.slot = 1, .rows = 2, .first_row = 0, .first_position = length - 2}};
    const States whole = attend(world, run);
    for (int ranks = 2; ranks <= 64; ranks *= 2) {
        std::vector<float> out_parts;
        std::vector<float> lse_parts;
        for (int part = 0; part < ranks; ++part) {
            const int rank = (part + 1) % ranks;  // lane l of slot 1 is on rank (l + 1) mod C
            const States states =
                attend(world, run, {.context_rank = rank, .context_ranks = ranks});
            out_parts.insert(out_parts.end(), states.out.begin(), states.out.end());
            lse_parts.insert(lse_parts.end(), states.lse.begin(), states.lse.end());
        }
        EXPECT_TRUE(sameBits(whole, mergeParts(device, model, ranks, out_parts, lse_parts)))
            << ranks << " ranks";
    }
}

TYPED_TEST(AttendBitsTest, RepeatedCallsAgree) {
    const PagedWorld world(*this->device_, this->model_, {}, two_sequences);
    const States first = attend(world, two_runs);
    for (int i = 0; i < 20; ++i)
        EXPECT_TRUE(sameBits(first, attend(world, two_runs)));
}

}  // namespace
}  // namespace kvgrid::test
