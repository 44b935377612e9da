#include "launch/options.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvgrid::launch {
namespace {

constexpr std::int64_t big = std::numeric_limits<std::int64_t>::max();

template <typename Value>
std::string errorOf(const Result<Value>& result) {
    if (result) return "(no error)";
    EXPECT_EQ(result.error().code, ErrorCode::invalid_argument);
    return result.error().message;
}

TEST(ParseCount, DigitsAlone) {
    EXPECT_EQ(parseCount("0"), 0);
    EXPECT_EQ(parseCount("007"), 7);
    EXPECT_EQ(parseCount("9223372036854775807"), big);
    EXPECT_EQ(errorOf(parseCount("9223372036854775808")),
              "'9223372036854775808' is beyond 64 bits");
    EXPECT_EQ(errorOf(parseCount("-1")), "'-1' is negative");
    EXPECT_EQ(errorOf(parseCount("3", 4, 8)), "'3' is out of range: 4 to 8");
    EXPECT_EQ(errorOf(parseCount("0", 1)), "'0' is too small: at least 1");
    for (const char* wrong :
         {"", " ", "4x", "4 ", " 4", "+4", "4.0", "1e3", "0x10", "4K", "-", "--4", "four", "４"}) {
        EXPECT_EQ(errorOf(parseCount(wrong)), "'" + std::string(wrong) + "' is not a whole number");
    }
}

TEST(ParseSize, PowersOf1024) {
    EXPECT_EQ(parseSize("40000"), 40000);
    EXPECT_EQ(parseSize("4K"), 4096);
    EXPECT_EQ(parseSize("128K"), 131072);
    EXPECT_EQ(parseSize("1M"), 1048576);
    EXPECT_EQ(parseSize("80G"), 85899345920);
    EXPECT_EQ(parseSize("8589934591G"), 8589934591 << 30);
    EXPECT_EQ(errorOf(parseSize("8589934592G")), "'8589934592G' is beyond 64 bits");
    EXPECT_EQ(errorOf(parseSize("99999999999999999999")),
              "'99999999999999999999' is beyond 64 bits");
    EXPECT_EQ(errorOf(parseSize("0", 1)), "'0' is too small: at least 1");
    for (const char* wrong : {"", "K", "4KB", "4T", "4 K", "1.5K", "4KK", "k", "4k"}) {
        EXPECT_EQ(
            errorOf(parseSize(wrong)),
            "'" + std::string(wrong) + "' is not a size: digits, then K, M or G (powers of 1024)");
    }
    EXPECT_EQ(errorOf(parseSize("-4K")), "'-4K' is negative");
}

TEST(ParseSizes, Lists) {
    EXPECT_EQ(parseSizes("4K"), (std::vector<std::int64_t>{4096}));
    EXPECT_EQ(parseSizes("4K,16K,5"), (std::vector<std::int64_t>{4096, 16384, 5}));
    for (const char* wrong : {"", ",", "4K,", ",4K", "4K,,8K", "4K;8K", "4K, 8K"}) {
        EXPECT_FALSE(parseSizes(wrong)) << wrong;
    }
}

TEST(ParseGrid, HeadsByContext) {
    EXPECT_EQ(parseGrid("8x1"), (Grid{.heads = 8, .context = 1}));
    EXPECT_EQ(parseGrid("8x2"), (Grid{.heads = 8, .context = 2}));
    EXPECT_EQ(parseGrid("auto"), Grid{});
    for (const char* wrong : {"", "8", "x", "8x", "x8", "0x1", "8x0", "-8x1", "8x1x1", "8X1", "8*1",
                              "99999999999x1", "Auto"}) {
        EXPECT_EQ(errorOf(parseGrid(wrong)),
                  "'" + std::string(wrong) + "' is not a grid: HxC, as in 8x1, or auto");
    }
}

struct Values {
    std::string text;
    int number = 5;
    std::int64_t size = 64;
    std::uint64_t seed = 0;
    std::vector<std::int64_t> sizes;
    Grid grid;
    NumberFormat format = NumberFormat::bf16;
    std::optional<DeviceKind> device = DeviceKind::cpu;
    bool flag = false;
};

CommandLine commandLine(Values& values) {
    CommandLine line("try", "a command to try");
    line.value("text", "T", "some text", textInto(values.text), Need::required)
        .value("number", "N", "a number", intInto(values.number, 1, 100))
        .value("size", "S", "a size", sizeInto(values.size, 1))
        .value("seed", "N", "a seed", seedInto(values.seed))
        .value("sizes", "S[,S]", "sizes", sizesInto(values.sizes, 1))
        .value("grid", "HxC", "a grid", gridInto(values.grid))
        .value("format", "F", "a format", choiceInto(values.format, kvFormats()))
        .value("device", "D", "a device", choiceInto(values.device, deviceKinds()))
        .flag("flag", "a flag", values.flag)
        .note("A note.")
        .example("kvgrid try --text x", "try it");
    return line;
}

Result<Parsed> parse(Values& values, std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "try");
    return commandLine(values).parse(static_cast<int>(arguments.size()), arguments.data());
}

