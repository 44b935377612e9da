// append and gather: what they write, bit for bit, and what they leave alone.
#include <optional>
#include <set>

#include "kernels/paging.h"
#include "tests/kernels/paged_world.h"

namespace kvgrid::test {
namespace {

// The inputs of one append, in host memory.
struct Inputs {
    NumberFormat format = NumberFormat::bf16;
    oracle::Rotary rotary = {};
    Runs runs = {};
    std::int64_t rows = 0;
    std::vector<float> fixed_scales = {};  // [K, V][kv_heads]; empty: every row has its own
};

std::vector<std::byte> encoded(NumberFormat format, const std::vector<float>& numbers) {
    std::vector<std::byte> bytes(numbers.size() * bytesPerElement(format));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        if (format == NumberFormat::fp32) {
            std::memcpy(bytes.data() + 4 * i, &numbers[i], 4);
        } else {
            const std::uint16_t bits = toBits(format, numbers[i]);
            std::memcpy(bytes.data() + 2 * i, &bits, 2);
        }
    }
    return bytes;
}

float asInput(NumberFormat format, float value) {
    return format == NumberFormat::fp32 ? value : fromBits(format, toBits(format, value));
}

oracle::Format oracleFormat(NumberFormat format) {
    switch (format) {
    case NumberFormat::fp16:
        return oracle::Format::fp16;
    case NumberFormat::bf16:
        return oracle::Format::bf16;
    case NumberFormat::fp8_e4m3:
        return oracle::Format::e4m3;
    case NumberFormat::int8:
        return oracle::Format::int8;
    case NumberFormat::fp32:
        break;
    }
    return oracle::Format::fp32;
}

StoredRow rowByTheOracle(NumberFormat format, const std::vector<float>& numbers,
                         std::optional<float> fixed_scale) {
    StoredRow row;
    if (!hasScales(format)) {
        for (const float number : numbers)
            row.bits.push_back(
                toBits(format, static_cast<float>(oracle::rounded(number, oracleFormat(format)))));
        return row;
    }
    const oracle::ScaledRow scaled = oracle::quantised(numbers, oracleFormat(format), fixed_scale);
    row.scale = fp16FromFloat(static_cast<float>(scaled.scale));
    for (const double number : scaled.numbers)
        row.bits.push_back(format == NumberFormat::int8
                               ? static_cast<std::uint8_t>(static_cast<int>(number))
                               : e4m3FromFloat(static_cast<float>(number)));
    return row;
}

template <typename Traits>
class AppendTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;

    // [rows, heads, head_dim] of the rows of the runs; other rows NaN.
    static std::vector<float> numbersOf(const PagedWorld& world, const Inputs& inputs, Kind kind,
                                        int heads) {
        const Model& model = world.model();
        std::vector<float> numbers(static_cast<std::size_t>(inputs.rows * heads * model.head_dim),
                                   std::numeric_limits<float>::quiet_NaN());
        for (const auto& run : inputs.runs)
            for (std::int64_t row = 0; row < run.rows; ++row)
                for (int i = 0; i < heads * model.head_dim; ++i)
                    numbers[static_cast<std::size_t>(
                        (run.first_row + row) * heads * model.head_dim + i)] =
                        model.value(kind, world.sequences()[static_cast<std::size_t>(run.slot)].id,
                                    run.first_position + row, i / model.head_dim,
                                    i % model.head_dim);
        return numbers;
    }

    // cos or sin of each row, rounded from fp64: [rows, dim / 2].
    static std::vector<float> tableOf(const Inputs& inputs, bool cosine) {
        const int half = inputs.rotary.dim / 2;
        std::vector<float> table(static_cast<std::size_t>(inputs.rows * half));
        for (const auto& run : inputs.runs)
            for (std::int64_t row = 0; row < run.rows; ++row)
                for (int i = 0; i < half; ++i) {
                    const double frequency =
                        1.0 / std::pow(inputs.rotary.theta, 2.0 * i / inputs.rotary.dim);
                    const double angle = static_cast<double>(run.first_position + row) * frequency;
                    table[static_cast<std::size_t>((run.first_row + row) * half + i)] =
                        static_cast<float>(cosine ? std::cos(angle) : std::sin(angle));
                }
        return table;
    }

