#include "comm/fault_injection.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <thread>

#include <gtest/gtest.h>

#include <kvgrid/error.h>

namespace kvgrid::comm {
namespace {

#ifdef KVGRID_FAULT_INJECTION

using std::chrono::steady_clock;

class FaultInjectionDeathTest : public testing::Test {
protected:
    FaultInjectionDeathTest() { testing::GTEST_FLAG(death_test_style) = "threadsafe"; }

    static void visit(const char* fault, const char* place, int rank, int times) {
        ::setenv("KVGRID_FAULT", fault, 1);
        for (int i = 0; i < times; ++i)
            faultPoint(place, rank);
    }
};

TEST_F(FaultInjectionDeathTest, KillsAtTheVisitThatWasNamed) {
    EXPECT_EXIT(visit("kill:join:1:3", "join", 1, 3), testing::KilledBySignal(SIGKILL),
                "kvgrid: rank 1: injected fault: SIGKILL at join");
    EXPECT_EXIT((visit("kill:join:1:3", "join", 1, 2), std::_Exit(0)), testing::ExitedWithCode(0),
                "^$");
}

TEST_F(FaultInjectionDeathTest, TheFirstVisitIsMeantWhenNoneIsNamed) {
    EXPECT_EXIT(visit("kill:start:0", "start", 0, 1), testing::KilledBySignal(SIGKILL), "");
}

TEST_F(FaultInjectionDeathTest, OtherRanksPlacesAndLaterVisitsGoOn) {
    EXPECT_EXIT((visit("kill:join:1", "join", 0, 9), std::_Exit(0)), testing::ExitedWithCode(0),
                "");
    EXPECT_EXIT((visit("kill:join:1", "append", 1, 9), std::_Exit(0)), testing::ExitedWithCode(0),
                "");
    EXPECT_EXIT((visit("kill:attend:1:0", "attend", 1, 9), std::_Exit(0)),
                testing::ExitedWithCode(0), "");
}

// The visit returns, and the process dies where it is by then.
TEST_F(FaultInjectionDeathTest, AmidACollectiveTheKillComesBehindTheVisit) {
    const auto fault = "kill:collective:1:3";
    const auto go_on = [] {
        std::cerr << "in the collective\n";
        std::this_thread::sleep_for(collective_hold - collective_delay);
        std::_Exit(0);
    };
    EXPECT_EXIT((visit(fault, "collective", 1, 3), go_on()), testing::KilledBySignal(SIGKILL),
                "^in the collective\nkvgrid: rank 1: injected fault: SIGKILL at collective\n$");
    EXPECT_EXIT((visit(fault, "collective", 1, 2), go_on()), testing::ExitedWithCode(0),
                "^in the collective\n$");
}

TEST_F(FaultInjectionDeathTest, TheLowestOtherRankWaitsAtTheVisitThatWasNamed) {
    for (const char* fault : {"kill:collective:1:3", "stop:collective:1:3"}) {
        for (const int times : {2, 3, 9}) {
            EXPECT_EXIT(
                {
                    const auto begin = steady_clock::now();
                    visit(fault, "collective", 0, times);
                    std::_Exit(steady_clock::now() - begin < collective_hold ? 0 : 1);
                },
                testing::ExitedWithCode(times < 3 ? 0 : 1), "^$")
                << fault << ", " << times << " visits";
        }
    }
    const auto goes_on = [](const char* fault, int rank) {
        const auto begin = steady_clock::now();
        visit(fault, "collective", rank, 9);
        std::_Exit(steady_clock::now() - begin < collective_hold ? 0 : 1);
    };
    EXPECT_EXIT(goes_on("kill:join:1", 0), testing::ExitedWithCode(0), "^$");
    EXPECT_EXIT(goes_on("kill:collective:1", 2), testing::ExitedWithCode(0), "^$");
    EXPECT_EXIT(goes_on("kill:collective:0", 1), testing::ExitedWithCode(1), "^$");
    EXPECT_EXIT(goes_on("kill:collective:0", 2), testing::ExitedWithCode(0), "^$");
}

TEST_F(FaultInjectionDeathTest, AMisspeltFaultThrows) {
    for (const char* fault :
         {"kil:join:1", "kill:joni:1", "kill:collectives:1", "kill:join", "kill:join:x",
          "kill:join:-1", "kill:join:1:2:3", "kill", "kill:join:1:", ":"}) {
        EXPECT_EXIT(
            {
                try {
                    visit(fault, "join", 1, 1);
                } catch (const Error& error) {
                    std::_Exit(exitCode(error.code()));
                }
            },
            testing::ExitedWithCode(2), "")
            << fault;
    }
}

#else

TEST(FaultInjection, IsNotInThisBuild) {
    GTEST_SKIP() << "KVGRID_FAULT_INJECTION is off";
}

#endif

}  // namespace
}  // namespace kvgrid::comm
