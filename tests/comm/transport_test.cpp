// One contract, run on every transport. A new one joins by a traits struct and a line in
// transports.h.
//
// To prove, in mpi_transport.cpp: a wrong step from chunk to chunk, a split that is not by bytes,
// or an own part that is not copied fails MpiInPieces; messages that are not split fail
// LargeMessages. In staged_transport.cpp: without the wait for the copy from the device, or with a
// part of a span that is not delivered, any test with contents fails on the GPU; without the
// question whether the stream is captured, ACapturedAllGatherRunsAtEachLaunch. In
// nccl_transport.cpp: counts added up wrongly fail the uneven tests, a group that is not ended
// hangs.
#include "comm/transport.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>

#include "tests/comm/guarded_bytes.h"
#include "tests/comm/transports.h"

namespace kvgrid::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

template <typename Traits>
class TransportTest : public OnTransport<Traits> {
protected:
    using Base = OnTransport<Traits>;
    using Base::device;
    using Base::rank;
    using Base::ranks;
    using Base::size;
    using Base::stream;
    using Base::transport;

    // Of one rank's part when all parts together are at most large_bytes.
    static std::vector<std::size_t> sizes() {
        return {0, 1, 3, 256, 4097, Traits::large_bytes / ranks()};
    }

    static void checkAllGatherUneven(const std::vector<std::int64_t>& counts);
    template <typename Count>
    static void checkAllToAll(const Count& count);
    template <typename T>
    static void checkAllReduce();
};

TYPED_TEST_SUITE(TransportTest, Transports);