    // Appends twice: the second call must change nothing. Returns q as rotated.
    static std::vector<float> append(const PagedWorld& world, const Inputs& inputs,
                                     bool with_q = true) {
        Device& device = world.device();
        const Model& model = world.model();
        const auto q_bytes =
            encoded(inputs.format, numbersOf(world, inputs, Kind::q, model.query_heads));
        const auto k_bytes =
            encoded(inputs.format, numbersOf(world, inputs, Kind::k, model.kv_heads));
        const auto v_bytes =
            encoded(inputs.format, numbersOf(world, inputs, Kind::v, model.kv_heads));
        const auto q = DeviceArray<std::byte>::of(device, q_bytes);
        const auto k = DeviceArray<std::byte>::of(device, k_bytes);
        const auto v = DeviceArray<std::byte>::of(device, v_bytes);
        const auto cosines = DeviceArray<float>::of(device, tableOf(inputs, true));
        const auto sines = DeviceArray<float>::of(device, tableOf(inputs, false));
        const auto runs = DeviceArray<kvgrid::Run>::of(device, inputs.runs);
        std::vector<std::uint16_t> scale_bits;
        for (const float scale : inputs.fixed_scales)
            scale_bits.push_back(fp16FromFloat(scale));
        const auto fixed_scales = DeviceArray<std::uint16_t>::of(device, scale_bits);
        const auto rotated = DeviceArray<float>::poisoned(
            device, static_cast<std::size_t>(inputs.rows * model.query_heads * model.head_dim));
        const AppendParams params{
            .rows = inputs.rows,
            .query_heads = model.query_heads,
            .kv_heads = model.kv_heads,
            .head_dim = model.head_dim,
            .input_format = inputs.format,
            .q = with_q ? q.data() : nullptr,
            .k = k.data(),
            .v = v.data(),
            .q_rotated = rotated.data(),
            .rotary_dim = inputs.rotary.dim,
            .cosines = cosines.data(),
            .sines = sines.data(),
            .fixed_scales = scale_bits.empty() ? nullptr : fixed_scales.data(),
            .runs = runs.data(),
            .run_count = static_cast<std::int64_t>(inputs.runs.size()),
            .tables = world.tables(),
            .pool = world.pool(),
            .layer = world.layer()};
        device.operations().append(params, device.defaultStream());
        const auto once = world.downloadPool();
        device.operations().append(params, device.defaultStream());
        EXPECT_TRUE(sameBits(once, world.downloadPool()));
        EXPECT_TRUE(sameBits(q_bytes, q.download()));
        EXPECT_TRUE(sameBits(k_bytes, k.download()));
        EXPECT_TRUE(sameBits(v_bytes, v.download()));
        return rotated.download();
    }

    static std::vector<float> rotatedHead(const PagedWorld& world, const Inputs& inputs, Kind kind,
                                          int slot, std::int64_t position, int head) {
        const Model& model = world.model();
        std::vector<float> numbers;
        for (int i = 0; i < model.head_dim; ++i)
            numbers.push_back(
                asInput(inputs.format,
                        model.value(kind, world.sequences()[static_cast<std::size_t>(slot)].id,
                                    position, head, i)));
        if (kind != Kind::v) oracle::rotate(numbers, position, inputs.rotary);
        return numbers;
    }

    // The pool afterwards, every element: new tokens as the oracle says, all else as before.
    static void expectPool(const PagedWorld& world, const Inputs& inputs) {
        const Model& model = world.model();
        auto expected = world.image();
        for (const auto& run : inputs.runs)
            for (std::int64_t position = run.first_position;
                 position < run.first_position + run.rows; ++position) {
                if (!world.present(static_cast<std::size_t>(run.slot), position)) continue;
                for (const Kind kind : {Kind::k, Kind::v})
                    for (int head = 0; head < model.kv_heads; ++head) {
                        const auto numbers =
                            rotatedHead(world, inputs, kind, run.slot, position, head);
                        std::optional<float> fixed_scale;
                        if (!inputs.fixed_scales.empty())
                            fixed_scale = inputs.fixed_scales[static_cast<std::size_t>(
                                (kind == Kind::k ? 0 : model.kv_heads) + head)];
                        world.put(rowByTheOracle(model.format, numbers, fixed_scale), run.slot,
                                  position, head, kind, expected);
                    }
            }
        EXPECT_TRUE(sameBits(expected, world.downloadPool()));
    }

