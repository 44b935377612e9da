// The joined output against a naive concatenation, bit for bit. To prove: swapping rows and parts
// in the interleave, or sending fp32 where 16 bits were asked for, fails GathersAllHeadsInOrder.
#include "comm/join.h"

#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "kernels/attention_state.h"
#include "kernels/number_formats.h"
#include "tests/comm/guarded_bytes.h"
#include "tests/comm/transports.h"

namespace kvgrid::comm {
namespace {

constexpr std::int64_t max_rows = 9;
constexpr int most_head_dim = 256;

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

struct Case {
    NumberFormat format;  // of the output
    std::int64_t heads;   // of each rank
    int head_dim;
};

std::vector<Case> cases() {
    std::vector<Case> all;
    for (const NumberFormat format : {NumberFormat::fp32, NumberFormat::fp16, NumberFormat::bf16}) {
        for (const std::int64_t heads : {1, 3, 8}) {
            for (const int head_dim : {64, 80, 96, 128, most_head_dim})
                all.push_back({format, heads, head_dim});
        }
    }
    return all;
}

std::string text(const Case& shape) {
    return std::string(name(shape.format)) + ", " + std::to_string(shape.heads) + " heads of " +
           std::to_string(shape.head_dim);
}

// The states of one rank, [rows, heads, head_dim] fp32.
std::vector<float> states(const Case& shape, std::int64_t rows, int rank) {
    std::vector<float> values;
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t head = 0; head < shape.heads; ++head) {
            for (int dim = 0; dim < shape.head_dim; ++dim)
                values.push_back(stateValue(rank, row, head, dim));
        }
    }
    return values;
}

// Of the ranks [first, last), [rows, (last - first) * heads, head_dim] in the output format.
std::vector<std::byte> concatenated(const Case& shape, std::int64_t rows, int first, int last) {
    std::vector<std::byte> bytes;
    for (std::int64_t row = 0; row < rows; ++row) {
        for (int rank = first; rank < last; ++rank) {
            for (std::int64_t head = 0; head < shape.heads; ++head) {
                for (int dim = 0; dim < shape.head_dim; ++dim)
                    appendRounded(bytes, stateValue(rank, row, head, dim), shape.format);
            }
        }
    }
    return bytes;
}

template <typename Traits>
class JoinTest : public OnTransport<Traits> {
protected:
    using Base = OnTransport<Traits>;

    static Result<Join> tryJoin(const Case& shape, std::int64_t rows) {
        return Join::create(*Base::transport, *Base::device,
                            {rows, shape.heads, most_head_dim, shape.format});
    }
    // One for layers of all head dims.
    static Join makeJoin(const Case& shape) { return tryJoin(shape, max_rows).value(); }
};

TYPED_TEST_SUITE(JoinTest, JoinTransports);

TYPED_TEST(JoinTest, GathersAllHeadsInOrder) {
    for (const Case& shape : cases()) {
        SCOPED_TRACE(text(shape));
        Join join = this->makeJoin(shape);
        for (const std::int64_t rows :
             {std::int64_t{5}, std::int64_t{0}, std::int64_t{1}, max_rows}) {
            const auto expected = concatenated(shape, rows, 0, this->size());
            const auto mine = states(shape, rows, this->rank());
            const GuardedBytes source(*this->device, std::as_bytes(std::span(mine)));
            const GuardedBytes out(*this->device, expected.size());
            join.gather({.out = source.as<float>().data()}, rows, shape.head_dim, out.span().data(),
                        this->stream());
            EXPECT_EQ(out.download(), expected) << rows << " rows";
            EXPECT_TRUE(out.guardsHold());
            EXPECT_TRUE(std::ranges::equal(source.download(), std::as_bytes(std::span(mine))));
        }
    }
}

TYPED_TEST(JoinTest, KeepsItsOwnHeads) {
    for (const Case& shape : cases()) {
        SCOPED_TRACE(text(shape));
        Join join = this->makeJoin(shape);
        for (const std::int64_t rows : {std::int64_t{0}, std::int64_t{3}, max_rows}) {
            const auto expected = concatenated(shape, rows, this->rank(), this->rank() + 1);
            const auto mine = states(shape, rows, this->rank());
            const GuardedBytes source(*this->device, std::as_bytes(std::span(mine)));
            const GuardedBytes out(*this->device, expected.size());
            join.keep({.out = source.as<float>().data()}, rows, shape.head_dim, out.span().data(),
                      this->stream());
            EXPECT_EQ(out.download(), expected) << rows << " rows";
            EXPECT_TRUE(out.guardsHold());
        }
    }
}

