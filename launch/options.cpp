#include "launch/options.h"

#include <algorithm>
#include <array>
#include <charconv>

#define CXXOPTS_NO_REGEX  // its own parser does the same, without the false warnings of <regex>
#include <cxxopts.hpp>

#include <fmt/core.h>

#include <kvgrid/version.h>

#include "launch/git_hash.h"

namespace kvgrid::launch {

namespace {

tl::unexpected<Failure> invalid(std::string message) {
    return failure(ErrorCode::invalid_argument, std::move(message));
}

bool isDigits(std::string_view text) {
    return !text.empty() &&
           std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::string quoted(std::string_view text) {
    return "'" + std::string(text) + "'";
}

// Digits to a number no larger than `most` of the type.
template <typename Integer>
Result<Integer> parseDigits(std::string_view text) {
    if (text.size() > 1 && text.front() == '-' && isDigits(text.substr(1))) {
        return invalid(quoted(text) + " is negative");
    }
    if (!isDigits(text)) return invalid(quoted(text) + " is not a whole number");
    Integer value = 0;
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
    if (parsed.ec != std::errc{}) return invalid(quoted(text) + " is beyond 64 bits");
    return value;
}

Result<std::int64_t> inRange(std::int64_t value, std::string_view text, std::int64_t least,
                             std::int64_t most) {
    if (value >= least && value <= most) return value;
    if (most == any_count) {
        return invalid(fmt::format("{} is too small: at least {}", quoted(text), least));
    }
    return invalid(fmt::format("{} is out of range: {} to {}", quoted(text), least, most));
}

// The factor of a size's last letter, and the digits in front of it.
std::pair<std::int64_t, std::string_view> splitUnit(std::string_view text) {
    constexpr std::array<std::pair<char, std::int64_t>, 3> units{
        {{'K', 1LL << 10}, {'M', 1LL << 20}, {'G', 1LL << 30}}};
    for (const auto& [letter, factor] : units) {
        if (!text.empty() && text.back() == letter) {
            return {factor, text.substr(0, text.size() - 1)};
        }
    }
    return {1, text};
}

template <typename Target, typename Parser>
Setter store(Target& out, Parser parser) {
    return [&out, parser = std::move(parser)](const std::string& text) -> Result<void> {
        return parser(text).map([&](auto value) { out = static_cast<Target>(std::move(value)); });
    };
}

}  // namespace

Result<std::int64_t> parseCount(std::string_view text, std::int64_t least, std::int64_t most) {
    return parseDigits<std::int64_t>(text).and_then(
        [&](std::int64_t value) { return inRange(value, text, least, most); });
}

Result<std::int64_t> parseSize(std::string_view text, std::int64_t least, std::int64_t most) {
    const auto [factor, digits] = splitUnit(text);
    if (digits.starts_with('-') && isDigits(digits.substr(1))) {
        return invalid(quoted(text) + " is negative");
    }
    if (!isDigits(digits)) {
        return invalid(quoted(text) + " is not a size: digits, then K, M or G (powers of 1024)");
    }
    const auto count = parseDigits<std::int64_t>(digits);
    std::int64_t value = 0;
    if (!count || __builtin_mul_overflow(*count, factor, &value)) {
        return invalid(quoted(text) + " is beyond 64 bits");
    }
    return inRange(value, text, least, most);
}

Result<std::vector<std::int64_t>> parseSizes(std::string_view text, std::int64_t least,
                                             std::int64_t most) {
    std::vector<std::int64_t> sizes;
    std::size_t begin = 0;
    while (true) {
        const std::size_t comma = text.find(',', begin);
        const auto size = parseSize(text.substr(begin, comma - begin), least, most);
        if (!size) return tl::unexpected(size.error());
        sizes.push_back(*size);
        if (comma == std::string_view::npos) return sizes;
        begin = comma + 1;
    }
}

Result<Grid> parseGrid(std::string_view text) {
    if (text == "auto") return Grid{};
    const std::size_t cross = text.find('x');
    const auto wrong = [&] {
        return invalid(quoted(text) + " is not a grid: HxC, as in 8x1, or auto");
    };
    if (cross == std::string_view::npos) return wrong();
    constexpr std::int64_t most = std::numeric_limits<int>::max();
    const auto heads = parseCount(text.substr(0, cross), 1, most);
    const auto context = parseCount(text.substr(cross + 1), 1, most);
    if (!heads || !context) return wrong();
    return Grid{.heads = static_cast<int>(*heads), .context = static_cast<int>(*context)};
}

Setter textInto(std::string& out) {
    return store(out, [](const std::string& text) -> Result<std::string> {
        if (text.empty()) return invalid("is empty");
        return text;
    });
}

Setter intInto(int& out, int least, int most) {
    return store(out, [=](const std::string& text) { return parseCount(text, least, most); });
}

Setter countInto(std::int64_t& out, std::int64_t least, std::int64_t most) {
    return store(out, [=](const std::string& text) { return parseCount(text, least, most); });
}

Setter seedInto(std::uint64_t& out) {
    return store(out, [](const std::string& text) { return parseDigits<std::uint64_t>(text); });
}

Setter sizeInto(std::int64_t& out, std::int64_t least, std::int64_t most) {
    return store(out, [=](const std::string& text) { return parseSize(text, least, most); });
}

Setter sizesInto(std::vector<std::int64_t>& out, std::int64_t least, std::int64_t most) {
    return store(out, [=](const std::string& text) { return parseSizes(text, least, most); });
}

Setter gridInto(Grid& out) {
    return store(out, [](const std::string& text) { return parseGrid(text); });
}

Result<std::size_t> choose(std::string_view text, const std::vector<std::string_view>& names) {
    const auto found = std::find(names.begin(), names.end(), text);
    if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
    std::string list;
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (i > 0) list += i + 1 == names.size() ? " or " : ", ";
        list += names[i];
    }
    return invalid(quoted(text) + " is none of " + list);
}

Choices<NumberFormat> kvFormats() {
    return {{"bf16", NumberFormat::bf16},         {"fp16", NumberFormat::fp16},
            {"fp8", NumberFormat::fp8_e4m3},      {"fp8_e4m3", NumberFormat::fp8_e4m3},
            {"fp8-e4m3", NumberFormat::fp8_e4m3}, {"int8", NumberFormat::int8}};
}

Choices<PoolLayout> poolLayouts() {
    return {{"block-major", PoolLayout::block_major},
            {"layer-major", PoolLayout::layer_major},
            {"contiguous", PoolLayout::contiguous}};
}

Choices<std::optional<DeviceKind>> deviceKinds() {
    return {{"auto", std::nullopt}, {"cpu", DeviceKind::cpu}, {"cuda", DeviceKind::cuda}};
}

Choices<std::optional<TransportKind>> transportKinds() {
    return {{"auto", std::nullopt}, {"mpi", TransportKind::mpi}, {"nccl", TransportKind::nccl}};
}

Choices<std::optional<bool>> graphChoices() {
    return {{"auto", std::nullopt}, {"on", true}, {"off", false}};
}

struct CommandLine::State {
    struct Flag {
        std::string name;
        Setter setter;        // of a flag with a value
        bool* out = nullptr;  // of a flag without
        bool required = false;
    };
    struct Example {
        std::string command;
        std::string purpose;
    };