std::vector<std::byte> patternOfAll(std::size_t bytes, int ranks) {
    std::vector<std::byte> all;
    for (int from = 0; from < ranks; ++from) {
        const auto part = pattern(bytes, from);
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

TYPED_TEST(TransportTest, BroadcastGivesEveryRankTheBytesOfEachRoot) {
    for (const std::size_t bytes : this->sizes()) {
        for (int root = 0; root < this->size(); ++root) {
            const auto expected = pattern(bytes, root);
            const GuardedBytes data(*this->device, bytes);
            if (this->rank() == root) data.upload(expected);
            this->transport->broadcast(data.span(), root, this->stream());
            EXPECT_EQ(data.download(), expected) << bytes << " bytes, root " << root;
            EXPECT_TRUE(data.guardsHold());
        }
    }
}

TYPED_TEST(TransportTest, AllGatherConcatenatesInRankOrder) {
    for (const std::size_t bytes : this->sizes()) {
        const auto mine = pattern(bytes, this->rank());
        const GuardedBytes send(*this->device, mine);
        const GuardedBytes receive(*this->device, bytes * this->ranks());
        this->transport->allGather(send.span(), receive.span(), this->stream());
        EXPECT_EQ(receive.download(), patternOfAll(bytes, this->size())) << bytes << " bytes";
        EXPECT_EQ(send.download(), mine);
        EXPECT_TRUE(send.guardsHold() && receive.guardsHold());
    }
}

TYPED_TEST(TransportTest, AllGatherMaySendFromItsPlace) {
    for (const std::size_t bytes : this->sizes()) {
        const GuardedBytes receive(*this->device, bytes * this->ranks());
        const std::size_t place = bytes * static_cast<std::size_t>(this->rank());
        receive.upload(pattern(bytes, this->rank()), place);
        this->transport->allGather(receive.span().subspan(place, bytes), receive.span(),
                                   this->stream());
        EXPECT_EQ(receive.download(), patternOfAll(bytes, this->size())) << bytes << " bytes";
        EXPECT_TRUE(receive.guardsHold());
    }
}

template <typename Traits>
void TransportTest<Traits>::checkAllGatherUneven(const std::vector<std::int64_t>& counts) {
    std::vector<std::byte> expected;
    for (int from = 0; from < size(); ++from) {
        const auto part =
            pattern(static_cast<std::size_t>(counts[static_cast<std::size_t>(from)]), from);
        expected.insert(expected.end(), part.begin(), part.end());
    }
    const auto mine = static_cast<std::size_t>(counts[static_cast<std::size_t>(rank())]);
    const GuardedBytes send(*device, pattern(mine, rank()));
    const GuardedBytes receive(*device, expected.size());
    transport->allGatherUneven(send.span(), receive.span(), counts, stream());
    EXPECT_EQ(receive.download(), expected);
    EXPECT_TRUE(send.guardsHold() && receive.guardsHold());
}

TYPED_TEST(TransportTest, UnevenAllGatherTakesAnyCounts) {
    const std::size_t ranks = this->ranks();
    const auto large = static_cast<std::int64_t>(TypeParam::large_bytes / ranks);
    std::vector<std::int64_t> counts(ranks, 0);
    this->checkAllGatherUneven(counts);
    for (std::size_t alone = 0; alone < ranks; ++alone) {
        std::fill(counts.begin(), counts.end(), 0);
        counts[alone] = 4097;
        this->checkAllGatherUneven(counts);
    }
    for (std::size_t from = 0; from < ranks; ++from) {
        counts[from] = static_cast<std::int64_t>(from % 3 == 1 ? 0 : 1 + from * 611);
    }
    this->checkAllGatherUneven(counts);
    for (std::size_t from = 0; from < ranks; ++from) {
        counts[from] = from % 2 == 0 ? large : 3;
    }
    this->checkAllGatherUneven(counts);
}

// count(from, to) bytes travel from one rank to another.
template <typename Traits>
template <typename Count>
void TransportTest<Traits>::checkAllToAll(const Count& count) {
    std::vector<std::int64_t> send_counts;
    std::vector<std::int64_t> receive_counts;
    std::vector<std::byte> mine;
    std::vector<std::byte> expected;
    for (int peer = 0; peer < size(); ++peer) {
        send_counts.push_back(count(rank(), peer));
        receive_counts.push_back(count(peer, rank()));
        const auto to = pattern(static_cast<std::size_t>(send_counts.back()), rank(), peer);
        const auto from = pattern(static_cast<std::size_t>(receive_counts.back()), peer, rank());
        mine.insert(mine.end(), to.begin(), to.end());
        expected.insert(expected.end(), from.begin(), from.end());
    }
    const GuardedBytes send(*device, mine);
    const GuardedBytes receive(*device, expected.size());
    transport->allToAll(send.span(), send_counts, receive.span(), receive_counts, stream());
    EXPECT_EQ(receive.download(), expected);
    EXPECT_EQ(send.download(), mine);
    EXPECT_TRUE(send.guardsHold() && receive.guardsHold());
}

TYPED_TEST(TransportTest, AllToAllTakesAnyCounts) {
    const auto large = static_cast<std::int64_t>(TypeParam::large_bytes / this->ranks());
    const int last = this->size() - 1;
    for (const std::int64_t bytes : {0, 1, 3, 4097}) {
        this->checkAllToAll([bytes](int, int) { return bytes; });
    }
    this->checkAllToAll([](int from, int to) -> std::int64_t {
        return (from + 2 * to) % 3 == 0 ? 0 : 1 + from * 811 + to * 173;
    });
    this->checkAllToAll([](int from, int to) -> std::int64_t { return from == to ? 0 : 1002; });
    // Everything from one rank to another.
    this->checkAllToAll([large, last](int from, int to) -> std::int64_t {
        return from == 0 && to == last ? large : 0;
    });
}

template <typename T>
T reduced(Reduction reduction, const std::vector<T>& values) {
    switch (reduction) {
    case Reduction::sum:
        return std::accumulate(values.begin(), values.end(), T{});
    case Reduction::minimum:
        return *std::min_element(values.begin(), values.end());
    case Reduction::maximum:
        return *std::max_element(values.begin(), values.end());
    }
    return T{};
}

// Sums are exact in either type; of an int64 the bits that a double would lose matter.
template <typename T>
T reduceValue(std::size_t index, int rank) {
    const auto mixed = static_cast<std::int64_t>((index + 1) * 7919 + std::size_t(rank) * 104729);
    const std::int64_t small = mixed % 2001 - 1000;
    if constexpr (std::is_same_v<T, std::int64_t>) return small * (std::int64_t{1} << 46) + rank;
    return static_cast<T>(small);
}

template <typename Traits>
template <typename T>
void TransportTest<Traits>::checkAllReduce() {
    for (const Reduction reduction : {Reduction::sum, Reduction::minimum, Reduction::maximum}) {
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{3},
                                        std::size_t{4097}, Traits::large_bytes / 16 / sizeof(T)}) {
            std::vector<T> mine(count);
            std::vector<T> expected(count);
            std::vector<T> of_ranks(ranks());
            for (std::size_t i = 0; i < count; ++i) {
                for (int from = 0; from < size(); ++from) {
                    of_ranks[static_cast<std::size_t>(from)] = reduceValue<T>(i, from);
                }
                mine[i] = reduceValue<T>(i, rank());
                expected[i] = reduced(reduction, of_ranks);
            }
            const GuardedBytes values(*device, std::as_bytes(std::span(mine)));
            transport->allReduce(values.as<T>(), reduction, stream());
            const auto result = values.download();
            EXPECT_TRUE(std::ranges::equal(result, std::as_bytes(std::span(expected))))
                << count << " elements";
            EXPECT_TRUE(values.guardsHold());
        }
    }
}

