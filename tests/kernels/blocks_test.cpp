// The operations without attention in them: merge, copy blocks, output, read runs; and the device's
// memory, streams and events.
#include <set>

#include "kernels/attention_state.h"
#include "tests/kernels/paged_world.h"

namespace kvgrid::test {
namespace {

template <typename Traits>
class MergeTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;

    States merge(std::int64_t rows, int parts, int head_dim, const std::vector<float>& out_parts,
                 const std::vector<float>& lse_parts, bool in_place = false) {
        Device& device = *device_;
        const auto device_out = DeviceArray<float>::of(device, out_parts);
        const auto device_lse = DeviceArray<float>::of(device, lse_parts);
        const auto numbers = static_cast<std::size_t>(rows * head_dim);
        const auto out = DeviceArray<float>::poisoned(device, numbers);
        const auto lse = DeviceArray<float>::poisoned(device, static_cast<std::size_t>(rows));
        device.operations().merge({.rows = rows,
                                   .parts = parts,
                                   .head_dim = head_dim,
                                   .out_parts = device_out.data(),
                                   .lse_parts = device_lse.data(),
                                   .out = in_place ? device_out.data() : out.data(),
                                   .lse = in_place ? device_lse.data() : lse.data()},
                                  device.defaultStream());
        States result{(in_place ? device_out : out).download(),
                      (in_place ? device_lse : lse).download()};
        result.out.resize(numbers);
        result.lse.resize(static_cast<std::size_t>(rows));
        return result;
    }
};
TYPED_TEST_SUITE(MergeTest, Devices, DeviceNames);

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

TYPED_TEST(MergeTest, TheEmptyStateIsTheIdentityBitForBit) {
    // -0, a subnormal and infinity must pass too.
    std::vector<float> state(64, -0.0F);
    state[1] = 1e-40F;
    state[2] = std::numeric_limits<float>::infinity();
    state[3] = 0.1F;
    for (const int parts : {1, 2, 4, 64})
        for (int at = 0; at<parts; at += parts> 4 ? 7 : 1) {
            std::vector<float> out_parts(static_cast<std::size_t>(parts) * 64, nan_value);
            std::vector<float> lse_parts(static_cast<std::size_t>(parts), empty_lse);
            std::copy(state.begin(), state.end(), out_parts.begin() + at * 64);
            lse_parts[static_cast<std::size_t>(at)] = -123.456F;
            const States result = this->merge(1, parts, 64, out_parts, lse_parts);
            EXPECT_TRUE(sameBits(state, result.out)) << parts << " parts, the state at " << at;
            EXPECT_EQ(result.lse[0], -123.456F);
        }
}

TYPED_TEST(MergeTest, AllEmpty) {
    for (const bool in_place : {false, true}) {
        const States result = this->merge(3, 8, 80, std::vector<float>(3 * 8 * 80, nan_value),
                                          std::vector<float>(3 * 8, empty_lse), in_place);
        EXPECT_TRUE(sameBits(result.out, std::vector<float>(3 * 80, 0.0F)));
        EXPECT_TRUE(sameBits(result.lse, std::vector<float>(3, empty_lse)));
    }
}

TYPED_TEST(MergeTest, PartsAreAPowerOfTwo) {
    for (const int parts : {0, 3, 12, 63})
        EXPECT_THROW(this->merge(1, parts, 64, std::vector<float>(64 * 64, 0.0F),
                                 std::vector<float>(64, 0.0F)),
                     Error)
            << parts;
}

// part + parts / 2, then + parts / 4, ..., number by number.
TYPED_TEST(MergeTest, FoldOrderByTheBook) {
    for (const int head_dim : {64, 80, 256})
        for (const int parts : {2, 4, 8, 16, 32, 64}) {
            constexpr std::int64_t rows = 37;
            std::vector<float> out_parts;
            std::vector<float> lse_parts;
            for (std::int64_t part = 0; part < parts; ++part)
                for (std::int64_t row = 0; row < rows; ++row) {
                    const auto p = static_cast<std::uint64_t>(part);
                    const auto r = static_cast<std::uint64_t>(row);
                    const bool empty = hashed(1, Kind::q, p, r, 0, 0) > 0.6F;
                    lse_parts.push_back(empty ? empty_lse : 8 * hashed(1, Kind::k, p, r, 0, 0));
                    for (int i = 0; i < head_dim; ++i)
                        out_parts.push_back(
                            empty ? nan_value
                                  : hashed(1, Kind::v, p, r, 0, static_cast<std::uint64_t>(i)));
                }
            auto out = out_parts;
            auto lse = lse_parts;
            for (std::size_t i = 0; i < lse.size(); ++i)
                if (lse[i] == empty_lse)
                    std::fill_n(out.begin() + static_cast<std::ptrdiff_t>(i) * head_dim, head_dim,
                                0.0F);
            for (std::int64_t distance = parts / 2; distance > 0; distance /= 2)
                for (std::int64_t i = 0; i < distance * rows; ++i) {
                    const auto left = static_cast<std::size_t>(i);
                    const auto right = static_cast<std::size_t>(i + distance * rows);
                    const MergeWeights weights = mergeWeights(lse[left], lse[right]);
                    lse[left] = weights.lse;
                    for (std::size_t d = 0; d < static_cast<std::size_t>(head_dim); ++d) {
                        float& number = out[left * static_cast<std::size_t>(head_dim) + d];
                        number = mergeOut(weights, number,
                                          out[right * static_cast<std::size_t>(head_dim) + d]);
                    }
                }
            out.resize(static_cast<std::size_t>(rows * head_dim));
            lse.resize(rows);
            for (const bool in_place : {false, true})
                EXPECT_TRUE(sameBits({out, lse}, this->merge(rows, parts, head_dim, out_parts,
                                                             lse_parts, in_place)));
        }
}

// Masses of every ratio: each that neighbouring numbers can have, and then ever further apart.
TYPED_TEST(MergeTest, WeightsAreTheFormulas) {
    constexpr int head_dim = 64;
    std::vector<float> lse_parts[2];
    const auto add = [&](float left, float right) {
        for (const bool swapped : {false, true}) {
            lse_parts[0].push_back(swapped ? right : left);
            lse_parts[1].push_back(swapped ? left : right);
        }
    };
    for (const float base : {0.0F, 0.3F, 1.0F, 1.9F, -6.0F}) {
        float next = base;
        for (int i = 0; i < 3000; ++i, next = std::nextafter(next, 100.0F))
            add(base, next);
        for (float distance = 0x1p-24F; distance < 100.0F; distance *= 1.003F)
            add(base, base + distance);
    }
    const std::size_t rows = lse_parts[0].size();
    std::vector<float> out_parts;
    for (std::uint64_t part = 0; part < 2; ++part)
        for (std::uint64_t i = 0; i < rows * head_dim; ++i)
            out_parts.push_back(i % head_dim == 0 ? static_cast<float>(1 - part)
                                                  : hashed(2, Kind::v, part, i, 0, 0));
    States expected;
    for (std::size_t row = 0; row < rows; ++row) {
        const MergeWeights weights = mergeWeights(lse_parts[0][row], lse_parts[1][row]);
        expected.lse.push_back(weights.lse);
        for (std::size_t i = row * head_dim; i < (row + 1) * head_dim; ++i)
            expected.out.push_back(mergeOut(weights, out_parts[i], out_parts[rows * head_dim + i]));
    }
    std::vector<float> lses = lse_parts[0];
    lses.insert(lses.end(), lse_parts[1].begin(), lse_parts[1].end());
    EXPECT_TRUE(sameBits(
        expected, this->merge(static_cast<std::int64_t>(rows), 2, head_dim, out_parts, lses)));
}

// The formula itself, in fp64: masses add, outputs are averaged by mass.
TYPED_TEST(MergeTest, MassesAddAndOutputsAverage) {
    for (const float distance : {0.0F, 0.3F, 3.0F, 30.0F, 200.0F})
        for (const float base : {-80000.0F, -3.0F, 0.0F, 500.0F}) {
            const States result = this->merge(1, 2, 64,
                                              [] {
                                                  std::vector<float> out(128, 1.0F);
                                                  std::fill(out.begin() + 64, out.end(), -3.0F);
                                                  return out;
                                              }(),
                                              {base, base - distance});
            const double right = std::exp(-static_cast<double>(base - (base - distance)));
            EXPECT_NEAR(result.out[0], (1.0 - 3.0 * right) / (1.0 + right), 1e-6);
            EXPECT_NEAR(result.lse[0], base + std::log1p(right),
                        std::max(1e-6, std::fabs(base) * 1e-7));
        }
}

template <typename Traits>
class CopyBlocksTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;
};
TYPED_TEST_SUITE(CopyBlocksTest, Devices, DeviceNames);

