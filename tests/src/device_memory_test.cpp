// Memory for inputs and outputs: bytes come back as they went, and what is beyond the end does not
// go.
#include <kvgrid/device_memory.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/device_process.h"

namespace kvgrid {
namespace {

using testing::HasSubstr;

class DeviceMemoryTest : public test::OnDeviceProcess {};

std::vector<std::byte> counting(std::size_t bytes, int first) {
    std::vector<std::byte> values(bytes);
    for (std::size_t i = 0; i < bytes; ++i)
        values[i] = static_cast<std::byte>(first + static_cast<int>(i % 200));
    return values;
}

TEST_F(DeviceMemoryTest, GivesBackWhatItWasGiven) {
    DeviceMemory memory = DeviceMemory::create(*process, 1000).value();
    EXPECT_EQ(memory.bytes(), 1000);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 256, 0U);
    memory.fill(0x5A);
    EXPECT_TRUE(memory.upload(counting(300, 1), 600));
    std::vector<std::byte> all(1000);
    EXPECT_TRUE(memory.download(all));
    std::vector<std::byte> expected(1000, std::byte{0x5A});
    const std::vector<std::byte> part = counting(300, 1);
    std::copy(part.begin(), part.end(), expected.begin() + 600);
    EXPECT_EQ(all, expected);

    const DeviceMemory moved = std::move(memory);
    std::vector<std::byte> some(100);
    EXPECT_TRUE(moved.download(some, 650));
    EXPECT_EQ(some, std::vector<std::byte>(expected.begin() + 650, expected.begin() + 750));
}

TEST_F(DeviceMemoryTest, NothingGoesBeyondTheEnd) {
    DeviceMemory memory = DeviceMemory::create(*process, 100).value();
    memory.fill(0x5A);
    std::vector<std::byte> bytes = counting(60, 1);
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    for (const std::int64_t offset :
         {std::int64_t{41}, std::int64_t{-1}, std::int64_t{101}, most}) {
        const Result<void> uploaded = memory.upload(bytes, offset);
        ASSERT_FALSE(uploaded) << offset;
        EXPECT_EQ(uploaded.error().code, ErrorCode::invalid_argument);
        EXPECT_THAT(uploaded.error().message, HasSubstr("60 bytes at " + std::to_string(offset)));
        EXPECT_FALSE(memory.download(bytes, offset));
    }
    EXPECT_TRUE(memory.upload({}, 100));
    std::vector<std::byte> all(100);
    EXPECT_TRUE(memory.download(all));
    EXPECT_EQ(all, std::vector<std::byte>(100, std::byte{0x5A}));
}

TEST_F(DeviceMemoryTest, SizesThatCannotBeHadAreAnswers) {
    const auto negative = DeviceMemory::create(*process, -1);
    ASSERT_FALSE(negative);
    EXPECT_EQ(negative.error().code, ErrorCode::invalid_argument);
    const auto huge = DeviceMemory::create(*process, std::int64_t{1} << 50);
    ASSERT_FALSE(huge);
    EXPECT_EQ(huge.error().code, ErrorCode::does_not_fit);
    const auto empty = DeviceMemory::create(*process, 0);
    ASSERT_TRUE(empty);
    EXPECT_EQ(empty->bytes(), 0);
    EXPECT_TRUE(empty->download({}));
}

}  // namespace
}  // namespace kvgrid