TYPED_TEST(TransportTest, AllReduceOfIntegers) {
    this->template checkAllReduce<std::int64_t>();
}

TYPED_TEST(TransportTest, AllReduceOfFloats) {
    this->template checkAllReduce<float>();
}

template <typename T>
std::vector<T> numbersIn(const GuardedBytes& bytes) {
    const std::vector<std::byte> raw = bytes.download();
    std::vector<T> numbers(raw.size() / sizeof(T));
    std::memcpy(numbers.data(), raw.data(), raw.size());
    return numbers;
}

TYPED_TEST(TransportTest, NobodyLeavesABarrierBeforeTheLastHasCome) {
    for (int late = 0; late < this->size(); ++late) {
        this->transport->barrier(this->stream());
        if (this->rank() == late) std::this_thread::sleep_for(milliseconds(30));
        // The ranks of this test share a host, and so its clock.
        const std::int64_t came = steady_clock::now().time_since_epoch().count();
        this->transport->barrier(this->stream());
        const std::int64_t left = steady_clock::now().time_since_epoch().count();
        const GuardedBytes last(*this->device, std::as_bytes(std::span(&came, 1)));
        this->transport->allReduce(last.template as<std::int64_t>(), Reduction::maximum,
                                   this->stream());
        EXPECT_GE(left, numbersIn<std::int64_t>(last).front());
    }
}

TYPED_TEST(TransportTest, RanksAreNumbered) {
    const std::int64_t mine = this->rank();
    const GuardedBytes send(*this->device, std::as_bytes(std::span(&mine, 1)));
    const GuardedBytes all(*this->device, this->ranks() * sizeof mine);
    this->transport->allGather(send.span(), all.span(), this->stream());
    std::vector<std::int64_t> expected(this->ranks());
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(numbersIn<std::int64_t>(all), expected);
    EXPECT_FALSE(this->transport->description().empty());
}

