#include "comm/control.h"

#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "tests/comm/guarded_bytes.h"

namespace kvgrid::comm {
namespace {

// Counts broadcasts and passes everything on.
class CountingTransport final : public Transport {
public:
    explicit CountingTransport(Transport& inner) : inner_(&inner) {}

    [[nodiscard]] TransportKind kind() const noexcept override { return inner_->kind(); }
    [[nodiscard]] std::string description() const override { return inner_->description(); }
    [[nodiscard]] int rank() const noexcept override { return inner_->rank(); }
    [[nodiscard]] int size() const noexcept override { return inner_->size(); }
    [[nodiscard]] bool isCapturable() const noexcept override { return false; }
    void broadcast(std::span<std::byte> data, int root, StreamView stream) override {
        ++broadcasts;
        inner_->broadcast(data, root, stream);
    }
    void allGather(std::span<const std::byte> send, std::span<std::byte> receive,
                   StreamView stream) override {
        inner_->allGather(send, receive, stream);
    }
    void allGatherUneven(std::span<const std::byte> send, std::span<std::byte> receive,
                         std::span<const std::int64_t> counts, StreamView stream) override {
        inner_->allGatherUneven(send, receive, counts, stream);
    }
    void allToAll(std::span<const std::byte> send, std::span<const std::int64_t> send_counts,
                  std::span<std::byte> receive, std::span<const std::int64_t> receive_counts,
                  StreamView stream) override {
        inner_->allToAll(send, send_counts, receive, receive_counts, stream);
    }
    void allReduce(std::span<std::int64_t> values, Reduction reduction,
                   StreamView stream) override {
        inner_->allReduce(values, reduction, stream);
    }
    void allReduce(std::span<float> values, Reduction reduction, StreamView stream) override {
        inner_->allReduce(values, reduction, stream);
    }
    void barrier(StreamView stream) override { inner_->barrier(stream); }

    int broadcasts = 0;

private:
    Transport* inner_;
};

class ControlTest : public testing::Test {
protected:
    Watchdog watchdog_{0, std::chrono::minutes(2)};
    std::unique_ptr<Device> device_ = makeCpuDevice(1);
    std::unique_ptr<Transport> mpi_ = makeMpiTransport(watchdog_);
    CountingTransport transport_{*mpi_};
    Control control_{transport_, *device_};
};

TEST_F(ControlTest, BroadcastTakesOneMessageUpToTheLimitAndTwoBeyond) {
    constexpr std::size_t limit = Control::first_message_bytes;
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, limit - 1, limit, limit + 1,
                                    std::size_t{1'000'003}, std::size_t{5}, limit}) {
        const auto plan = pattern(bytes, 0, static_cast<int>(bytes));
        const auto ignored = pattern(bytes % 77, control_.rank());
        transport_.broadcasts = 0;
        const auto received = control_.broadcast(control_.rank() == 0 ? plan : ignored);
        EXPECT_TRUE(std::ranges::equal(received, plan)) << bytes << " bytes";
        EXPECT_EQ(transport_.broadcasts, bytes <= limit ? 1 : 2) << bytes << " bytes";
    }
}

TEST_F(ControlTest, AllGatherKeepsEveryRanksLength) {
    const auto bytes_of = [](int rank) {
        return pattern(rank % 3 == 1 ? 0 : 1 + static_cast<std::size_t>(rank) * 50'021, rank);
    };
    const auto all = control_.allGather(bytes_of(control_.rank()));
    ASSERT_EQ(all.size(), static_cast<std::size_t>(control_.size()));
    for (int rank = 0; rank < control_.size(); ++rank) {
        EXPECT_EQ(all[static_cast<std::size_t>(rank)], bytes_of(rank));
    }
    for (const auto& nothing : control_.allGather({}))
        EXPECT_TRUE(nothing.empty());
}

TEST_F(ControlTest, MinimumAndMaximumAreOverAllRanks) {
    const int last = control_.size() - 1;
    EXPECT_EQ(control_.minimum(100 - control_.rank()), 100 - last);
    EXPECT_EQ(control_.maximum(100 - control_.rank()), 100);
    EXPECT_EQ(control_.minimum(-7 * control_.rank()), -7 * last);
    using Limits = std::numeric_limits<std::int64_t>;
    const bool is_last = control_.rank() == last;
    EXPECT_EQ(control_.minimum(is_last ? Limits::min() : Limits::max()), Limits::min());
    EXPECT_EQ(control_.maximum(is_last ? Limits::max() : Limits::min()), Limits::max());
}

TEST_F(ControlTest, RanksAgreeWhenAllSucceed) {
    EXPECT_TRUE(control_.agree({}).has_value());
}

TEST_F(ControlTest, OneRanksFailureComesBackOnEveryRank) {
    for (int failing = 0; failing < control_.size(); ++failing) {
        const std::string why = "pool of " + std::to_string(failing) + " blocks";
        Result<void> mine;
        if (control_.rank() == failing) mine = failure(ErrorCode::does_not_fit, why);
        const auto verdict = control_.agree(mine);
        ASSERT_FALSE(verdict.has_value());
        EXPECT_EQ(verdict.error().code, ErrorCode::does_not_fit);
        EXPECT_EQ(verdict.error().message, "rank " + std::to_string(failing) + ": " + why);
    }
}

TEST_F(ControlTest, TheLowestFailingRankIsHeard) {
    const int first = control_.size() / 2;
    Result<void> mine;
    if (control_.rank() >= first) {
        // Codes and lengths differ, so that a mixture would show.
        mine = failure(control_.rank() == first ? ErrorCode::unavailable : ErrorCode::internal,
                       std::string(static_cast<std::size_t>(20'000 - control_.rank()), 'x'));
    }
    const auto verdict = control_.agree(mine);
    ASSERT_FALSE(verdict.has_value());
    EXPECT_EQ(verdict.error().code, ErrorCode::unavailable);
    EXPECT_EQ(verdict.error().message, "rank " + std::to_string(first) + ": " +
                                           std::string(20'000 - std::size_t(first), 'x'));
}

TEST_F(ControlTest, AFailureWithoutWordsIsAFailure) {
    const auto verdict = control_.agree(failure(ErrorCode::deadline, ""));
    ASSERT_FALSE(verdict.has_value());
    EXPECT_EQ(verdict.error().code, ErrorCode::deadline);
    EXPECT_EQ(verdict.error().message, "rank 0: ");
}

}  // namespace
}  // namespace kvgrid::comm
