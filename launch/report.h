// One record of a run, and its three faces: table, CSV, JSON. A column is declared once.
//
// The table is nccl-tests-like: "#" preamble lines, a name row, a unit row, data rows. JSON:
//   {"schema_version": 1, "command": "bench", "argv": [...], "version": ..., "git_hash": ...,
//    <facts>, "rows": [{<column key>: value, ...}]}
// with units in the keys, real booleans, and null for what was not measured.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace kvgrid::launch {

// std::monostate: not measured, "-" in the table, empty in CSV, null in JSON. A double that is not
// finite counts as not measured.
using Cell = std::variant<std::monostate, bool, std::int64_t, double, std::string>;
using Row = std::vector<Cell>;

// How a cell looks in the table. CSV and JSON keep all digits.
using CellFormat = std::string (*)(const Cell& cell);
[[nodiscard]] std::string plain(const Cell& cell);
[[nodiscard]] std::string fixed1(const Cell& cell);  // one digit behind the point
[[nodiscard]] std::string fixed2(const Cell& cell);
[[nodiscard]] std::string percent(const Cell& cell);  // 0.534 is "53.4"
[[nodiscard]] std::string bytes(const Cell& cell);    // "2621440 (2.5 MiB)"

struct Column {
    std::string_view key;      // in JSON and CSV, with its unit: "step_p50_us"
    std::string_view heading;  // name row of the table: "step p50"
    std::string_view unit;     // unit row: "us"; may be empty
    CellFormat format = plain;
    int width = 0;  // at least this wide; heading and unit always fit
};

// "2.5 MiB", "327680 B" below 1024 bytes of a unit: powers of 1024, two digits behind the point at
// most.
[[nodiscard]] std::string humanBytes(std::int64_t bytes);

// "kvgrid" and the arguments of a subcommand, as Report wants them.
[[nodiscard]] std::vector<std::string> commandArguments(int argc, const char* const* argv);

class Report {
public:
    // `columns` lives as long as the report.
    Report(std::string command, std::vector<std::string> argv, std::vector<Column> columns);

    // A "#" line of the preamble only.
    void note(std::string line);
    // A member of the JSON object, and "# label: value" in the preamble unless label is empty.
    void fact(std::string key, Cell value, std::string_view label = "", CellFormat format = plain);
    // The same behind the rows: what the run found out.
    void result(std::string key, Cell value, std::string_view label = "",
                CellFormat format = plain);
    // A list of objects in the JSON (ranks, libraries), in no face else. `fields` as in a row.
    void list(std::string key, std::vector<std::string> fields, std::vector<Row> rows);
    // As many cells as there are columns.
    void row(Row cells);

    [[nodiscard]] const std::vector<Row>& rows() const noexcept { return rows_; }

    // The table in pieces, for a run that prints as it goes: preamble with version and arguments,
    // headings, one row, results. Each ends in a newline. A cell wider than its column keeps all
    // digits.
    [[nodiscard]] std::string preamble() const;
    [[nodiscard]] std::string headings() const;
    [[nodiscard]] std::string line(const Row& cells) const;
    [[nodiscard]] std::string closing() const;

    [[nodiscard]] std::string table() const;  // all of it
    [[nodiscard]] std::string csv() const;    // a header of keys, then the rows
    [[nodiscard]] std::string json() const;

private:
    struct Fact {
        std::string key;
        Cell value;
    };
    struct List {
        std::string key;
        std::vector<std::string> fields;
        std::vector<Row> rows;
    };

    std::string command_;
    std::vector<std::string> argv_;
    std::vector<Column> columns_;
    std::vector<std::string> notes_;
    std::vector<std::string> closing_;
    std::vector<Fact> facts_;
    std::vector<List> lists_;
    std::vector<Row> rows_;
};

}  // namespace kvgrid::launch