// A block's image, run by run, from the words of ops.h.
std::vector<std::byte> imageOf(const std::vector<std::byte>& memory, const BlockRuns& runs,
                               std::int64_t block) {
    std::vector<std::byte> image;
    for (std::int64_t outer = 0; outer < runs.outer; ++outer)
        for (std::int64_t inner = 0; inner < runs.inner; ++inner) {
            const auto* const run = memory.data() + block * runs.block_stride +
                                    outer * runs.outer_stride + inner * runs.inner_stride;
            image.insert(image.end(), run, run + runs.run_bytes);
        }
    return image;
}

TYPED_TEST(CopyBlocksTest, BetweenLayoutsAndBack) {
    Device& device = *this->device_;
    // 2 x 3 runs of 1000 bytes (layer-major), against one run (block-major), and against 12 runs of
    // 500.
    const std::vector<BlockRuns> shapes{{nullptr, 1000, 2, 90000, 3, 30000, 1000},
                                        {nullptr, 6000, 1, 0, 1, 0, 6000},
                                        {nullptr, 500, 4, 60000, 3, 20000, 500},
                                        {nullptr, 8000, 1, 0, 2, 3500, 3000}};
    constexpr std::size_t bytes = 250000;
    for (BlockRuns from : shapes)
        for (BlockRuns to : shapes) {
            std::vector<std::byte> source(bytes);
            for (std::size_t i = 0; i < bytes; ++i)
                source[i] = static_cast<std::byte>((i * 2654435761U) >> 13);
            const auto device_source = DeviceArray<std::byte>::of(device, source);
            const auto device_target = DeviceArray<std::byte>::poisoned(device, bytes);
            from.data = device_source.data();
            to.data = device_target.data();
            const std::vector<BlockPair> pairs{{.source = 3, .destination = 0},
                                               {.source = 0, .destination = 19},
                                               {.source = 11, .destination = 4}};
            device.operations().copyBlocks({from, to, pairs.data(), 3}, device.defaultStream());
            const auto target = device_target.download();
            std::size_t written = 0;
            for (const BlockPair& pair : pairs) {
                EXPECT_EQ(imageOf(source, from, pair.source),
                          imageOf(target, to, pair.destination));
                written += 6000;
            }
            std::size_t touched = 0;
            for (const std::byte byte : target)
                touched += byte != std::byte{0xFF} ? 1U : 0U;
            EXPECT_LE(touched, written);
            EXPECT_TRUE(sameBits(source, device_source.download()));
        }
}

