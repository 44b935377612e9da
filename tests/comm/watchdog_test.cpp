#include "comm/watchdog.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include <gtest/gtest.h>

namespace kvgrid::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int not_ended = 42;  // the child outlived a deadline that should have ended it
const auto ended_by_deadline = testing::ExitedWithCode(5);

// A device of which only the events are asked.
class EventDevice final : public Device {
public:
    enum class Events { come, never_come, fail };
    explicit EventDevice(Events events) : events_(events) {}

    [[nodiscard]] bool finished(void*) override {
        if (events_ == Events::fail) throw Error(ErrorCode::internal, "the device has fallen off");
        return events_ == Events::come;
    }
    [[nodiscard]] void* createEvent(bool) override { return nullptr; }
    void destroyEvent(void*) noexcept override {}

    [[nodiscard]] DeviceKind kind() const noexcept override { return DeviceKind::cuda; }
    [[nodiscard]] std::string description() const override { return {}; }
    [[nodiscard]] std::string id() const override { return {}; }
    [[nodiscard]] int threads() const noexcept override { return 0; }
    [[nodiscard]] std::int64_t freeMemory() const override { return 0; }
    [[nodiscard]] const Operations& operations() const noexcept override { std::abort(); }
    [[nodiscard]] void* allocate(std::size_t) override { return nullptr; }
    void deallocate(void*, std::size_t) noexcept override {}
    [[nodiscard]] void* allocateHost(std::size_t) override { return nullptr; }
    void deallocateHost(void*, std::size_t) noexcept override {}
    [[nodiscard]] StreamView defaultStream() noexcept override { return {*this, nullptr}; }
    [[nodiscard]] void* createStream() override { return nullptr; }
    void destroyStream(void*) noexcept override {}
    void record(void*, StreamView) override {}
    void wait(StreamView, void*) override {}
    [[nodiscard]] double secondsBetween(void*, void*) override { return 0; }
    void beginCapture(StreamView) override {}
    [[nodiscard]] void* endCapture(StreamView) override { return nullptr; }
    void launchGraph(void*, StreamView) override {}
    void destroyGraph(void*) noexcept override {}
    [[nodiscard]] bool isCapturing(StreamView) override { return false; }
    void copy(void*, const void*, std::size_t, StreamView) override {}
    void fill(void*, std::uint8_t, std::size_t, StreamView) override {}
    void synchronize(StreamView) override {}

private:
    Events events_;
};

void say(const char* why) noexcept {
    std::fprintf(stderr, "said: %s\n", why);
}

class WatchdogDeathTest : public testing::Test {
protected:
    WatchdogDeathTest() { testing::GTEST_FLAG(death_test_style) = "threadsafe"; }

    [[noreturn]] static void hang() {
        std::this_thread::sleep_for(seconds(20));
        std::_Exit(not_ended);
    }
};

TEST_F(WatchdogDeathTest, NamesRankStepLayerAndOperation) {
    EXPECT_EXIT(
        {
            Watchdog watchdog(2, milliseconds(150));
            watchdog.setPlace(17, 3);
            const Watch watch(watchdog, "all-gather");
            hang();
        },
        ended_by_deadline,
        "^kvgrid: rank 2: step 17, layer 3: all-gather did not end within 150 ms\n$");
}

TEST_F(WatchdogDeathTest, NamesNoLayerOutsideOfLayers) {
    EXPECT_EXIT(
        {
            Watchdog watchdog(0, milliseconds(150));
            watchdog.setPlace(9'000'000'000, -1);
            const Watch watch(watchdog, "broadcast");
            hang();
        },
        ended_by_deadline,
        "^kvgrid: rank 0: step 9000000000: broadcast did not end within 150 ms\n$");
}

TEST_F(WatchdogDeathTest, NamesNoStepBeforeTheFirst) {
    EXPECT_EXIT(
        {
            Watchdog watchdog(11, seconds(1));
            const Watch watch(watchdog, "start of MPI");
            hang();
        },
        ended_by_deadline, "^kvgrid: rank 11: start of MPI did not end within 1 s\n$");
}

TEST_F(WatchdogDeathTest, NestedOperationsCountAsTheOutermost) {
    EXPECT_EXIT(
        {
            Watchdog watchdog(0, milliseconds(300));
            const Watch outer(watchdog, "join");
            // Inner ones begin and end for ever: they neither extend the deadline nor end the
            // watch.
            const auto give_up = steady_clock::now() + seconds(20);
            while (steady_clock::now() < give_up) {
                const Watch inner(watchdog, "all-gather");
                std::this_thread::sleep_for(milliseconds(5));
            }
            std::_Exit(not_ended);
        },
        ended_by_deadline, "join did not end within 300 ms");
}

TEST_F(WatchdogDeathTest, TheNextOperationIsWatchedToo) {
    EXPECT_EXIT(
        {
            Watchdog watchdog(0, milliseconds(150));
            { const Watch first(watchdog, "broadcast"); }
            const Watch second(watchdog, "barrier");
            hang();
        },
        ended_by_deadline, "barrier did not end");
}

// A full pipe, which blocks its writer.
void jamStderr() {
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe2(ends.data(), O_NONBLOCK), 0);
    const std::array<char, 4096> filler{};
    while (::write(ends[1], filler.data(), filler.size()) > 0)
        continue;
    ::fcntl(ends[1], F_SETFL, 0);
    ::dup2(ends[1], STDERR_FILENO);
}

