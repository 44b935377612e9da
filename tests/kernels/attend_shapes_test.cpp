#include "tests/kernels/attend_shapes.h"

#include <set>

#include <gmock/gmock.h>

#include "launch/trace.h"
#include "tests/paths.h"

namespace kvgrid {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::SizeIs;

TEST(AttendShapes, TextSaysLengthsHeadsAndRows) {
    const AttendShape plain = orThrow(parseAttendShape("2x128Kx32/8"));
    EXPECT_EQ(plain.name, "2x128Kx32/8");
    EXPECT_THAT(plain.lengths, ElementsAre(131072, 131072));
    EXPECT_EQ(plain.query_heads, 32);
    EXPECT_EQ(plain.kv_heads, 8);
    EXPECT_EQ(plain.head_dim, 128);
    EXPECT_EQ(plain.rows, 1);

    const AttendShape ragged = orThrow(parseAttendShape("1x1M+3x2K+1x7x16/1x256q5"));
    EXPECT_THAT(ragged.lengths, ElementsAre(1048576, 2048, 2048, 2048, 7));
    EXPECT_THAT(ragged.sequences(), ElementsAre(Pair(1, 1048576), Pair(3, 2048), Pair(1, 7)));
    EXPECT_EQ(ragged.query_heads, 16);
    EXPECT_EQ(ragged.kv_heads, 1);
    EXPECT_EQ(ragged.head_dim, 256);
    EXPECT_EQ(ragged.rows, 5);
    EXPECT_EQ(ragged.window, 0);

    const AttendShape window = orThrow(parseAttendShape("8x32Kx64/8x64q2w4K"));
    EXPECT_EQ(window.rows, 2);
    EXPECT_EQ(window.window, 4096);
}

TEST(AttendShapes, BytesAreOfTokensOrOfBlocks) {
    const AttendShape shape = orThrow(parseAttendShape("1x65+1x64x8/2x64"));
    EXPECT_EQ(shape.blocks(64), 3);
    EXPECT_EQ(shape.bytes(NumberFormat::bf16), 129 * 2 * 2 * 64 * 2);
    EXPECT_EQ(shape.bytes(NumberFormat::int8), 129 * 2 * 2 * (64 + 2));
    EXPECT_EQ(shape.blockBytes(64, NumberFormat::bf16), 192 * 2 * 2 * 64 * 2);
}

TEST(AttendShapes, BehindAWindowAreNeitherTokensNorBlocks) {
    // Rows at 998 and 999 see 100 tokens each, those from 899 on.
    const AttendShape shape = orThrow(parseAttendShape("1x1000+1x50x8/2x64q2w100"));
    EXPECT_EQ(shape.firstSeen(1000), 899);
    EXPECT_EQ(shape.firstSeen(50), 0);
    EXPECT_EQ(shape.bytes(NumberFormat::bf16), (101 + 50) * 2 * 2 * 64 * 2);
    EXPECT_EQ(shape.blocks(64), 2 + 1);  // 14 and 15 of the first
    EXPECT_EQ(shape.blockBytes(64, NumberFormat::bf16), 3 * 64 * 2 * 2 * 64 * 2);
}

TEST(AttendShapes, MultiplyAddsAreOfTheTokensThatRowsSee) {
    const AttendShape one = orThrow(parseAttendShape("2x100x8/2x64"));
    EXPECT_EQ(one.multiplyAdds(), 2 * 100 * 8 * 64 * 2);
    const AttendShape several = orThrow(parseAttendShape("1x10x4/1x64q3"));
    EXPECT_EQ(several.multiplyAdds(), (8 + 9 + 10) * 4 * 64 * 2);
    const AttendShape window = orThrow(parseAttendShape("1x10+1x100x4/1x64q3w9"));
    EXPECT_EQ(window.multiplyAdds(), (8 + 9 + 9 + 9 + 9 + 9) * 4 * 64 * 2);
    const AttendShape wide = orThrow(parseAttendShape("1x10x4/1x64q3w1M"));
    EXPECT_EQ(wide.multiplyAdds(), several.multiplyAdds());
}

TEST(AttendShapes, WhatIsNoShapeIsRefusedByName) {
    for (const auto& [text, reason] : {std::pair{"", "is no BATCHxCONTEXT"},
                                       {"1x128K", "is no BATCHxCONTEXT"},
                                       {"1x128kx8/1", "is no BATCHxCONTEXT"},
                                       {"1x128Kx8", "is no BATCHxCONTEXT"},
                                       {"1x128Kx8/1 ", "is no BATCHxCONTEXT"},
                                       {"-1x128Kx8/1", "is no BATCHxCONTEXT"},
                                       {"1x128Kx8/1x", "is no BATCHxCONTEXT"},
                                       {"0x128Kx8/1", "sequences that are none"},
                                       {"9999999x1Kx8/1", "sequences that are none, or too many"},
                                       {"1x0x8/1", "sequences that are none"},
                                       {"1x999999999Mx8/1", "sequences that are none, or too"},
                                       {"1025x64Mx8/1", "sequences that are none, or too"},
                                       {"1x65535M+2x1Mx8/1", "sequences that are none, or too"},
                                       {"1x1Kx8/3", "no multiple of its KV heads"},
                                       {"1x1Kx0/1", "no multiple of its KV heads"},
                                       {"1x1Kx8/0", "no multiple of its KV heads"},
                                       {"1x1Kx8/1x100", "head dim"},
                                       {"1x1Kx8/1x0", "head dim"},
                                       {"1x1Kx8/1x272", "head dim"},
                                       {"1x1K+1x4x8/1q5", "more than a sequence"},
                                       {"1x1Kx8/1q0", "new tokens that are none"},
                                       {"1x1Kx8/1w0", "a window that is none"},
                                       {"1x1Kx8/1w4Kq2", "is no BATCHxCONTEXT"},
                                       {"1x1Kx8/1w", "is no BATCHxCONTEXT"}}) {
        const Result<AttendShape> shape = parseAttendShape(text);
        ASSERT_FALSE(shape.has_value()) << text;
        EXPECT_EQ(shape.error().code, ErrorCode::invalid_argument);
        EXPECT_THAT(shape.error().message, HasSubstr("'" + std::string(text) + "'"));
        EXPECT_THAT(shape.error().message, HasSubstr(reason));
    }
}

// Of the models that kvgrid is measured with.
TEST(AttendShapes, OfCudaHaveEveryContextAndBatch) {
    std::vector<std::string> names;
    for (const AttendShape& shape : attendShapes(DeviceKind::cuda))
        names.push_back(shape.name);
    for (const char* const heads : {"8/1", "32/8"})
        for (const char* const context : {"8K", "64K", "128K"})
            for (const char* const batch : {"1", "8"})
                EXPECT_THAT(names, Contains(std::string(batch) + "x" + context + "x" + heads));
    EXPECT_THAT(std::set(names.begin(), names.end()), SizeIs(names.size())) << "a shape twice";
}

TEST(AttendShapes, ConversationsAreDrawnFromTheTrace) {
    const launch::Trace trace = orThrow(
        launch::readTrace(std::string(test::traces_dir) + "/mooncake_conversation_trace.jsonl"));
    const auto drawn = launch::drawLengths(trace, 64, 0, std::int64_t{1} << 40);
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
        int found = 0;
        for (const AttendShape& shape : attendShapes(device)) {
            if (shape.name.find("conversations") == std::string::npos) continue;
            ++found;
            EXPECT_EQ(shape.lengths, drawn);
        }
        EXPECT_EQ(found, 1);
    }
}

}  // namespace
}  // namespace kvgrid
