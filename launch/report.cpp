#include "launch/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <kvgrid/version.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>

#include "launch/git_hash.h"

namespace kvgrid::launch {

namespace {

using Json = nlohmann::ordered_json;

constexpr int schema_version = 1;

template <class... Visitors>
struct Overload : Visitors... {
    using Visitors::operator()...;
};
template <class... Visitors>
Overload(Visitors...) -> Overload<Visitors...>;

Json toJson(const Cell& cell) {
    return std::visit(
        Overload{[](std::monostate) { return Json(nullptr); },
                 [](double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); },
                 [](const auto& value) { return Json(value); }},
        cell);
}

std::string quotedCsv(const std::string& text) {
    if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
    std::string quoted = "\"";
    for (const char c : text) {
        if (c == '"') quoted += '"';
        quoted += c;
    }
    return quoted + "\"";
}

std::string toCsv(const Cell& cell) {
    return std::visit(
        Overload{[](std::monostate) { return std::string(); },
                 [](double value) { return std::isfinite(value) ? fmt::format("{}", value) : ""; },
                 [](const std::string& value) { return quotedCsv(value); },
                 [](const auto& value) { return fmt::format("{}", value); }},
        cell);
}

std::optional<double> number(const Cell& cell) {
    if (const auto* value = std::get_if<double>(&cell); value != nullptr && std::isfinite(*value)) {
        return *value;
    }
    if (const auto* value = std::get_if<std::int64_t>(&cell)) return static_cast<double>(*value);
    return std::nullopt;
}

std::string fixed(const Cell& cell, double factor, int digits) {
    const auto value = number(cell);
    return value ? fmt::format("{:.{}f}", *value * factor, digits) : plain(cell);
}

// Quotes what a shell would not take as one word.
std::string shellWord(const std::string& word) {
    const bool safe = !word.empty() && std::all_of(word.begin(), word.end(), [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
               std::string_view("-_./,:=+@").find(c) != std::string_view::npos;
    });
    if (safe) return word;
    std::string quoted = "'";
    for (const char c : word)
        quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return quoted + "'";
}

std::string shellLine(const std::vector<std::string>& argv) {
    std::vector<std::string> words;
    for (const std::string& word : argv)
        words.push_back(shellWord(word));
    return fmt::format("{}", fmt::join(words, " "));
}

std::string commentLines(const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines)
        text += "# " + line + "\n";
    return text;
}

std::vector<std::size_t> widthsOf(const std::vector<Column>& columns) {
    std::vector<std::size_t> widths;
    for (const Column& column : columns) {
        widths.push_back(std::max({static_cast<std::size_t>(std::max(column.width, 0)),
                                   column.heading.size(), column.unit.size()}));
    }
    return widths;
}

// One line, right-aligned. Only a comment line begins with '#'.
std::string aligned(char first, const std::vector<std::string>& cells,
                    const std::vector<std::size_t>& widths) {
    std::string line(1, first);
    for (std::size_t i = 0; i < cells.size(); ++i) {
        line += fmt::format("  {:>{}}", cells[i], widths[i]);
    }
    return line.erase(line.find_last_not_of(' ') + 1) + "\n";
}

std::vector<std::string> formatted(const Row& row, const std::vector<Column>& columns) {
    std::vector<std::string> cells;
    for (std::size_t i = 0; i < columns.size(); ++i)
        cells.push_back(columns[i].format(row[i]));
    return cells;
}

std::string headingLines(const std::vector<Column>& columns,
                         const std::vector<std::size_t>& widths) {
    std::vector<std::string> names;
    std::vector<std::string> units;
    for (const Column& column : columns) {
        names.emplace_back(column.heading);
        units.emplace_back(column.unit);
    }
    return aligned('#', names, widths) + aligned('#', units, widths);
}

}  // namespace

std::string plain(const Cell& cell) {
    return std::visit(
        Overload{[](std::monostate) { return std::string("-"); },
                 [](double value) { return std::isfinite(value) ? fmt::format("{}", value) : "-"; },
                 [](const auto& value) { return fmt::format("{}", value); }},
        cell);
}

std::string fixed1(const Cell& cell) {
    return fixed(cell, 1, 1);
}
std::string fixed2(const Cell& cell) {
    return fixed(cell, 1, 2);
}
std::string percent(const Cell& cell) {
    return fixed(cell, 100, 1);
}

std::string bytes(const Cell& cell) {
    const auto* value = std::get_if<std::int64_t>(&cell);
    if (value == nullptr) return plain(cell);
    if (*value > -1024 && *value < 1024) return fmt::format("{}", *value);
    return fmt::format("{} ({})", *value, humanBytes(*value));
}

