// The transports over which the suites of this folder run. One is a traits type:
//   large_bytes                      what a suite calls large, of all ranks together
//   makeDevice()                     whose memory it carries; null when it is not here
//   makeTransport(watchdog, device)  collective
// Programs are made for one kind of device each: those with KVGRID_TEST_CUDA are for the GPU.
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>

#include "comm/transport.h"

namespace kvgrid::comm {

#ifdef KVGRID_TEST_CUDA

struct OnGpu {
    static constexpr std::size_t large_bytes = std::size_t{8} << 20;
    static int rankOf(MPI_Comm communicator) {
        int rank = 0;
        MPI_Comm_rank(communicator, &rank);
        return rank;
    }
    static int sizeOf(MPI_Comm communicator) {
        int size = 1;
        MPI_Comm_size(communicator, &size);
        return size;
    }
    // The ranks of a test share a host.
    static std::unique_ptr<Device> makeDevice() {
        const int count = cudaDeviceCount();
        return count == 0 ? nullptr : makeCudaDevice(rankOf(MPI_COMM_WORLD) % count);
    }
};

struct Staged : OnGpu {
    static std::unique_ptr<Transport> makeTransport(Watchdog& watchdog, Device& device) {
        return makeStagedTransport(watchdog, device);
    }
};

#ifdef KVGRID_TEST_NCCL
struct Nccl : OnGpu {
    static std::unique_ptr<Transport> makeTransport(Watchdog& watchdog, Device& device) {
        const int size = sizeOf(MPI_COMM_WORLD);
        return makeNcclTransport(
            watchdog, device, {.rank = rankOf(MPI_COMM_WORLD), .size = size, .share_gpu = size > 1},
            [](std::span<std::byte> bytes) {
                MPI_Bcast(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, 0,
                          MPI_COMM_WORLD);
            });
    }
};

using Transports = testing::Types<Staged, Nccl>;
#else
using Transports = testing::Types<Staged>;
#endif
using JoinTransports = Transports;
using LargeTransports = Transports;

#else

struct Mpi {
    static constexpr std::size_t large_bytes = std::size_t{64} << 20;
    static std::unique_ptr<Device> makeDevice() { return makeCpuDevice(2); }
    static std::unique_ptr<Transport> makeTransport(Watchdog& watchdog, Device&) {
        return makeMpiTransport(watchdog);
    }
};

// The same with messages so short that nearly everything is split, and ends amid an element.
struct MpiInPieces : Mpi {
    static constexpr std::size_t large_bytes = 100'003;
    static std::unique_ptr<Transport> makeTransport(Watchdog& watchdog, Device&) {
        return makeMpiTransport(watchdog, 1'001);
    }
};

using Transports = testing::Types<Mpi, MpiInPieces>;
using JoinTransports = testing::Types<Mpi>;  // how messages travel is the other suite's matter
using LargeTransports = testing::Types<Mpi>;

#endif

// One device and one transport for all tests of a suite; skipped where the device is not here.
template <typename Traits>
class OnTransport : public testing::Test {
protected:
    static void SetUpTestSuite() {
        device = Traits::makeDevice();
        if (device == nullptr) return;
        watchdog = std::make_unique<Watchdog>(0, std::chrono::minutes(2));
        transport = Traits::makeTransport(*watchdog, *device);
    }
    static void TearDownTestSuite() {
        transport.reset();
        device.reset();
        watchdog.reset();
    }
    void SetUp() override {
        if (device == nullptr) GTEST_SKIP() << "there is no GPU";
    }

    static int rank() { return transport->rank(); }
    static int size() { return transport->size(); }
    static std::size_t ranks() { return static_cast<std::size_t>(size()); }
    static StreamView stream() { return device->defaultStream(); }

    static inline std::unique_ptr<Watchdog> watchdog;
    static inline std::unique_ptr<Device> device;
    static inline std::unique_ptr<Transport> transport;
};

}  // namespace kvgrid::comm