TEST_F(WatchdogDeathTest, EndsTheProcessWhenNobodyReadsItsMessages) {
    EXPECT_EXIT(
        {
            jamStderr();
            Watchdog watchdog(0, milliseconds(150));
            const Watch watch(watchdog, "all-gather");
            hang();
        },
        ended_by_deadline, "");
}

TEST_F(WatchdogDeathTest, EndsTheProcessSoonAfterTheDeadline) {
    const auto begin = steady_clock::now();
    EXPECT_EXIT(
        {
            Watchdog watchdog(0, milliseconds(500));
            const Watch watch(watchdog, "all-gather");
            hang();
        },
        ended_by_deadline, "");
    const auto took = steady_clock::now() - begin;
    EXPECT_GE(took, milliseconds(500));
    EXPECT_LT(took, seconds(5));
}

TEST_F(WatchdogDeathTest, AStepWhoseWorkNeverEndsIsNamed) {
    EXPECT_EXIT(
        {
            EventDevice device(EventDevice::Events::never_come);
            Watchdog watchdog(1, milliseconds(150), say);
            watchdog.setPlace(9, 4);
            watchdog.expect(&device, 7, Event(device));
            watchdog.expect(&device, 8, Event(device));
            hang();
        },
        ended_by_deadline,
        "^kvgrid: rank 1: step 7: the device's work did not end within 150 ms\n"
        "said: rank 1: step 7: the device's work did not end within 150 ms\n$");
}

// An exception that left the watchdog's thread would end the process without a word.
TEST_F(WatchdogDeathTest, ADeviceThatFailsEndsTheProcessWithItsWords) {
    EXPECT_EXIT(
        {
            EventDevice device(EventDevice::Events::fail);
            Watchdog watchdog(1, seconds(60), say);
            watchdog.expect(&device, 7, Event(device));
            hang();
        },
        testing::ExitedWithCode(1),
        "^kvgrid: rank 1: step 7: the device has fallen off\n"
        "said: rank 1: step 7: the device has fallen off\n$");
}

// To prove: an owner that forgets what others expect fails the first, one that is not asked for the
// second.
TEST_F(WatchdogDeathTest, ForgettingIsOfOneOwner) {
    EXPECT_EXIT(
        {
            EventDevice device(EventDevice::Events::never_come);
            Watchdog watchdog(1, milliseconds(150));
            const int one = 1;
            const int other = 2;
            watchdog.expect(&one, 3, Event(device));
            watchdog.expect(&other, 4, Event(device));
            watchdog.forgetExpected(&one);
            hang();
        },
        ended_by_deadline, "step 4: ");
}

TEST(WatchdogTest, WorkThatEndsOrIsForgottenRaisesNoAlarm) {
    EventDevice done(EventDevice::Events::come);
    EventDevice stuck(EventDevice::Events::never_come);
    Watchdog watchdog(0, milliseconds(200));
    watchdog.expect(&done, 1, Event(done));
    watchdog.expect(&stuck, 2, Event(stuck));
    watchdog.forgetExpected(&stuck);
    std::this_thread::sleep_for(milliseconds(600));
}

// A false alarm would end this process with code 5.
TEST(WatchdogTest, ShortOperationsNeverAlarmHoweverManyThereAre) {
    // Long enough for a busy machine to come back to this thread.
    constexpr milliseconds timeout{1000};
    Watchdog watchdog(0, timeout);
    for (const auto pause : {milliseconds(0), milliseconds(1), milliseconds(20)}) {
        const auto end = steady_clock::now() + 3 * timeout / 2;
        while (steady_clock::now() < end) {
            const Watch watch(watchdog, "barrier");
            if (pause.count() != 0) std::this_thread::sleep_for(pause);
        }
    }
}

TEST(WatchdogTest, NothingIsWatchedBetweenOperations) {
    Watchdog watchdog(0, milliseconds(200));
    { const Watch watch(watchdog, "barrier"); }
    std::this_thread::sleep_for(milliseconds(600));
}

TEST(WatchdogTest, EndsAtOnceWhenDestroyed) {
    const auto begin = steady_clock::now();
    for (int i = 0; i < 20; ++i)
        const Watchdog watchdog(0, std::chrono::hours(24 * 365 * 1000));
    EXPECT_LT(steady_clock::now() - begin, milliseconds(500));
}

TEST(WatchdogTest, WatchingIsCheap) {
    constexpr int operations = 1'000'000;
    Watchdog watchdog(0, seconds(60));
    const auto begin = steady_clock::now();
    for (int i = 0; i < operations; ++i)
        const Watch watch(watchdog, "barrier");
    const auto each = (steady_clock::now() - begin) / operations;
    RecordProperty("ns_per_watch", static_cast<int>(each.count()));
    EXPECT_LT(each, std::chrono::microseconds(2));
}

}  // namespace
}  // namespace kvgrid::comm