    static void expectRotatedQ(const PagedWorld& world, const Inputs& inputs,
                               const std::vector<float>& rotated) {
        const Model& model = world.model();
        const auto row_numbers = static_cast<std::size_t>(model.query_heads * model.head_dim);
        std::vector<std::uint32_t> poison(rotated.size(), 0xFFFFFFFFU);
        std::vector<float> expected(rotated.size());
        std::memcpy(expected.data(), poison.data(), 4 * poison.size());
        for (const auto& run : inputs.runs)
            for (std::int64_t row = 0; row < run.rows; ++row)
                for (int head = 0; head < model.query_heads; ++head) {
                    const auto numbers = rotatedHead(world, inputs, Kind::q, run.slot,
                                                     run.first_position + row, head);
                    std::copy(numbers.begin(), numbers.end(),
                              expected.begin() +
                                  static_cast<std::ptrdiff_t>(
                                      static_cast<std::size_t>(run.first_row + row) * row_numbers) +
                                  head * model.head_dim);
                }
        EXPECT_TRUE(sameBits(expected, rotated));
    }
};
TYPED_TEST_SUITE(AppendTest, Devices, DeviceNames);

TYPED_TEST(AppendTest, FormatsDimsAndRotations) {
    for (const NumberFormat input : {NumberFormat::fp32, NumberFormat::fp16, NumberFormat::bf16})
        for (const NumberFormat stored : kv_formats)
            for (const int head_dim : {64, 80, 96, 128, 256})
                for (const int rotary_dim : {0, 32, head_dim}) {
                    const Model model{
                        .format = stored, .query_heads = 4, .kv_heads = 2, .head_dim = head_dim};
                    const PagedWorld world(*this->device_, model, {.block_size = 8},
                                           {{.id = 0, .length = 30}});
                    const Inputs inputs{
                        .format = input,
                        .rotary = {.dim = rotary_dim, .theta = 500000.0},
                        .runs = {{.slot = 0, .rows = 11, .first_row = 0, .first_position = 15}},
                        .rows = 11};
                    const auto rotated = this->append(world, inputs);
                    this->expectPool(world, inputs);
                    this->expectRotatedQ(world, inputs, rotated);
                }
}

TYPED_TEST(AppendTest, UnevenRunsInAnyOrder) {
    for (const Layout layout : {Layout::block_major, Layout::layer_major, Layout::contiguous})
        for (const NumberFormat format : kv_formats)
            for (const int block_size : {1, 4, 64}) {
                const Model model{
                    .format = format, .query_heads = 3, .kv_heads = 3, .head_dim = 64};
                const PagedWorld world(*this->device_, model,
                                       {.block_size = block_size, .layout = layout},
                                       {{.id = 0, .length = 5},
                                        {.id = 1, .length = 700},
                                        {.id = 2, .length = 70},
                                        {.id = 3, .length = 1}});
                const Inputs inputs{
                    .format = NumberFormat::bf16,
                    .rotary = {.dim = 64},
                    .runs = {{.slot = 2, .rows = 1, .first_row = 330, .first_position = 69},
                             {.slot = 1, .rows = 325, .first_row = 3, .first_position = 375},
                             {.slot = 3, .rows = 1, .first_row = 0, .first_position = 0},
                             {.slot = 0, .rows = 5, .first_row = 335, .first_position = 0}},
                    .rows = 342};
                const auto rotated = this->append(world, inputs);
                this->expectPool(world, inputs);
                this->expectRotatedQ(world, inputs, rotated);
            }
}