// Every rank makes the same mistake here, so that none is left waiting.
TYPED_TEST(TransportTest, WrongSizesThrowBeforeAnythingIsSent) {
    Transport& wrong = *this->transport;
    const std::size_t ranks = this->ranks();
    const GuardedBytes send(*this->device, 8);
    const GuardedBytes receive(*this->device, 8 * ranks + 1);
    const std::vector<std::int64_t> eights(ranks, 8);
    const std::vector<std::int64_t> too_few(ranks - 1, 8);
    std::vector<std::int64_t> negative = eights;
    negative[0] = -8;
    const auto all = receive.span().first(8 * ranks);
    const StreamView stream = this->stream();
    EXPECT_THROW(wrong.broadcast(send.span(), this->size(), stream), Error);
    EXPECT_THROW(wrong.broadcast(send.span(), -1, stream), Error);
    EXPECT_THROW(wrong.allGather(send.span(), receive.span(), stream), Error);
    EXPECT_THROW(wrong.allGatherUneven(send.span(), receive.span(), eights, stream), Error);
    EXPECT_THROW(wrong.allGatherUneven(send.span().first(7), all, eights, stream), Error);
    EXPECT_THROW(wrong.allGatherUneven(send.span(), all, too_few, stream), Error);
    EXPECT_THROW(wrong.allToAll(send.span(), eights, receive.span(), eights, stream), Error);
    EXPECT_THROW(wrong.allToAll(all, eights, all, too_few, stream), Error);
    EXPECT_THROW(wrong.allToAll(all, negative, all, negative, stream), Error);
}

#ifdef KVGRID_TEST_CUDA

// The stream of a capture is one of its own, so that the data of each launch can be laid out on the
// other.
TYPED_TEST(TransportTest, ACapturedAllGatherRunsAtEachLaunch) {
    constexpr std::size_t bytes = 4097;
    const GuardedBytes send(*this->device, bytes);
    const GuardedBytes receive(*this->device, bytes * this->ranks());
    const Stream graphs(*this->device);
    const auto gather = [&](StreamView stream) {
        this->transport->allGather(send.span(), receive.span(), stream);
    };

    this->device->beginCapture(graphs.view());
    if (!this->transport->isCapturable()) {
        try {
            gather(graphs.view());
            ADD_FAILURE() << "an eager collective was captured";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
        }
        // It left nothing behind: the capture ends as an empty one, and eager calls go on.
        EXPECT_NO_THROW(static_cast<void>(Graph::endCapture(graphs.view())));
        send.upload(pattern(bytes, this->rank()));
        gather(graphs.view());
        EXPECT_EQ(receive.download(), patternOfAll(bytes, this->size()));
        return;
    }
    gather(graphs.view());
    const Graph graph = Graph::endCapture(graphs.view());
    const std::vector<std::byte> poison(receive.span().size(), std::byte{GuardedBytes::poison});
    EXPECT_EQ(receive.download(), poison);  // noted, not run
    for (int launch = 0; launch < 3; ++launch) {
        std::vector<std::byte> expected;
        for (int from = 0; from < this->size(); ++from) {
            const auto part = pattern(bytes, from, 1 + launch);
            expected.insert(expected.end(), part.begin(), part.end());
        }
        send.upload(pattern(bytes, this->rank(), 1 + launch));
        receive.upload(poison);
        graph.launch(graphs.view());
        this->device->synchronize(graphs.view());
        EXPECT_EQ(receive.download(), expected) << "launch " << launch;
        EXPECT_TRUE(send.guardsHold() && receive.guardsHold());
    }
}

// A call may come on any stream, and follows what that stream has before it.
TYPED_TEST(TransportTest, TheResultIsOrderedByTheStreamOfTheCall) {
    constexpr std::size_t bytes = 4096;
    const GuardedBytes mine(*this->device, pattern(bytes, this->rank()));
    const GuardedBytes send(*this->device, bytes);
    const GuardedBytes receive(*this->device, bytes * this->ranks());
    const GuardedBytes kept(*this->device, bytes * this->ranks());
    const GuardedBytes large(*this->device, std::size_t{256} << 20);
    const Stream own(*this->device);
    for (int i = 0; i < 4; ++i)  // so that what follows is late
        this->device->fill(large.span().data(), 0, large.span().size(), own.view());
    this->device->copy(send.span().data(), mine.span().data(), bytes, own.view());
    this->transport->allGather(send.span(), receive.span(), own.view());
    this->device->copy(kept.span().data(), receive.span().data(), receive.span().size(),
                       own.view());
    this->device->synchronize(own.view());
    EXPECT_EQ(kept.download(), patternOfAll(bytes, this->size()));
}

#else