std::string humanBytes(std::int64_t bytes) {
    constexpr std::array<const char*, 6> units{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = static_cast<double>(bytes);
    if (std::abs(value) < 1024) return fmt::format("{} B", bytes);
    std::size_t unit = 0;
    value /= 1024;
    while (std::abs(value) >= 1024 && unit + 1 < units.size()) {
        value /= 1024;
        ++unit;
    }
    std::string digits = fmt::format("{:.2f}", value);
    digits.erase(digits.find_last_not_of('0') + 1);
    if (digits.back() == '.') digits.pop_back();
    return digits + " " + units[unit];
}

std::vector<std::string> commandArguments(int argc, const char* const* argv) {
    std::vector<std::string> arguments{"kvgrid"};
    arguments.insert(arguments.end(), argv, argv + argc);
    return arguments;
}

Report::Report(std::string command, std::vector<std::string> argv, std::vector<Column> columns)
    : command_(std::move(command)),
      argv_(std::move(argv)),
      columns_(std::move(columns)) {}

void Report::note(std::string line) {
    notes_.push_back(std::move(line));
}

void Report::fact(std::string key, Cell value, std::string_view label, CellFormat format) {
    if (!label.empty()) note(fmt::format("{}: {}", label, format(value)));
    facts_.push_back({std::move(key), std::move(value)});
}

void Report::result(std::string key, Cell value, std::string_view label, CellFormat format) {
    if (!label.empty()) closing_.push_back(fmt::format("{}: {}", label, format(value)));
    facts_.push_back({std::move(key), std::move(value)});
}

void Report::list(std::string key, std::vector<std::string> fields, std::vector<Row> rows) {
    lists_.push_back({std::move(key), std::move(fields), std::move(rows)});
}

void Report::row(Row cells) {
    cells.resize(columns_.size());
    rows_.push_back(std::move(cells));
}

std::string Report::preamble() const {
    return fmt::format("# kvgrid {} ({})\n# command: {}\n", KVGRID_VERSION, KVGRID_GIT_HASH,
                       shellLine(argv_)) +
           commentLines(notes_);
}

std::string Report::headings() const {
    return headingLines(columns_, widthsOf(columns_));
}

std::string Report::line(const Row& cells) const {
    Row row = cells;
    row.resize(columns_.size());
    return aligned(' ', formatted(row, columns_), widthsOf(columns_));
}

std::string Report::closing() const {
    return commentLines(closing_);
}

std::string Report::table() const {
    std::vector<std::size_t> widths = widthsOf(columns_);
    std::vector<std::vector<std::string>> lines;
    for (const Row& row : rows_) {
        lines.push_back(formatted(row, columns_));
        for (std::size_t i = 0; i < widths.size(); ++i) {
            widths[i] = std::max(widths[i], lines.back()[i].size());
        }
    }
    std::string text = preamble() + headingLines(columns_, widths);
    for (const auto& line : lines)
        text += aligned(' ', line, widths);
    return text + closing();
}

std::string Report::csv() const {
    std::vector<std::string> cells;
    for (const Column& column : columns_)
        cells.push_back(quotedCsv(std::string(column.key)));
    std::string text = fmt::format("{}\n", fmt::join(cells, ","));
    for (const Row& row : rows_) {
        cells.clear();
        for (const Cell& cell : row)
            cells.push_back(toCsv(cell));
        text += fmt::format("{}\n", fmt::join(cells, ","));
    }
    return text;
}

std::string Report::json() const {
    Json root;
    root["schema_version"] = schema_version;
    root["command"] = command_;
    root["argv"] = argv_;
    root["version"] = KVGRID_VERSION;
    root["git_hash"] = KVGRID_GIT_HASH;
    for (const Fact& fact : facts_)
        root[fact.key] = toJson(fact.value);
    for (const List& list : lists_) {
        Json& items = root[list.key] = Json::array();
        for (const Row& row : list.rows) {
            Json item = Json::object();
            for (std::size_t i = 0; i < std::min(row.size(), list.fields.size()); ++i) {
                item[list.fields[i]] = toJson(row[i]);
            }
            items.push_back(std::move(item));
        }
    }
    Json& rows = root["rows"] = Json::array();
    for (const Row& row : rows_) {
        Json item = Json::object();
        for (std::size_t i = 0; i < row.size(); ++i) {
            item[std::string(columns_[i].key)] = toJson(row[i]);
        }
        rows.push_back(std::move(item));
    }
    return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace kvgrid::launch