// At a million tokens an angle computed in fp32 would be off by 0.06 rad.
TYPED_TEST(AppendTest, RotationAtAMillionTokens) {
    const Model model{.query_heads = 1, .kv_heads = 1, .head_dim = 64};
    constexpr std::int64_t position = 1'048'575;
    Inputs inputs{.format = NumberFormat::fp32,
                  .rotary = {.dim = 64},
                  .runs = {{.slot = 0, .rows = 1, .first_row = 0, .first_position = position}},
                  .rows = 1};
    const PagedWorld world(*this->device_, model, {.block_size = 256, .layers = 1, .layer = 0},
                           {{.id = 0, .length = position + 1, .first = position / 256 * 256}});
    this->expectRotatedQ(world, inputs, this->append(world, inputs));
    this->expectPool(world, inputs);
}

TYPED_TEST(AppendTest, BlockIdsOutOfRangeAreSkipped) {
    const Model model{.query_heads = 2, .kv_heads = 2, .head_dim = 64};
    const PagedWorld world(*this->device_, model, {.block_size = 4},
                           {{.id = 0, .length = 40, .absent_blocks = {1, 2, 9}}});
    const Inputs inputs{.runs = {{.slot = 0, .rows = 38, .first_row = 0, .first_position = 2}},
                        .rows = 38};
    const auto rotated = this->append(world, inputs);
    this->expectPool(world, inputs);
    this->expectRotatedQ(world, inputs, rotated);  // q is the row's own, wherever its K goes
}

// flash-attention#2711: positions behind the end of the table's row.
TYPED_TEST(AppendTest, PositionsBehindTheTableAreSkipped) {
    const Model model{.query_heads = 1, .kv_heads = 1, .head_dim = 64};
    const PagedWorld world(*this->device_, model, {.block_size = 4, .spare_columns = 0},
                           {{.id = 0, .length = 16}, {.id = 1, .length = 16}});
    // Positions 16 to 19 of slot 0 would be slot 1's first block.
    Inputs inputs{.runs = {{.slot = 0, .rows = 8, .first_row = 0, .first_position = 12}},
                  .rows = 8};
    this->append(world, inputs);
    inputs.runs[0].rows = 4;
    this->expectPool(world, inputs);
}

// The largest numbers of a row at its ends and in the middle, numbers that are nearly nothing, and
// rows that no scale holds.
TYPED_TEST(AppendTest, ScalesFollowTheirRowAlone) {
    constexpr float inf = std::numeric_limits<float>::infinity();
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    struct Peak {
        int element;
        float value;
    };
    const std::vector<Peak> peaks{{0, 3.0F},       {63, -500.0F}, {31, 65504.0F * 127}, {64, 2e9F},
                                  {127, 3e38F},    {5, inf},      {90, -inf},           {1, nan},
                                  {70, -0x1p-40F}, {0, 0.0F},     {100, 0x1p-14F}};
    for (const NumberFormat format : kv_formats)
        for (const bool quiet : {false, true}) {
            Model model{.format = format, .query_heads = 1, .kv_heads = 2, .head_dim = 128};
            model.number = [&peaks, quiet](Kind kind, int, std::int64_t position, int head, int i) {
                const Peak& peak = peaks[static_cast<std::size_t>(position) % peaks.size()];
                if (i == peak.element && (kind == Kind::k) == (head == 0)) return peak.value;
                return quiet ? 0.0F
                             : hashed(9, kind, 0, static_cast<std::uint64_t>(position),
                                      static_cast<std::uint64_t>(head),
                                      static_cast<std::uint64_t>(i));
            };
            const auto rows = static_cast<std::int32_t>(peaks.size());
            const PagedWorld world(*this->device_, model, {.block_size = 4},
                                   {{.id = 0, .length = rows + 5}});
            const Inputs inputs{
                .format = NumberFormat::fp32,
                .runs = {{.slot = 0, .rows = rows, .first_row = 0, .first_position = 3}},
                .rows = rows};
            this->append(world, inputs);
            this->expectPool(world, inputs);
        }
}