TYPED_TEST(CopyBlocksTest, LargeBlocks) {
    Device& device = *this->device_;
    constexpr std::int64_t block = 3 * 1024 * 1024 + 512;
    std::vector<std::byte> source(static_cast<std::size_t>(3 * block));
    for (std::size_t i = 0; i < source.size(); ++i)
        source[i] = static_cast<std::byte>((i * 2654435761U) >> 17);
    const auto from = DeviceArray<std::byte>::of(device, source);
    const auto to = DeviceArray<std::byte>::poisoned(device, source.size());
    const std::vector<BlockPair> pairs{{.source = 0, .destination = 2},
                                       {.source = 2, .destination = 1}};
    const BlockRuns shape{nullptr, block, 1, 0, 1, 0, block};
    BlockRuns from_runs = shape;
    BlockRuns to_runs = shape;
    from_runs.data = from.data();
    to_runs.data = to.data();
    device.operations().copyBlocks({from_runs, to_runs, pairs.data(), 2}, device.defaultStream());
    const auto target = to.download();
    EXPECT_EQ(imageOf(source, shape, 0), imageOf(target, shape, 2));
    EXPECT_EQ(imageOf(source, shape, 2), imageOf(target, shape, 1));
    EXPECT_EQ(imageOf(target, shape, 0), std::vector<std::byte>(block, std::byte{0xFF}));
    device.operations().copyBlocks({from_runs, to_runs, nullptr, 0}, device.defaultStream());
}

