// Process inside a program that runs MPI already. How it starts and ends MPI itself is in
// process_lifetime_test.cpp.
#include <kvgrid/process.h>

#include <mpi.h>
#include <unistd.h>

#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "comm/process.h"
#include "kernels/device.h"

namespace kvgrid {
namespace {

ProcessOptions patient() {
    return {.timeout = std::chrono::minutes(2)};
}

struct World {
    World() {
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
    }
    int rank = 0;
    int size = 1;
};

bool mpiRuns() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    return finalized == 0;
}

TEST(Process, UsesTheHostProgramsMpiAndLeavesItRunning) {
    const World world;
    for (int round = 0; round < 3; ++round) {
        const auto process = Process::start(patient()).value();
        EXPECT_EQ(process.rank(), world.rank);
        EXPECT_EQ(process.size(), world.size);
        EXPECT_EQ(process.device(), DeviceKind::cpu);
        EXPECT_EQ(process.transport(), TransportKind::mpi);
    }
    EXPECT_TRUE(mpiRuns());
    MPI_Barrier(MPI_COMM_WORLD);
}

TEST(Process, KnowsTheRanksOfTheJobAndOfTheNode) {
    const auto process = Process::start(patient()).value();
    ASSERT_EQ(process.ranks().size(), static_cast<std::size_t>(process.size()));
    for (int rank = 0; rank < process.size(); ++rank) {
        const auto& description = process.ranks()[static_cast<std::size_t>(rank)];
        EXPECT_EQ(description.rank, rank);
        EXPECT_FALSE(description.host.empty());
        EXPECT_GT(description.pid, 0);
        EXPECT_NE(description.device.find("cpu"), std::string::npos);
    }
    const auto& mine = process.ranks()[static_cast<std::size_t>(process.rank())];
    EXPECT_EQ(mine.pid, ::getpid());
    // All ranks of this test run on one host.
    EXPECT_EQ(process.nodeRank(), process.rank());
    EXPECT_EQ(process.nodeSize(), process.size());
}

TEST(Process, ExchangesBytesOfAnyLength) {
    auto process = Process::start(patient()).value();
    const auto text_of = [](int rank) {
        return std::string(static_cast<std::size_t>(rank) * 10'000, static_cast<char>('a' + rank)) +
               std::string("\0end", 4);
    };
    const auto all = process.allGather(text_of(process.rank()));
    ASSERT_EQ(all.size(), static_cast<std::size_t>(process.size()));
    for (int rank = 0; rank < process.size(); ++rank) {
        EXPECT_EQ(all[static_cast<std::size_t>(rank)], text_of(rank));
    }
    EXPECT_EQ(process.broadcast(text_of(process.rank() + 3)), text_of(3));
    EXPECT_EQ(process.broadcast(""), "");
    process.barrier();
}

TEST(Process, NamesLibrariesWithVersions) {
    const auto process = Process::start(patient()).value();
    const auto libraries = process.libraries();
    ASSERT_GE(libraries.size(), 1U);
    for (const auto& library : libraries) {
        EXPECT_NE(library.find_first_of("0123456789"), std::string::npos) << library;
        EXPECT_EQ(library.find_first_of("\n\t,"), std::string::npos) << library;
    }
#ifdef OPEN_MPI
    EXPECT_EQ(libraries[0], "Open MPI " + std::to_string(OMPI_MAJOR_VERSION) + "." +
                                std::to_string(OMPI_MINOR_VERSION) + "." +
                                std::to_string(OMPI_RELEASE_VERSION));
#endif
}

TEST(Process, CurrentFollowsTheLivingOne) {
    EXPECT_EQ(Process::current(), nullptr);
    {
        auto first = Process::start(patient()).value();
        EXPECT_EQ(Process::current(), &first);
        const Process moved(std::move(first));
        EXPECT_EQ(Process::current(), &moved);
    }
    EXPECT_EQ(Process::current(), nullptr);
}

TEST(Process, ASecondOneThrowsAndLeavesTheFirst) {
    auto process = Process::start(patient()).value();
    EXPECT_THROW((void)Process::start(patient()), Error);
    EXPECT_EQ(Process::current(), &process);
    process.barrier();
}

TEST(Process, WhatIsNotHereIsUnavailableByName) {
    if (cudaDeviceCount() > 0) GTEST_SKIP() << "there is a GPU";
    const auto device = Process::start({.device = DeviceKind::cuda});
    ASSERT_FALSE(device.has_value());
    EXPECT_EQ(device.error().code, ErrorCode::unavailable);
    EXPECT_NE(device.error().message.find("device cuda"), std::string::npos);

    const auto transport = Process::start({.transport = TransportKind::nccl});
    ASSERT_FALSE(transport.has_value());
    EXPECT_EQ(transport.error().code, ErrorCode::unavailable);
    EXPECT_NE(transport.error().message.find("nccl"), std::string::npos);
    EXPECT_EQ(Process::current(), nullptr);
}

TEST(Process, WhatIsAskedForByNameIsGiven) {
    const auto process = Process::start({.device = DeviceKind::cpu,
                                         .transport = TransportKind::mpi,
                                         .timeout = std::chrono::minutes(2),
                                         .threads = 3});
    ASSERT_TRUE(process.has_value());
    EXPECT_EQ(process->threads(), 3);
}

TEST(Process, RanksShareTheThreadsOfTheNodeUnlessTold) {
    const World world;
    const auto process = Process::start(patient()).value();
    EXPECT_GE(process.threads(), 1);
    // Nothing binds the ranks of this test, so they share one mask.
    const auto hardware = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
    EXPECT_LE(process.threads(), std::max(1, hardware / world.size));
}

TEST(Process, BadOptionsAreNamed) {
    const auto timeout = Process::start({.timeout = std::chrono::milliseconds(0)});
    ASSERT_FALSE(timeout.has_value());
    EXPECT_EQ(timeout.error().code, ErrorCode::invalid_argument);
    EXPECT_NE(timeout.error().message.find("timeout 0 ms"), std::string::npos);
    const auto threads = Process::start({.threads = -1});
    ASSERT_FALSE(threads.has_value());
    EXPECT_EQ(threads.error().code, ErrorCode::invalid_argument);
    EXPECT_NE(threads.error().message.find("threads -1"), std::string::npos);
}

TEST(Process, OptionsThatDifferFailAlikeOnEveryRank) {
    const World world;
    auto options = patient();
    if (world.rank == world.size - 1) options.threads = 7;
    const auto process = Process::start(options);
    if (world.size == 1) return;
    ASSERT_FALSE(process.has_value());
    EXPECT_EQ(process.error().code, ErrorCode::invalid_argument);
    const std::string named = "rank " + std::to_string(world.size - 1) + " was started with other";
    EXPECT_EQ(process.error().message.find(named), 0U) << process.error().message;
    EXPECT_EQ(Process::current(), nullptr);
}

// The host program's receive from anybody must not take one of ours, nor ours one of its.
TEST(Process, MessagesOfTheHostProgramDoNotMixWithOurs) {
    const World world;
    auto process = Process::start(patient()).value();
    const int next = (world.rank + 1) % world.size;
    const int mine = 1000 + world.rank;
    int received = -1;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Irecv(&received, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request);
    comm::Transport& transport = process.state().transport();
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(world.size), sizeof(int));
    const std::vector<int> ours(counts.size(), -2);
    std::vector<int> others(counts.size());
    transport.allToAll(std::as_bytes(std::span(ours)), counts,
                       std::as_writable_bytes(std::span(others)), counts,
                       process.state().device->defaultStream());
    EXPECT_EQ(others, ours);
    MPI_Send(&mine, 1, MPI_INT, next, 1, MPI_COMM_WORLD);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    EXPECT_EQ(received, 1000 + (world.rank + world.size - 1) % world.size);
}

}  // namespace
}  // namespace kvgrid