// TensorRT-LLM#16916: scales that were given and not used, which scales near 1 would not show. Of
// 1e-3 all but the smallest numbers saturate, of 50 few bits are left.
TYPED_TEST(AppendTest, FixedScalesAreThoseOfTheirHead) {
    for (const NumberFormat format : {NumberFormat::fp8_e4m3, NumberFormat::int8})
        for (const NumberFormat input : {NumberFormat::fp32, NumberFormat::bf16})
            for (const int head_dim : {64, 80, 256}) {
                const Model model{
                    .format = format, .query_heads = 6, .kv_heads = 3, .head_dim = head_dim};
                const PagedWorld world(*this->device_, model, {.block_size = 8},
                                       {{.id = 0, .length = 30}, {.id = 1, .length = 9}});
                const Inputs inputs{
                    .format = input,
                    .rotary = {.dim = 64},
                    .runs = {{.slot = 1, .rows = 1, .first_row = 11, .first_position = 8},
                             {.slot = 0, .rows = 11, .first_row = 0, .first_position = 15}},
                    .rows = 12,
                    .fixed_scales = {1e-3F, 50.0F, 0.007F, 50.0F, 0.25F, 1e-3F}};
                const auto rotated = this->append(world, inputs);
                this->expectPool(world, inputs);
                this->expectRotatedQ(world, inputs, rotated);
            }
}

// Finite numbers saturate, however large; a row with an infinity or a NaN is NaN, and its
// neighbours are not.
TYPED_TEST(AppendTest, FixedScalesSaturate) {
    constexpr float inf = std::numeric_limits<float>::infinity();
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> numbers{1.0F, -3e38F, inf, 0.0F, nan, 3e38F, -inf, -1e-30F, 447.0F};
    for (const NumberFormat format : {NumberFormat::fp8_e4m3, NumberFormat::int8})
        for (const float scale : {0x1p-14F, 1.0F, 65504.0F}) {
            Model model{.format = format, .query_heads = 1, .kv_heads = 2, .head_dim = 64};
            model.number = [&numbers](Kind, int, std::int64_t position, int head, int i) {
                return i == 5 * head ? numbers[static_cast<std::size_t>(position) % numbers.size()]
                                     : static_cast<float>(i - 31) * 20.0F;
            };
            const auto rows = static_cast<std::int32_t>(numbers.size());
            const PagedWorld world(*this->device_, model, {.block_size = 4},
                                   {{.id = 0, .length = rows}});
            const Inputs inputs{
                .format = NumberFormat::fp32,
                .runs = {{.slot = 0, .rows = rows, .first_row = 0, .first_position = 0}},
                .rows = rows,
                .fixed_scales = {scale, scale, scale, scale}};
            this->append(world, inputs);
            this->expectPool(world, inputs);
        }
}

TYPED_TEST(AppendTest, WithoutQ) {
    const Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64};
    const PagedWorld world(*this->device_, model, {}, {{.id = 0, .length = 3}});
    const Inputs inputs{.rotary = {.dim = 64},
                        .runs = {{.slot = 0, .rows = 3, .first_row = 0, .first_position = 0}},
                        .rows = 3};
    for (const float number : this->append(world, inputs, false))
        EXPECT_TRUE(std::isnan(number));
    this->expectPool(world, inputs);
}

TYPED_TEST(AppendTest, NothingToAppend) {
    const Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64};
    const PagedWorld world(*this->device_, model, {}, {{.id = 0, .length = 3}});
    this->append(world, {});
    this->expectPool(world, {});
}

// Rows of 4, 5, 6, 8 and 16 chunks are those of one-byte numbers, of 8, 10, 12, 16 and 32 those of
// 16 bits. Shared memory has 8 chunks side by side in its banks.
TEST(StoredChunkTest, EightTokensOfAChunkLieInDifferentBanks) {
    for (const int row_chunks : {4, 5, 6, 8, 10, 12, 16, 32})
        for (int first = 0; first < 32; first += 8)
            for (int chunk = 0; chunk < row_chunks; ++chunk) {
                std::set<int> banks;
                for (int position = first; position < first + 8; ++position) {
                    const int stored = storedChunk(position, chunk, row_chunks);
                    EXPECT_GE(stored, 0);
                    EXPECT_LT(stored, row_chunks);
                    EXPECT_EQ(storedChunk(position, stored, row_chunks), chunk);  // its own inverse
                    banks.insert((position * row_chunks + stored) % 8);
                }
                EXPECT_EQ(banks.size(), 8U) << row_chunks << " chunks, chunk " << chunk;
            }
}