template <typename Traits>
class OutputTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;
};
TYPED_TEST_SUITE(OutputTest, Devices, DeviceNames);

TYPED_TEST(OutputTest, PartsBecomeHeadsAndNumbersAreConverted) {
    Device& device = *this->device_;
    for (const std::int64_t rows : {0, 1, 7, 300})
        for (const std::int64_t parts : {1, 2, 5}) {
            constexpr std::int64_t heads = 3;
            constexpr int head_dim = 80;
            std::vector<float> source(static_cast<std::size_t>(rows * parts * heads * head_dim));
            for (std::size_t i = 0; i < source.size(); ++i)
                source[i] = 1000 * hashed(9, Kind::q, 0, 0, 0, i);
            const auto at = [&](std::int64_t row, std::int64_t part, std::int64_t rest) {
                return static_cast<std::size_t>(((part * rows + row) * heads * head_dim) + rest);
            };
            std::vector<float> ordered;
            for (std::int64_t row = 0; row < rows; ++row)
                for (std::int64_t part = 0; part < parts; ++part)
                    for (std::int64_t rest = 0; rest < heads * head_dim; ++rest)
                        ordered.push_back(source[at(row, part, rest)]);
            OutputParams params{.rows = rows, .parts = parts, .heads = heads, .head_dim = head_dim};
            const auto from = DeviceArray<float>::of(device, source);
            params.source = from.data();
            const auto wide = DeviceArray<float>::poisoned(device, source.size());
            params.destination = wide.data();
            device.operations().output(params, device.defaultStream());
            EXPECT_TRUE(sameBits(ordered, wide.download()));
            for (const NumberFormat format : {NumberFormat::fp16, NumberFormat::bf16}) {
                const auto narrow = DeviceArray<std::uint16_t>::poisoned(device, source.size());
                params.destination_format = format;
                params.destination = narrow.data();
                device.operations().output(params, device.defaultStream());
                std::vector<std::uint16_t> expected;
                for (const float number : ordered)
                    expected.push_back(toBits(format, number));
                EXPECT_TRUE(sameBits(expected, narrow.download()));
                // 16-bit parts, as they come from a gather of converted outputs.
                std::vector<std::uint16_t> narrow_source;
                for (const float number : source)
                    narrow_source.push_back(toBits(format, number));
                const auto narrow_from = DeviceArray<std::uint16_t>::of(device, narrow_source);
                const auto again = DeviceArray<std::uint16_t>::poisoned(device, source.size());
                OutputParams same = params;
                same.source_format = format;
                same.source = narrow_from.data();
                same.destination = again.data();
                device.operations().output(same, device.defaultStream());
                EXPECT_TRUE(sameBits(expected, again.download()));
            }
        }
}