std::string error(const std::vector<const char*>& arguments) {
    Values values;
    return errorOf(parse(values, arguments));
}

TEST(CommandLine, FillsTheVariables) {
    Values values;
    const auto parsed = parse(values, {"--text", "-", "--number=7", "--size", "4K", "--seed",
                                       "18446744073709551615", "--sizes", "1,2K", "--grid", "4x1",
                                       "--format", "fp16", "--device", "auto", "--flag"});
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(values.text, "-");
    EXPECT_EQ(values.number, 7);
    EXPECT_EQ(values.size, 4096);
    EXPECT_EQ(values.seed, std::numeric_limits<std::uint64_t>::max());
    EXPECT_EQ(values.sizes, (std::vector<std::int64_t>{1, 2048}));
    EXPECT_EQ(values.grid, (Grid{.heads = 4, .context = 1}));
    EXPECT_EQ(values.format, NumberFormat::fp16);
    EXPECT_EQ(values.device, std::nullopt);
    EXPECT_TRUE(values.flag);
    EXPECT_TRUE(parsed->has("number"));
    EXPECT_FALSE(parsed->answer);
}

TEST(CommandLine, Fp8HasTheNamesThatOthersGiveIt) {
    for (const char* text : {"fp8", "fp8_e4m3", "fp8-e4m3"}) {
        Values values;
        ASSERT_TRUE(parse(values, {"--text", "-", "--format", text}));
        EXPECT_EQ(values.format, NumberFormat::fp8_e4m3) << text;
    }
}

TEST(CommandLine, KeepsDefaults) {
    Values values;
    const auto parsed = parse(values, {"--text", "x"});
    ASSERT_TRUE(parsed);
    EXPECT_EQ(values.number, 5);
    EXPECT_FALSE(values.flag);
    EXPECT_FALSE(parsed->has("number"));
}

TEST(CommandLine, Refuses) {
    EXPECT_EQ(error({}), "--text is missing");
    EXPECT_EQ(error({"--text", "x", "--nubmer", "7"}), "unknown flag --nubmer");
    EXPECT_EQ(error({"--text", "x", "-n", "7"}), "unknown flag -n");
    EXPECT_EQ(error({"--text", "x", "--text", "y"}), "--text is given twice");
    EXPECT_EQ(error({"--text", "x", "--flag", "--flag"}), "--flag is given twice");
    EXPECT_EQ(error({"--text", "x", "stray"}), "stray argument 'stray'");
    EXPECT_EQ(error({"--text", "x", "--", "stray"}), "stray argument 'stray'");
    EXPECT_EQ(error({"--text"}), "--text has no value");
    EXPECT_EQ(error({"--text", "--number", "7"}), "--text has no value in front of --number");
    EXPECT_EQ(error({"--text="}), "--text: is empty");
    EXPECT_EQ(error({"--text", "x", "--flag=maybe"}), "--flag takes no value");
    EXPECT_EQ(error({"--text", "x", "--number", "7x"}), "--number: '7x' is not a whole number");
    EXPECT_EQ(error({"--text", "x", "--number", "-7"}), "--number: '-7' is negative");
    EXPECT_EQ(error({"--text", "x", "--number", "101"}),
              "--number: '101' is out of range: 1 to 100");
    EXPECT_EQ(error({"--text", "x", "--seed", "18446744073709551616"}),
              "--seed: '18446744073709551616' is beyond 64 bits");
    EXPECT_EQ(error({"--text", "x", "--format", "int4"}),
              "--format: 'int4' is none of bf16, fp16, fp8, fp8_e4m3, fp8-e4m3 or int8");
    EXPECT_EQ(error({"--text", "x", "--device", "tpu"}),
              "--device: 'tpu' is none of auto, cpu or cuda");
}

TEST(CommandLine, AnswersHelpAndVersion) {
    Values values;
    const auto help = parse(values, {"--help"});
    ASSERT_TRUE(help);
    ASSERT_TRUE(help->answer);
    for (const char* part : {"kvgrid try", "a command to try", "--text T", "--sizes S[,S]",
                             "A note.", "Examples:", "# try it", "kvgrid try --text x"}) {
        EXPECT_NE(help->answer->find(part), std::string::npos) << part << "\n" << *help->answer;
    }
    const auto version = parse(values, {"--version"});
    ASSERT_TRUE(version);
    EXPECT_EQ(version->answer->find("kvgrid "), 0U);
}

}  // namespace
}  // namespace kvgrid::launch
