// Uploads through the ring of page-locked buffers, far ahead of the stream that copies them.
#include "shard/staging.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "tests/shard/late_device.h"

namespace kvgrid {
namespace {

#ifdef KVGRID_TEST_CUDA
using DeviceTraits = test::CudaDeviceTraits;
#else
using DeviceTraits = test::CpuDeviceTraits;
#endif

TEST(StagingTest, NoBufferIsWrittenAgainBeforeItsCopiesRan) {
    if (DeviceTraits::make() == nullptr) GTEST_SKIP() << DeviceTraits::missing();
    // More than a driver might copy at once, and no whole number of uploads.
    constexpr std::size_t buffer_bytes = std::size_t{128} << 10;
    constexpr std::size_t count = 25'000;  // of an upload
    constexpr std::size_t uploads = 50;
    const std::unique_ptr<Device> device = test::makeLate(test::Streams::of_steps);
    const StreamView stream = device->defaultStream();
    StagingRing ring = StagingRing::create(*device, buffer_bytes).value();
    const auto uploaded = test::DeviceArray<std::uint32_t>::poisoned(*device, uploads * count);
    std::vector<std::uint32_t> expected(uploads * count);
    std::iota(expected.begin(), expected.end(), 1);
    const test::SlowWork slow(*device);
    slow.enqueue(stream);
    for (std::size_t i = 0; i < uploads; ++i) {
        std::vector<std::uint32_t> part(&expected[i * count], &expected[i * count] + count);
        ring.upload(uploaded.data() + i * count, part.data(), count * sizeof(std::uint32_t),
                    stream);
        part.assign(count, 0);  // the caller's again
    }
    EXPECT_EQ(uploaded.download(), expected);
    uploaded.expectGuardIntact();
}

}  // namespace
}  // namespace kvgrid