// The state (0, sink) is the right operand of the one merge. Beside an lse of -inf lies NaN, which
// a sink replaces.
TYPED_TEST(OutputTest, SinksAreMergedIntoEachState) {
    Device& device = *this->device_;
    constexpr std::int64_t rows = 40;
    constexpr std::int64_t heads = 5;
    for (const int head_dim : {80, 96, 3})
        for (const std::int64_t parts : {1, 3}) {
            const std::int64_t states = parts * rows * heads;
            std::vector<float> sinks;
            for (std::int64_t head = 0; head < parts * heads; ++head)
                sinks.push_back(head == 1   ? empty_lse
                                : head == 2 ? 1e30F
                                            : 9 * hashed(1, Kind::q, 0, 0, 0, head));
            std::vector<float> out, lse, sink_lse;
            for (std::int64_t state = 0; state < states; ++state) {
                lse.push_back(state % 7 == 0 ? empty_lse : 9 * hashed(2, Kind::q, 0, 0, 0, state));
                sink_lse.push_back(sinks[static_cast<std::size_t>(state / (rows * heads) * heads +
                                                                  state % heads)]);
                for (int i = 0; i < head_dim; ++i)
                    out.push_back(lse.back() != empty_lse ? hashed(3, Kind::q, 0, 0, i, state)
                                  : sink_lse.back() == empty_lse ? 0.0F
                                                                 : std::nanf(""));
            }
            std::vector<float> expected(out.size());
            for (std::int64_t state = 0; state < states; ++state) {
                const auto s = static_cast<std::size_t>(state);
                const MergeWeights weights = mergeWeights(lse[s], sink_lse[s]);
                const std::int64_t part = state / (rows * heads);
                const std::int64_t row = state / heads % rows;
                const auto to = static_cast<std::size_t>(
                    ((row * parts + part) * heads + state % heads) * head_dim);
                for (std::size_t i = 0; i < static_cast<std::size_t>(head_dim); ++i) {
                    const float number = out[s * static_cast<std::size_t>(head_dim) + i];
                    const double share = 1 / (1 + std::exp(double{sink_lse[s]} - lse[s]));
                    expected[to + i] = mergeOut(weights, number, 0.0F);
                    EXPECT_NEAR(expected[to + i], lse[s] == empty_lse ? 0.0 : share * number, 1e-6);
                }
            }
            const auto device_out = DeviceArray<float>::of(device, out);
            const auto device_lse = DeviceArray<float>::of(device, lse);
            const auto device_sinks = DeviceArray<float>::of(device, sinks);
            OutputParams params{.rows = rows,
                                .parts = parts,
                                .heads = heads,
                                .head_dim = head_dim,
                                .source = device_out.data(),
                                .lse = device_lse.data(),
                                .sinks = device_sinks.data()};
            const auto wide = DeviceArray<float>::poisoned(device, out.size());
            params.destination = wide.data();
            device.operations().output(params, device.defaultStream());
            EXPECT_TRUE(sameBits(expected, wide.download()));
            wide.expectGuardIntact();
            for (const NumberFormat format : {NumberFormat::fp16, NumberFormat::bf16}) {
                std::vector<std::uint16_t> rounded;
                for (const float number : expected)
                    rounded.push_back(toBits(format, number));
                const auto narrow = DeviceArray<std::uint16_t>::poisoned(device, out.size());
                params.destination_format = format;
                params.destination = narrow.data();
                device.operations().output(params, device.defaultStream());
                EXPECT_TRUE(sameBits(rounded, narrow.download()));
                narrow.expectGuardIntact();
            }
            params.source_format = NumberFormat::bf16;
            params.destination_format = NumberFormat::bf16;
            EXPECT_THROW(device.operations().output(params, device.defaultStream()), Error);
        }
}

template <typename Traits>
class ReadRunsTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;
};
TYPED_TEST_SUITE(ReadRunsTest, Devices, DeviceNames);

// A probe that skipped bytes would report too high a ceiling: each byte's change shows.
TYPED_TEST(ReadRunsTest, ReadsEveryByteOfEveryRun) {
    Device& device = *this->device_;
    for (const std::int64_t run_bytes : {256, 2048, 32768}) {
        constexpr std::int64_t runs = 77;
        std::vector<std::byte> bytes(static_cast<std::size_t>(runs * run_bytes));
        for (std::size_t i = 0; i < bytes.size(); ++i)
            bytes[i] = static_cast<std::byte>(i * 31);
        std::vector<std::int32_t> order(runs);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(3));
        const auto device_order = DeviceArray<std::int32_t>::of(device, order);
        const auto sink = DeviceArray<std::uint64_t>::poisoned(device, 1);
        DeviceArray<std::byte> data = DeviceArray<std::byte>::of(device, bytes);
        const auto read = [&] {
            device.operations().readRuns(
                {data.data(), device_order.data(), runs, run_bytes, sink.data()},
                device.defaultStream());
            return sink.download()[0];
        };
        std::set<std::uint64_t> seen{read()};
        EXPECT_EQ(read(), *seen.begin());
        for (std::size_t at = 0; at < bytes.size(); at += bytes.size() / 97 + 1) {
            bytes[at] ^= std::byte{1};
            data.upload(bytes);
            EXPECT_NE(read(), *seen.begin()) << "byte " << at;
            bytes[at] ^= std::byte{1};
        }
        device.operations().readRuns({data.data(), device_order.data(), 0, run_bytes, sink.data()},
                                     device.defaultStream());
    }
}