    State(const std::string& name, const std::string& purpose)
        : command(name),
          options("kvgrid " + name, "kvgrid " + name + ": " + purpose) {}

    // Of "--name".
    [[nodiscard]] bool isSwitch(std::string_view flag) const {
        if (flag == "--help" || flag == "--version") return true;
        return std::any_of(flags.begin(), flags.end(), [&](const Flag& known) {
            return known.out != nullptr && flag == "--" + known.name;
        });
    }

    std::string command;
    mutable cxxopts::Options options;  // cxxopts parses through a non-const call
    std::vector<Flag> flags;
    std::vector<Example> examples;
    std::vector<std::string> notes;
};

CommandLine::CommandLine(const std::string& command, const std::string& purpose)
    : state_(std::make_unique<State>(command, purpose)) {
    state_->options.custom_help("[--flag VALUE]...").set_width(100);
    state_->options.add_options()("help", "print this and exit")("version",
                                                                 "print the version and exit");
}

CommandLine::~CommandLine() = default;
CommandLine::CommandLine(CommandLine&&) noexcept = default;
CommandLine& CommandLine::operator=(CommandLine&&) noexcept = default;

CommandLine& CommandLine::value(const std::string& name, const std::string& placeholder,
                                const std::string& help, Setter setter, Need need) {
    state_->options.add_options()(name, help, cxxopts::value<std::string>(), placeholder);
    state_->flags.push_back({.name = name,
                             .setter = std::move(setter),
                             .out = nullptr,
                             .required = need == Need::required});
    return *this;
}

CommandLine& CommandLine::flag(const std::string& name, const std::string& help, bool& out) {
    state_->options.add_options()(name, help);
    state_->flags.push_back({.name = name, .setter = {}, .out = &out, .required = false});
    return *this;
}

CommandLine& CommandLine::example(std::string command, std::string purpose) {
    state_->examples.push_back({std::move(command), std::move(purpose)});
    return *this;
}

CommandLine& CommandLine::note(std::string text) {
    state_->notes.push_back(std::move(text));
    return *this;
}

namespace {

// cxxopts takes whatever follows a flag as its value, takes "--flag=text" for a switch, and lets
// the last of two win.
Result<void> checkArguments(const cxxopts::ParseResult& result) {
    std::set<std::string> seen;
    for (const cxxopts::KeyValue& argument : result.arguments()) {
        if (!seen.insert(argument.key()).second) {
            return invalid("--" + argument.key() + " is given twice");
        }
        if (argument.value().starts_with("--")) {
            return invalid("--" + argument.key() + " has no value in front of " + argument.value());
        }
    }
    if (!result.unmatched().empty()) {
        return invalid("stray argument " + quoted(result.unmatched().front()));
    }
    return {};
}

// cxxopts names an option only in the middle of a sentence, between typographic quotes.
std::string quotedName(std::string_view message) {
    constexpr std::string_view open = "\u2018";
    constexpr std::string_view close = "\u2019";
    const std::size_t begin = message.find(open);
    const std::size_t end = message.find(close);
    if (begin == std::string_view::npos || end == std::string_view::npos) return "";
    const auto name = message.substr(begin + open.size(), end - begin - open.size());
    return (name.size() == 1 ? "-" : "--") + std::string(name);
}

}  // namespace

Result<Parsed> CommandLine::parse(int argc, const char* const* argv) const {
    for (int i = 1; i < argc; ++i) {
        const std::string_view argument = argv[i];
        const std::size_t equals = argument.find('=');
        if (equals != std::string_view::npos && state_->isSwitch(argument.substr(0, equals))) {
            return invalid(std::string(argument.substr(0, equals)) + " takes no value");
        }
    }
    Parsed parsed;
    try {
        const cxxopts::ParseResult result = state_->options.parse(argc, argv);
        if (const auto checked = checkArguments(result); !checked) {
            return tl::unexpected(checked.error());
        }
        if (result.count("help") > 0) return Parsed{.answer = help(), .given = {"help"}};
        if (result.count("version") > 0)
            return Parsed{.answer = versionText(), .given = {"version"}};

        for (const State::Flag& flag : state_->flags) {
            if (result.count(flag.name) == 0) {
                if (flag.required) return invalid("--" + flag.name + " is missing");
                continue;
            }
            parsed.given.insert(flag.name);
            if (flag.out != nullptr) {
                *flag.out = result[flag.name].as<bool>();
                continue;
            }
            const auto set = flag.setter(result[flag.name].as<std::string>());
            if (!set) return invalid("--" + flag.name + ": " + set.error().message);
        }
    } catch (const cxxopts::exceptions::no_such_option& error) {
        return invalid("unknown flag " + quotedName(error.what()));
    } catch (const cxxopts::exceptions::missing_argument& error) {
        return invalid(quotedName(error.what()) + " has no value");
    } catch (const cxxopts::exceptions::exception& error) {
        return invalid(error.what());
    }
    return parsed;
}

std::string CommandLine::help() const {
    std::string text = state_->options.help();
    for (const std::string& note : state_->notes)
        text += "\n" + note + "\n";
    if (!state_->examples.empty()) text += "\nExamples:\n";
    for (const State::Example& example : state_->examples) {
        if (!example.purpose.empty()) text += "  # " + example.purpose + "\n";
        text += "  " + example.command + "\n";
    }
    return text;
}

std::string versionText() {
    return fmt::format("kvgrid {} ({})\n", KVGRID_VERSION, KVGRID_GIT_HASH);
}

}  // namespace kvgrid::launch
