// The flags of a subcommand: declared once, each bound to the variable that it fills. Long flags
// only; an unknown flag, one given twice, a stray argument or junk behind a number is an error.
//
//   Plan plan;
//   CommandLine line("plan", "says whether a model and context fit");
//   line.value("ranks", "N", "ranks, one a GPU", intInto(plan.ranks, 1, 4096), Need::required)
//       .value("context", "L", "tokens of each sequence", sizeInto(plan.context, 1))
//       .flag("verbose", "more", plan.verbose)
//       .example("kvgrid plan --model llama-3.1-8b --ranks 8 --context 1M");
//   const Result<Parsed> parsed = line.parse(argc, argv);
//
// Every Failure here is invalid_argument.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvgrid/config.h>
#include <kvgrid/error.h>
#include <kvgrid/types.h>

namespace kvgrid::launch {

inline constexpr std::int64_t any_count = std::numeric_limits<std::int64_t>::max();

// From text to value. The messages do not name the flag: CommandLine puts it in front.
// A count is decimal digits alone; a size may end in K, M or G (powers of 1024).
[[nodiscard]] Result<std::int64_t> parseCount(std::string_view text, std::int64_t least = 0,
                                              std::int64_t most = any_count);
[[nodiscard]] Result<std::int64_t> parseSize(std::string_view text, std::int64_t least = 0,
                                             std::int64_t most = any_count);
[[nodiscard]] Result<std::vector<std::int64_t>> parseSizes(std::string_view text,
                                                           std::int64_t least = 0,
                                                           std::int64_t most = any_count);
[[nodiscard]] Result<Grid> parseGrid(std::string_view text);  // "auto" gives 0 x 0

// What a flag does with its text.
using Setter = std::function<Result<void>(const std::string& text)>;

// Setters that parse and store. The variable must outlive CommandLine::parse.
[[nodiscard]] Setter textInto(std::string& out);  // not empty
[[nodiscard]] Setter intInto(int& out, int least, int most = std::numeric_limits<int>::max());
[[nodiscard]] Setter countInto(std::int64_t& out, std::int64_t least,
                               std::int64_t most = any_count);
[[nodiscard]] Setter seedInto(std::uint64_t& out);
[[nodiscard]] Setter sizeInto(std::int64_t& out, std::int64_t least, std::int64_t most = any_count);
[[nodiscard]] Setter sizesInto(std::vector<std::int64_t>& out, std::int64_t least,
                               std::int64_t most = any_count);
[[nodiscard]] Setter gridInto(Grid& out);

// The value whose name `text` is; the message lists all names.
template <typename Value>
using Choices = std::vector<std::pair<std::string_view, Value>>;

[[nodiscard]] Result<std::size_t> choose(std::string_view text,
                                         const std::vector<std::string_view>& names);

template <typename Target, typename Value>
[[nodiscard]] Setter choiceInto(Target& out, Choices<Value> choices) {
    return [&out, choices = std::move(choices)](const std::string& text) -> Result<void> {
        std::vector<std::string_view> names;
        for (const auto& choice : choices)
            names.push_back(choice.first);
        return choose(text, names).map([&](std::size_t index) { out = choices[index].second; });
    };
}

// Choices that several subcommands offer. Automatic is std::nullopt.
[[nodiscard]] Choices<NumberFormat> kvFormats();
[[nodiscard]] Choices<PoolLayout> poolLayouts();
[[nodiscard]] Choices<std::optional<DeviceKind>> deviceKinds();
[[nodiscard]] Choices<std::optional<TransportKind>> transportKinds();
[[nodiscard]] Choices<std::optional<bool>> graphChoices();

struct Parsed {
    std::optional<std::string> answer;  // of --help or --version: print it and return 0
    std::set<std::string> given;        // names of the flags on the command line

    [[nodiscard]] bool has(const std::string& flag) const { return given.contains(flag); }
};

enum class Need : std::uint8_t { optional, required };

class CommandLine {
public:
    // --help and --version are there already.
    CommandLine(const std::string& command, const std::string& purpose);
    ~CommandLine();
    CommandLine(CommandLine&&) noexcept;
    CommandLine& operator=(CommandLine&&) noexcept;

    // `help` says the default, where there is one: the variable's value stays as it is.
    CommandLine& value(const std::string& name, const std::string& placeholder,
                       const std::string& help, Setter setter, Need need = Need::optional);
    CommandLine& flag(const std::string& name, const std::string& help, bool& out);
    CommandLine& example(std::string command, std::string purpose = "");
    // A paragraph behind the flags in --help.
    CommandLine& note(std::string text);

    // Sets the variables in the order of declaration.
    [[nodiscard]] Result<Parsed> parse(int argc, const char* const* argv) const;
    [[nodiscard]] std::string help() const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

// Text of --version: the program's version and the commit it was built from.
[[nodiscard]] std::string versionText();

}  // namespace kvgrid::launch