template <typename Traits>
class DeviceTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;
};
TYPED_TEST_SUITE(DeviceTest, Devices, DeviceNames);

TYPED_TEST(DeviceTest, MemoryIsAlignedAndOwned) {
    Device& device = *this->device_;
    for (const std::size_t bytes : {1U, 255U, 4096U, (2U << 20) - 1, 2U << 20, (5U << 20) + 3}) {
        Buffer buffer = Buffer::onDevice(device, bytes).value();
        ASSERT_NE(buffer.data(), nullptr);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0U);
        EXPECT_EQ(buffer.bytes(), bytes);
        device.fill(buffer.data(), 0x5A, bytes, device.defaultStream());
        std::vector<std::byte> host(bytes);
        device.copy(host.data(), buffer.data(), bytes, device.defaultStream());
        device.synchronize(device.defaultStream());
        EXPECT_EQ(host, std::vector<std::byte>(bytes, std::byte{0x5A}));
        const std::byte* const data = buffer.data();
        Buffer moved = std::move(buffer);
        EXPECT_EQ(moved.data(), data);
        EXPECT_EQ(buffer.data(), nullptr);  // NOLINT(bugprone-use-after-move): what it leaves
        Buffer host_buffer = Buffer::onHost(device, bytes).value();
        EXPECT_NE(host_buffer.data(), nullptr);
        moved = std::move(host_buffer);
    }
}

TYPED_TEST(DeviceTest, OutOfMemoryIsAnAnswer) {
    Device& device = *this->device_;
    EXPECT_EQ(Buffer::onDevice(device, 0).value().data(), nullptr);
    EXPECT_GT(device.freeMemory(), 0);
    // A little more than there is must be refused too: the kernel would promise it.
    const std::size_t slightly_too_much =
        static_cast<std::size_t>(device.freeMemory()) + (std::size_t{8} << 30);
    for (const std::size_t bytes :
         {slightly_too_much, std::size_t{1} << 50, ~std::size_t{0} - 4096}) {
        EXPECT_EQ(device.allocate(bytes), nullptr);
        const auto buffer = Buffer::onDevice(device, bytes);
        ASSERT_FALSE(buffer.has_value());
        EXPECT_EQ(buffer.error().code, ErrorCode::does_not_fit);
        EXPECT_NE(buffer.error().message.find(std::to_string(bytes)), std::string::npos);
    }
}

TYPED_TEST(DeviceTest, StreamsAndEvents) {
    Device& device = *this->device_;
    Stream stream(device);
    Stream other(device);
    Event event(device);
    EXPECT_TRUE(event.finished());  // never recorded
    constexpr std::size_t bytes = 1 << 20;
    Buffer a = Buffer::onDevice(device, bytes).value();
    Buffer b = Buffer::onHost(device, bytes).value();
    device.fill(a.data(), 7, bytes, stream.view());
    event.record(stream.view());
    event.makeWait(other.view());
    device.copy(b.data(), a.data(), bytes, other.view());
    device.synchronize(other.view());
    EXPECT_TRUE(event.finished());
    EXPECT_EQ(b.data()[bytes - 1], std::byte{7});
    Stream moved = std::move(stream);
    Event moved_event = std::move(event);
    device.synchronize(moved.view());
    EXPECT_TRUE(moved_event.finished());
    EXPECT_FALSE(device.description().empty());
}

}  // namespace
}  // namespace kvgrid::test