// Each rank has its own heads' sinks, and they are merged in fp32.
TYPED_TEST(JoinTest, SinksAreMergedOnTheWay) {
    const auto lse = [](int rank, std::int64_t row, std::int64_t head) {
        return row == 1 ? empty_lse : static_cast<float>((rank * 5 + row * 3 + head) % 7) - 3.0F;
    };
    const auto sink = [](int rank, std::int64_t head) {
        return head == 2 ? empty_lse : static_cast<float>((rank * 3 + head) % 5) - 2.0F;
    };
    for (const Case& shape : cases()) {
        SCOPED_TRACE(text(shape));
        Join join = this->makeJoin(shape);
        const auto outputs = [&](int first, int last) {
            std::vector<std::byte> bytes;
            for (std::int64_t row = 0; row < max_rows; ++row) {
                for (int rank = first; rank < last; ++rank) {
                    for (std::int64_t head = 0; head < shape.heads; ++head) {
                        const MergeWeights weights =
                            mergeWeights(lse(rank, row, head), sink(rank, head));
                        for (int dim = 0; dim < shape.head_dim; ++dim)
                            appendRounded(bytes,
                                          mergeOut(weights, stateValue(rank, row, head, dim), 0.0F),
                                          shape.format);
                    }
                }
            }
            return bytes;
        };
        const auto mine = states(shape, max_rows, this->rank());
        std::vector<float> my_lse, my_sinks;
        for (std::int64_t row = 0; row < max_rows; ++row) {
            for (std::int64_t head = 0; head < shape.heads; ++head)
                my_lse.push_back(lse(this->rank(), row, head));
        }
        for (std::int64_t head = 0; head < shape.heads; ++head)
            my_sinks.push_back(sink(this->rank(), head));
        const GuardedBytes source(*this->device, std::as_bytes(std::span(mine)));
        const GuardedBytes source_lse(*this->device, std::as_bytes(std::span(my_lse)));
        const GuardedBytes source_sinks(*this->device, std::as_bytes(std::span(my_sinks)));
        const Join::States sunk{.out = source.as<float>().data(),
                                .lse = source_lse.as<float>().data(),
                                .sinks = source_sinks.as<float>().data()};
        const auto all = outputs(0, this->size());
        const GuardedBytes out(*this->device, all.size());
        join.gather(sunk, max_rows, shape.head_dim, out.span().data(), this->stream());
        EXPECT_EQ(out.download(), all);
        EXPECT_TRUE(out.guardsHold());
        const auto own = outputs(this->rank(), this->rank() + 1);
        const GuardedBytes kept(*this->device, own.size());
        join.keep(sunk, max_rows, shape.head_dim, kept.span().data(), this->stream());
        EXPECT_EQ(kept.download(), own);
        EXPECT_TRUE(kept.guardsHold());
    }
}

TYPED_TEST(JoinTest, MoreThanItWasMadeForThrows) {
    for (const Case& shape : cases()) {
        SCOPED_TRACE(text(shape));
        Join join = this->makeJoin(shape);
        const auto mine = states(shape, max_rows + 1, this->rank());
        const GuardedBytes source(*this->device, std::as_bytes(std::span(mine)));
        const GuardedBytes out(*this->device, mine.size() * 4 * this->ranks());
        const Join::States from{.out = source.as<float>().data()};
        std::byte* const to = out.span().data();
        const int dim = shape.head_dim;
        EXPECT_THROW(join.gather(from, max_rows + 1, dim, to, this->stream()), Error);
        EXPECT_THROW(join.gather(from, -1, dim, to, this->stream()), Error);
        EXPECT_THROW(join.gather(from, 1, most_head_dim + 1, to, this->stream()), Error);
        EXPECT_THROW(join.keep(from, max_rows + 1, dim, to, this->stream()), Error);
        EXPECT_THROW(join.keep(from, 1, most_head_dim + 1, to, this->stream()), Error);
    }
}

TYPED_TEST(JoinTest, ABufferThatDoesNotFitIsAnAnswer) {
    for (const Case& shape : cases()) {
        SCOPED_TRACE(text(shape));
        const auto join = this->tryJoin(shape, std::int64_t{1} << 40);
        if (this->size() == 1) {
            EXPECT_TRUE(join.has_value());  // needs none
        } else {
            ASSERT_FALSE(join.has_value());
            EXPECT_EQ(join.error().code, ErrorCode::does_not_fit);
        }
    }
}

}  // namespace
}  // namespace kvgrid::comm
