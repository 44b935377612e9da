// Process as the one who starts and ends MPI: without mpirun, each case in a process of its own,
// since MPI starts only once in a process.
#include <kvgrid/process.h>

#include <mpi.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>

namespace kvgrid {
namespace {

const auto succeeded = testing::ExitedWithCode(0);

class ProcessLifetimeDeathTest : public testing::Test {
protected:
    ProcessLifetimeDeathTest() { testing::GTEST_FLAG(death_test_style) = "threadsafe"; }

    // In the child: what does not hold becomes its exit code and its last words.
    static void require(bool holds, const char* what) {
        if (holds) return;
        std::fprintf(stderr, "does not hold: %s\n", what);
        std::_Exit(99);
    }

    static bool mpiIs(int (*query)(int*)) {
        int flag = 0;
        query(&flag);
        return flag != 0;
    }
};

TEST_F(ProcessLifetimeDeathTest, StartsAloneAndEndsMpi) {
    EXPECT_EXIT(
        {
            {
                auto process = Process::start().value();
                require(process.rank() == 0 && process.size() == 1, "one rank");
                require(process.nodeRank() == 0 && process.nodeSize() == 1, "one rank of the node");
                require(process.allGather("abc") == std::vector<std::string>{"abc"}, "all-gather");
                require(process.broadcast("abc") == "abc", "broadcast");
                process.barrier();
                require(mpiIs(MPI_Initialized) && !mpiIs(MPI_Finalized), "MPI runs");
            }
            require(mpiIs(MPI_Finalized), "MPI has ended");
            std::exit(0);
        },
        succeeded, "");
}

bool leavesArgumentsAlone() {
    std::string name = "program";
    std::string flag = "--flag";
    char* arguments[] = {name.data(), flag.data(), nullptr};
    int argc = 2;
    char** argv = arguments;
    const auto process = Process::start(argc, argv).value();
    return argc == 2 && std::string(argv[1]) == "--flag" && process.size() == 1;
}

TEST_F(ProcessLifetimeDeathTest, TakesTheProgramsArguments) {
    EXPECT_EXIT(std::exit(leavesArgumentsAlone() ? 0 : 1), succeeded, "");
}

TEST_F(ProcessLifetimeDeathTest, CannotStartAgainOnceMpiHasEnded) {
    EXPECT_EXIT(
        {
            { const auto process = Process::start().value(); }
            const auto again = Process::start();
            require(!again && again.error().code == ErrorCode::unavailable, "unavailable");
            std::exit(0);
        },
        succeeded, "");
}

TEST_F(ProcessLifetimeDeathTest, AnUnavailableDeviceDoesNotUseMpiUp) {
    EXPECT_EXIT(
        {
            require(!Process::start({.device = DeviceKind::cuda}), "no CUDA");
            const auto process = Process::start({.device = DeviceKind::cpu});
            require(process.has_value(), "the CPU is there still");
            require(process->size() == 1, "one rank");
            std::exit(0);
        },
        succeeded, "");
}

TEST_F(ProcessLifetimeDeathTest, AbortEndsWithItsCodeAndSaysWhy) {
    EXPECT_EXIT(
        {
            auto process = Process::start().value();
            process.abort(3, "out of blocks");
        },
        testing::ExitedWithCode(3), "kvgrid: rank 0: out of blocks\n");
}

void throwOutOfScope() {
    const auto process = Process::start().value();
    throw std::runtime_error("something else failed");
}

TEST_F(ProcessLifetimeDeathTest, AnExceptionThatLeavesTheScopeAbortsTheJob) {
    EXPECT_EXIT(
        {
            try {
                throwOutOfScope();
            } catch (const std::exception&) {
                std::_Exit(98);  // the job must not live that long
            }
        },
        testing::ExitedWithCode(1), "kvgrid: rank 0: an exception left the scope of the Process");
}

TEST_F(ProcessLifetimeDeathTest, AnExceptionCaughtWithinTheScopeDoesNot) {
    EXPECT_EXIT(
        {
            {
                const auto process = Process::start().value();
                try {
                    throw std::runtime_error("handled");
                } catch (const std::exception&) {}
            }
            require(mpiIs(MPI_Finalized), "MPI has ended");
            std::exit(0);
        },
        succeeded, "");
}

// A destructor that runs while an exception unwinds may use a Process of its own.
TEST_F(ProcessLifetimeDeathTest, OneThatWasStartedWhileUnwindingEndsInPeace) {
    struct StartsWhenDestroyed {
        StartsWhenDestroyed() = default;
        StartsWhenDestroyed(const StartsWhenDestroyed&) = delete;
        StartsWhenDestroyed& operator=(const StartsWhenDestroyed&) = delete;
        ~StartsWhenDestroyed() { const auto process = Process::start().value(); }
    };
    EXPECT_EXIT(
        {
            try {
                const StartsWhenDestroyed last_words;
                throw std::runtime_error("unwinding");
            } catch (const std::exception&) {
                std::exit(0);
            }
        },
        succeeded, "");
}

}  // namespace
}  // namespace kvgrid