TEST(CpuDevice, HasNoGraphs) {
    const auto device = makeCpuDevice(1);
    try {
        device->beginCapture(device->defaultStream());
        ADD_FAILURE() << "a capture began";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::unavailable);
    }
    EXPECT_FALSE(device->isCapturing(device->defaultStream()));
}

#endif

// Spans and counts of more than 2^31 bytes, as they are: kept in an int they would be negative.
template <typename Traits>
class LargeMessages : public OnTransport<Traits> {
protected:
    using Base = OnTransport<Traits>;
    using Base::device;

    static constexpr std::size_t part_bytes = (std::size_t{1} << 30) + 8;

    // What all ranks together need, of the device and of the host, which a test may have in one.
    static bool haveRoom() {
        const std::int64_t needed = std::int64_t{device->kind() == DeviceKind::cpu ? 6 : 12} << 30;
        int room = std::min(device->freeMemory(), makeCpuDevice(1)->freeMemory()) >= needed ? 1 : 0;
        MPI_Allreduce(MPI_IN_PLACE, &room, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
        return room == 1;
    }

    // Word i of `data` is i, from `begin` to `end`.
    static void number(const GuardedBytes& data, std::size_t begin, std::size_t end) {
        std::vector<std::uint64_t> words;
        for (; begin < end; begin += words.size()) {
            words.resize(std::min(piece_words, end - begin));
            std::iota(words.begin(), words.end(), begin);
            data.upload(std::as_bytes(std::span(words)), begin * 8);
        }
    }

    // The first word that is not its own number; of all words, how many there are.
    static std::size_t firstWrongWord(const GuardedBytes& data) {
        const std::size_t count = data.as<std::uint64_t>().size();
        std::vector<std::uint64_t> words;
        for (std::size_t begin = 0; begin < count; begin += words.size()) {
            words.resize(std::min(piece_words, count - begin));
            device->copy(words.data(), data.as<std::uint64_t>().data() + begin, words.size() * 8,
                         device->defaultStream());
            device->synchronize(device->defaultStream());
            for (std::size_t i = 0; i < words.size(); ++i)
                if (words[i] != begin + i) return begin + i;
        }
        return count;
    }

private:
    static constexpr std::size_t piece_words = std::size_t{8} << 20;
};

TYPED_TEST_SUITE(LargeMessages, LargeTransports);

TYPED_TEST(LargeMessages, TravelWhole) {
    if (this->size() != 2) GTEST_SKIP() << "runs on 2 ranks";
    if (!this->haveRoom()) GTEST_SKIP() << "not enough memory is free";
#ifdef __SANITIZE_ADDRESS__
    GTEST_SKIP() << "too slow under AddressSanitizer";
#endif

    const std::size_t part = this->part_bytes;
    const std::size_t place = static_cast<std::size_t>(this->rank()) * part;
    const GuardedBytes data(*this->device, 2 * part);
    const std::size_t words = 2 * part / 8;
    const auto forget = [&] {
        this->device->fill(data.span().data(), 0, 2 * part, this->stream());
    };

    this->number(data, place / 8, (place + part) / 8);
    this->transport->allGather(data.span().subspan(place, part), data.span(), this->stream());
    EXPECT_EQ(this->firstWrongWord(data), words);

    if (this->rank() == 0) forget();
    this->transport->broadcast(data.span(), 1, this->stream());
    EXPECT_EQ(this->firstWrongWord(data), words);

    // Everything from rank 0 to rank 1.
    if (this->rank() == 1) forget();
    const auto all = static_cast<std::int64_t>(2 * part);
    const std::span<std::byte> none = data.span().first(0);
    if (this->rank() == 0)
        this->transport->allToAll(data.span(), std::vector{std::int64_t{0}, all}, none,
                                  std::vector<std::int64_t>(2), this->stream());
    else
        this->transport->allToAll(none, std::vector<std::int64_t>(2), data.span(),
                                  std::vector{all, std::int64_t{0}}, this->stream());
    EXPECT_EQ(this->firstWrongWord(data), words);
    EXPECT_TRUE(data.guardsHold());
}

}  // namespace
}  // namespace kvgrid::comm
