// The joined output against a naive concatenation, bit for bit. To prove: swapping rows and parts
// in the interleave, or sending fp32 where 16 bits were asked for, fails GathersAllHeadsInOrder.
#include "comm/join.h"

#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

#include <gtest/gtest.h>

#include "kernels/number_formats.h"
#include "tests/comm/guarded_bytes.h"

namespace kvgrid::comm {
namespace {

constexpr std::int64_t max_rows = 9;

// What a head's output holds depends on who made it, and now and then it is a special value.
float stateValue(int rank, std::int64_t row, std::int64_t head, int dim) {
    const auto mixed = static_cast<std::uint64_t>(((rank * 131 + row) * 137 + head) * 257 + dim) *
                       0x9E3779B97F4A7C15U;
    switch (mixed >> 58) {
    case 0:
        return std::numeric_limits<float>::infinity();
    case 1:
        return -0.0F;
    case 2:
        return 1e-41F;  // a subnormal, and too small for fp16
    case 3:
        return 65520.0F;  // rounds to infinity in fp16
    default:
        return std::ldexp(static_cast<float>(static_cast<std::int32_t>(mixed >> 20)),
                          static_cast<int>(mixed % 40) - 50);
    }
}

void appendRounded(std::vector<std::byte>& bytes, float value, NumberFormat format) {
    const auto append = [&bytes](auto bits) {
        const auto raw = std::bit_cast<std::array<std::byte, sizeof bits>>(bits);
        bytes.insert(bytes.end(), raw.begin(), raw.end());
    };
    switch (format) {
    case NumberFormat::fp16:
        return append(fp16FromFloat(value));
    case NumberFormat::bf16:
        return append(bf16FromFloat(value));
    default:
        return append(value);
    }
}

using Case = std::tuple<NumberFormat, std::int64_t, int>;  // output format, local heads, head dim

class JoinTest : public testing::TestWithParam<Case> {
protected:
    [[nodiscard]] std::int64_t heads() const { return std::get<1>(GetParam()); }
    [[nodiscard]] int headDim() const { return std::get<2>(GetParam()); }
    [[nodiscard]] NumberFormat format() const { return std::get<0>(GetParam()); }

    [[nodiscard]] Join makeJoin() {
        return Join::create(*transport_, *device_, {max_rows, heads(), headDim(), format()})
            .value();
    }

    // The states of one rank, [rows, heads, head_dim] fp32.
    [[nodiscard]] std::vector<float> states(std::int64_t rows) const {
        std::vector<float> values;
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t head = 0; head < heads(); ++head) {
                for (int dim = 0; dim < headDim(); ++dim) {
                    values.push_back(stateValue(transport_->rank(), row, head, dim));
                }
            }
        }
        return values;
    }

    // Of the ranks [first, last), [rows, (last - first) * heads, head_dim] in the output format.
    [[nodiscard]] std::vector<std::byte> concatenated(std::int64_t rows, int first,
                                                      int last) const {
        std::vector<std::byte> bytes;
        for (std::int64_t row = 0; row < rows; ++row) {
            for (int rank = first; rank < last; ++rank) {
                for (std::int64_t head = 0; head < heads(); ++head) {
                    for (int dim = 0; dim < headDim(); ++dim) {
                        appendRounded(bytes, stateValue(rank, row, head, dim), format());
                    }
                }
            }
        }
        return bytes;
    }

    Watchdog watchdog_{0, std::chrono::minutes(2)};
    std::unique_ptr<Device> device_ = makeCpuDevice(2);
    std::unique_ptr<Transport> transport_ = makeMpiTransport(watchdog_);
    StreamView stream_ = device_->defaultStream();
};

TEST_P(JoinTest, GathersAllHeadsInOrder) {
    Join join = makeJoin();
    for (const std::int64_t rows : {std::int64_t{5}, std::int64_t{0}, std::int64_t{1}, max_rows}) {
        const auto expected = concatenated(rows, 0, transport_->size());
        const auto mine = states(rows);
        const GuardedBytes source(*device_, std::as_bytes(std::span(mine)));
        const GuardedBytes out(*device_, expected.size());
        join.gather(source.as<float>().data(), rows, out.span().data(), stream_);
        device_->synchronize(stream_);
        EXPECT_EQ(out.download(), expected) << rows << " rows";
        EXPECT_TRUE(out.guardsHold());
        EXPECT_TRUE(std::ranges::equal(source.download(), std::as_bytes(std::span(mine))));
    }
}

TEST_P(JoinTest, KeepsItsOwnHeads) {
    Join join = makeJoin();
    for (const std::int64_t rows : {std::int64_t{0}, std::int64_t{3}, max_rows}) {
        const auto expected = concatenated(rows, transport_->rank(), transport_->rank() + 1);
        const auto mine = states(rows);
        const GuardedBytes source(*device_, std::as_bytes(std::span(mine)));
        const GuardedBytes out(*device_, expected.size());
        join.keep(source.as<float>().data(), rows, out.span().data(), stream_);
        device_->synchronize(stream_);
        EXPECT_EQ(out.download(), expected) << rows << " rows";
        EXPECT_TRUE(out.guardsHold());
    }
}

TEST_P(JoinTest, MoreRowsThanItWasMadeForThrow) {
    Join join = makeJoin();
    const auto mine = states(max_rows + 1);
    std::vector<std::byte> out(mine.size() * 4 * static_cast<std::size_t>(transport_->size()));
    EXPECT_THROW(join.gather(mine.data(), max_rows + 1, out.data(), stream_), Error);
    EXPECT_THROW(join.gather(mine.data(), -1, out.data(), stream_), Error);
    EXPECT_THROW(join.keep(mine.data(), max_rows + 1, out.data(), stream_), Error);
}

TEST_P(JoinTest, ABufferThatDoesNotFitIsAnAnswer) {
    const auto join =
        Join::create(*transport_, *device_, {std::int64_t{1} << 40, heads(), headDim(), format()});
    if (transport_->size() == 1) {
        EXPECT_TRUE(join.has_value());  // needs none
    } else {
        ASSERT_FALSE(join.has_value());
        EXPECT_EQ(join.error().code, ErrorCode::does_not_fit);
    }
}

std::string caseName(const testing::TestParamInfo<Case>& info) {
    const auto& [format, heads, dim] = info.param;
    return std::string(name(format)) + "_heads" + std::to_string(heads) + "_dim" +
           std::to_string(dim);
}

INSTANTIATE_TEST_SUITE_P(
    All, JoinTest,
    testing::Combine(testing::Values(NumberFormat::fp32, NumberFormat::fp16, NumberFormat::bf16),
                     testing::Values(1, 3, 8), testing::Values(64, 80, 96, 128, 256)),
    caseName);

}  // namespace
}  // namespace kvgrid::comm