template <typename Traits>
class GatherTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;
};
TYPED_TEST_SUITE(GatherTest, Devices, DeviceNames);

// What gather must give of a row: its bits, or the row's worth rounded to `as`.
std::vector<std::byte> gathered(NumberFormat format, const StoredRow& row, NumberFormat as) {
    if (hasScales(format)) return encoded(as, row.worth);
    std::vector<std::byte> bytes(2 * row.bits.size());
    std::memcpy(bytes.data(), row.bits.data(), bytes.size());
    return bytes;
}

TYPED_TEST(GatherTest, TokensInOrderAndZerosForWildIds) {
    Device& device = *this->device_;
    struct Formats {
        NumberFormat stored;
        NumberFormat given;
    };
    for (const auto& [stored, given] : {Formats{NumberFormat::fp16, NumberFormat::fp16},
                                        Formats{NumberFormat::bf16, NumberFormat::bf16},
                                        Formats{NumberFormat::fp8_e4m3, NumberFormat::bf16},
                                        Formats{NumberFormat::fp8_e4m3, NumberFormat::fp32},
                                        Formats{NumberFormat::int8, NumberFormat::fp16},
                                        Formats{NumberFormat::int8, NumberFormat::fp32}})
        for (const Layout layout : {Layout::block_major, Layout::layer_major, Layout::contiguous}) {
            const Model model{.format = stored, .query_heads = 3, .kv_heads = 3, .head_dim = 80};
            const std::vector<std::int64_t> absent = layout == Layout::contiguous
                                                         ? std::vector<std::int64_t>{}
                                                         : std::vector<std::int64_t>{0, 7};
            const PagedWorld world(
                device, model, {.block_size = 16, .layout = layout, .spare_columns = 1},
                {{.id = 5, .length = 30}, {.id = 6, .length = 200, .absent_blocks = absent}});
            for (const std::int64_t first : {0, 1, 100}) {
                const std::int64_t tokens = 200 - first;
                const std::size_t row_bytes = 80 * bytesPerElement(given);
                const std::size_t bytes = static_cast<std::size_t>(tokens) * 3 * row_bytes;
                const auto k = DeviceArray<std::byte>::poisoned(device, bytes);
                const auto v = DeviceArray<std::byte>::poisoned(device, bytes);
                device.operations().gather({.slot = 1,
                                            .first_position = first,
                                            .tokens = tokens,
                                            .kv_heads = 3,
                                            .head_dim = 80,
                                            .tables = world.tables(),
                                            .pool = world.pool(),
                                            .layer = world.layer(),
                                            .format = given,
                                            .k = k.data(),
                                            .v = v.data()},
                                           device.defaultStream());
                for (const Kind kind : {Kind::k, Kind::v}) {
                    std::vector<std::byte> expected;
                    for (std::int64_t position = first; position < 200; ++position)
                        for (int head = 0; head < 3; ++head) {
                            const auto row =
                                world.present(1, position)
                                    ? gathered(stored, model.row(kind, 6, position, head), given)
                                    : std::vector<std::byte>(row_bytes);
                            expected.insert(expected.end(), row.begin(), row.end());
                        }
                    EXPECT_TRUE(sameBits(expected, (kind == Kind::k ? k : v).download()));
                }
                k.expectGuardIntact();
                v.expectGuardIntact();
            }
        }
}

// A pool without scales is read as it is, or not at all.
TYPED_TEST(GatherTest, AnotherFormatIsRefused) {
    const Model model{.format = NumberFormat::fp16, .head_dim = 64};
    const PagedWorld world(*this->device_, model, {}, {{.id = 0, .length = 1}});
    EXPECT_THROW(this->device_->operations().gather({.tokens = 1,
                                                     .kv_heads = 2,
                                                     .head_dim = 64,
                                                     .tables = world.tables(),
                                                     .pool = world.pool(),
                                                     .format = NumberFormat::fp32},
                                                    this->device_->defaultStream()),
                 Error);
}

}  // namespace
}  // namespace kvgrid::test
