// kvgrid bench: times distributed decode. What every number means is in docs/bench.md.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <fmt/format.h>

#include <kvgrid/measure.h>

#include "launch/commands.h"
#include "launch/decode_options.h"
#include "launch/decode_report.h"
#include "launch/decode_run.h"
#include "launch/destination.h"
#include "launch/progress.h"
#include "launch/ranks.h"
#include "launch/reference.h"
#include "launch/report.h"
#include "launch/spot_check.h"

namespace kvgrid::launch {

namespace {

constexpr int vectors_to_check = 64;

// Parts of a step, each with its median and 99th percentile.
enum Part : std::size_t {
    append_part,
    attend_part,
    join_part,
    other_part,
    launch_part,
    step_part,
    part_count
};

std::string microseconds(const Cell& cell) {
    const auto* value = std::get_if<double>(&cell);
    if (value == nullptr) return plain(cell);
    return fmt::format("{:.{}f}", *value, *value < 10'000 ? 1 : 0);
}

std::string whole(const Cell& cell) {
    const auto* value = std::get_if<double>(&cell);
    return value == nullptr ? plain(cell) : fmt::format("{:.0f}", *value);
}

std::string scientific(const Cell& cell) {
    const auto* value = std::get_if<double>(&cell);
    return value == nullptr ? plain(cell) : fmt::format("{:.1e}", *value);
}

// `asynchronous`: see isAsynchronous; otherwise there is nothing that is called a launch.
std::vector<Column> columns(NumberFormat kv_format, bool asynchronous) {
    std::vector<Column> all{{"context_tokens", "context", "longest"},
                            {"mean_context_tokens", "context", "mean", whole},
                            {"append_p50_us", "append", "p50 us", microseconds, 7},
                            {"append_p99_us", "append", "p99 us", microseconds, 7},
                            {"attend_p50_us", "attend", "p50 us", microseconds, 7},
                            {"attend_p99_us", "attend", "p99 us", microseconds, 7},
                            {"join_p50_us", "join", "p50 us", microseconds, 7},
                            {"join_p99_us", "join", "p99 us", microseconds, 7},
                            {"other_p50_us", "other", "p50 us", microseconds, 7},
                            {"other_p99_us", "other", "p99 us", microseconds, 7}};
    if (asynchronous) {
        all.insert(all.end(), {{"launch_p50_us", "launch", "p50 us", microseconds, 7},
                               {"launch_p99_us", "launch", "p99 us", microseconds, 7}});
    }
    all.insert(all.end(), {{"step_p50_us", "step", "p50 us", microseconds, 7},
                           {"step_p99_us", "step", "p99 us", microseconds, 7},
                           {"kv_read_gb_per_s", "KV read", "GB/s", fixed2},
                           {"read_ceiling_share", "ceiling", "%", percent},
                           {"tokens_per_s", "decode", "tokens/s", fixed1},
                           {"max_rel_error", "error", "", scientific, 7},
                           {"checked", "checked", ""},
                           {"wrong", "wrong", ""}});
    if (hasScales(kv_format))
        all.push_back({"unquantised_rel_error", "error", "unquantised", scientific});
    return all;
}

CommandLine commandLine(DecodeOptions& options) {
    CommandLine line("bench", "times distributed decode");
    line.value("context", "L[,L]", "tokens of each sequence at the last step, a row each (4K)",
               sizesInto(options.contexts, 1))
        .value("lengths-from", "TRACE",
               "draw the sequences' lengths from a trace, --context at most",
               textInto(options.lengths_from));
    declareDecodeFlags(line, options, "of each rank (what the run needs)", "of each rank (0)");
    line.note("Times are of the slowest rank in each step. docs/bench.md defines every number.")
        .example("mpirun -n 4 kvgrid bench")
        .example("mpirun -n 8 kvgrid bench --model llama-3.1-70b --context 128K --batch 8")
        .example("kvgrid bench --share-of 8 --context 4K,16K,64K --json -",
                 "one rank of eight, alone")
        .example("mpirun -n 4 kvgrid bench --lengths-from conversation.jsonl --context 16K");
    return line;
}

// Of this host, as the kernel shows it; 0 when it shows none. (sysconf and CPUID give the physical
// machine's inside a virtual one.)
std::int64_t lastLevelCacheBytes() {
    std::set<std::string> seen;  // caches, each by the CPUs that share it
    std::int64_t bytes = 0;
    std::error_code ignored;
    for (const auto& cpu :
         std::filesystem::directory_iterator("/sys/devices/system/cpu", ignored)) {
        const std::filesystem::path cache = cpu.path() / "cache" / "index3";
        std::string cpus;
        std::int64_t kibibytes = 0;
        std::ifstream(cache / "shared_cpu_list") >> cpus;
        std::ifstream(cache / "size") >> kibibytes;
        if (kibibytes > 0 && seen.insert(cpus).second) bytes += kibibytes * 1024;
    }
    return bytes;
}

class BenchRun {
public:
    BenchRun(int argc, char** argv, const DecodeOptions& options, Process& process,
             Destination destination, DecodeSetup setup)
        : options_(options),
          process_(process),
          destination_(std::move(destination)),
          setup_(std::move(setup)),
          report_("bench", commandArguments(argc, argv),
                  columns(options.kv_format, isAsynchronous(process))),
          progress_(process.rank() == 0 && (options.progress || isatty(STDERR_FILENO) == 1)),
          reference_(setup_.config, options.seed) {}

    // Collective.
    [[nodiscard]] Result<Outcome> run();

private:
    using Times = std::array<double, part_count>;

    // A step as it is, and its parts: of the same run, or of another with events in between.
    struct Timed {
        StepTimes of_parts;
        StepTimes of_step;
    };

    struct Ceiling {  // GB/s of a rank
        double mean = 0, least = 0, most = 0, contiguous = 0;
        std::int64_t bytes = 0;
    };
    [[nodiscard]] Result<Ceiling> measureCeiling();
    [[nodiscard]] Result<void> measureCeilingFirst();
    // Notes when it has changed.
    [[nodiscard]] Result<void> measureCeilingAgain();
    // Ranks of this host take turns on its cores.
    [[nodiscard]] bool shareCores() const;
    // Ranks take turns, so that what one measures depends on what the others do.
    [[nodiscard]] bool isOversubscribed() const {
        return shareCores() || shareAGpu(process_.ranks());
    }
    // Notes of what makes the numbers mean less.
    void warn();
    [[nodiscard]] Result<void> fill(DecodeRun& decode, const Batch& batch);
    [[nodiscard]] Result<void> measure(DecodeRun& decode, const Batch& batch);
    // Collective. Of each step each part's longest time over ranks.
    [[nodiscard]] std::vector<Times> slowest(const std::vector<Timed>& steps);
    [[nodiscard]] std::vector<Unit> unitsToCheck(const CacheHeads& heads) const;
    // The first cells of a row.
    [[nodiscard]] Row timings(const Batch& batch, const std::vector<Times>& steps) const;
    // Adds what all ranks found to the row.
    void check(const SpotCheck::Found& found, Row& row);
    // Bytes of K and V that a rank reads in timed step `step`.
    [[nodiscard]] double kvBytes(const Batch& batch, int step) const;
    void print(const std::string& text);

    const DecodeOptions& options_;
    Process& process_;
    Destination destination_;
    DecodeSetup setup_;
    Report report_;
    Progress progress_;
    Reference reference_;
    double ceiling_gb_per_s_ = 0;  // mean over ranks
    std::int64_t wrong_ = 0;
    std::int64_t checked_ = 0;
};

double BenchRun::kvBytes(const Batch& batch, int step) const {
    const CacheConfig& config = setup_.config;
    double bytes = 0;
    for (const LayerGroup& group : config.geometry.groups) {
        std::int64_t tokens = 0;  // that one layer's queries see
        for (const std::int64_t length : batch.lengths) {
            const std::int64_t all = length - options_.steps + 1 + step;
            tokens += group.window == 0 ? all : std::min(all, group.window);
        }
        const int kv_heads = group.kv_heads / config.grid.heads;
        const auto row_bytes =
            static_cast<double>(bytesPerElement(config.kv_format)) * group.head_dim +
            static_cast<double>(scaleBytes(config.kv_format, config.block_size)) /
                config.block_size;
        bytes += static_cast<double>(tokens) * static_cast<double>(group.layers.size()) * kv_heads *
                 2.0 * row_bytes;
    }
    return bytes;
}

void BenchRun::print(const std::string& text) {
    if (process_.rank() != 0) return;
    std::fputs(text.c_str(), destination_.text());
    std::fflush(destination_.text());
}

Result<BenchRun::Ceiling> BenchRun::measureCeiling() {
    double most = 0;
    for (const Batch& batch : setup_.batches)
        most = std::max(most, kvBytes(batch, options_.steps - 1));
    constexpr std::int64_t mebibyte = 1 << 20;
    constexpr std::int64_t least = 64 * mebibyte;
    const std::int64_t limit = (process_.device() == DeviceKind::cuda ? 4096 : 512) * mebibyte;
    std::int64_t bytes = std::clamp(static_cast<std::int64_t>(most), least, limit);
    auto mine = measureReadCeiling(process_, bytes);
    // The pool may have left less.
    while (!mine && mine.error().code == ErrorCode::does_not_fit && bytes / 2 >= least) {
        bytes /= 2;
        mine = measureReadCeiling(process_, bytes);
    }
    if (!mine) return tl::unexpected(mine.error());

    Ceiling ceiling{.least = mine->gb_per_s, .most = mine->gb_per_s, .bytes = mine->bytes};
    const double values[] = {mine->gb_per_s, mine->contiguous_gb_per_s};
    for (const auto& rank : gatherValues(process_, values)) {
        ceiling.mean += rank.front() / process_.size();
        ceiling.contiguous += rank.back() / process_.size();
        ceiling.least = std::min(ceiling.least, rank.front());
        ceiling.most = std::max(ceiling.most, rank.front());
    }
    return ceiling;
}

Result<void> BenchRun::measureCeilingFirst() {
    progress_.begin("measuring the read ceiling");
    const auto ceiling = measureCeiling();
    if (!ceiling) return tl::unexpected(ceiling.error());
    report_.note(fmt::format(
        "read ceiling: {:.2f} GB/s a rank ({:.2f} to {:.2f}), {:.2f} contiguous, {} a rank, all "
        "ranks at once",
        ceiling->mean, ceiling->least, ceiling->most, ceiling->contiguous,
        humanBytes(ceiling->bytes)));
    report_.fact("read_ceiling_gb_per_s", ceiling->mean);
    report_.fact("read_ceiling_contiguous_gb_per_s", ceiling->contiguous);
    report_.fact("read_ceiling_bytes", ceiling->bytes);
    ceiling_gb_per_s_ = ceiling->mean;
    return {};
}

Result<void> BenchRun::measureCeilingAgain() {
    progress_.begin("measuring the read ceiling again");
    const auto ceiling = measureCeiling();
    if (!ceiling) return tl::unexpected(ceiling.error());
    report_.result("read_ceiling_at_end_gb_per_s", ceiling->mean);
    constexpr double steady = 0.1;
    if (!isOversubscribed() && std::abs(ceiling->mean / ceiling_gb_per_s_ - 1) > steady) {
        print(
            fmt::format("# read ceiling at the end: {:.2f} GB/s a rank, {:.2f} at the start: "
                        "something else used this machine, measure again\n",
                        ceiling->mean, ceiling_gb_per_s_));
    }
    return {};
}

bool BenchRun::shareCores() const {
    const std::int64_t threads = std::int64_t{process_.nodeSize()} * process_.threads();
    return process_.device() == DeviceKind::cpu && threads > sysconf(_SC_NPROCESSORS_ONLN);
}

void BenchRun::warn() {
    if (isOversubscribed()) {
        report_.note(fmt::format("{}, there is no share of the ceiling",
                                 shareCores()
                                     ? "more threads than cores: times include waiting for a core"
                                     : "ranks share a GPU: times include waiting for it"));
    }
    const std::int64_t cache = process_.device() == DeviceKind::cpu ? lastLevelCacheBytes() : 0;
    for (const Batch& batch : setup_.batches) {
        const double bytes = kvBytes(batch, options_.steps - 1) * process_.nodeSize();
        if (cache <= 0 || bytes > static_cast<double>(cache)) continue;
        report_.note(fmt::format(
            "context {}: a step's KV on this host ({}) fits its last-level "
            "cache ({}): GB/s and ceiling are overstated",
            batch.context, humanBytes(static_cast<std::int64_t>(bytes)), humanBytes(cache)));
    }
}

Result<Outcome> BenchRun::run() {
    CacheConfig config = setup_.config;
    config.device_blocks = options_.device_blocks.value_or(config.device_blocks);
    config.host_blocks = options_.host_blocks.value_or(0);
    if (const std::int64_t missing = setup_.config.device_blocks - config.device_blocks;
        missing > 0) {
        return failure(
            ErrorCode::does_not_fit,
            fmt::format("--device-blocks {}: the run needs {}, {} {} missing", config.device_blocks,
                        setup_.config.device_blocks, missing, missing == 1 ? "is" : "are"));
    }
    describeRun(report_, process_, options_, setup_);
    if (!options_.lengths_from.empty())
        report_.fact("lengths_from", options_.lengths_from, "lengths from");
    auto decode = DecodeRun::create(process_, config, options_.seed, setup_.graph);
    if (!decode) return tl::unexpected(decode.error());
    if (auto measured = measureCeilingFirst(); !measured) return tl::unexpected(measured.error());
    warn();

    print(report_.preamble() + report_.headings());
    for (const Batch& batch : setup_.batches) {
        if (auto measured = measure(*decode, batch); !measured)
            return tl::unexpected(measured.error());
        print(report_.line(report_.rows().back()));
    }
    if (auto measured = measureCeilingAgain(); !measured) return tl::unexpected(measured.error());
    report_.result("ok", wrong_ == 0);
    const auto written = process_.rank() == 0 ? destination_.write(report_) : Result<void>();
    if (auto agreed = agree(process_, written); !agreed) return tl::unexpected(agreed.error());
    if (wrong_ == 0) return Outcome{};
    return Outcome{
        .code = 1,
        .reason = fmt::format("{} of {} recomputed vectors are wrong", wrong_, checked_)};
}

Result<void> BenchRun::fill(DecodeRun& decode, const Batch& batch) {
    for (std::size_t sequence = 0; sequence < batch.lengths.size(); ++sequence) {
        const std::int64_t length = batch.lengths[sequence];
        const auto filling = [&](std::int64_t tokens) {
            progress_.update(fmt::format("context {}: sequence {} of {} has {} of {} tokens",
                                         batch.context, sequence + 1, batch.lengths.size(), tokens,
                                         length));
        };
        auto done = decode.addSequence(static_cast<std::int64_t>(sequence), length);
        if (done) done = decode.fill(sequence, length - setup_.decoded, {}, filling);
        if (!done) return done;
    }
    return {};
}

Result<void> BenchRun::measure(DecodeRun& decode, const Batch& batch) {
    progress_.begin(fmt::format("context {}: filling", batch.context));
    if (auto filled = fill(decode, batch); !filled) return filled;

    SpotCheck spot_check(reference_, unitsToCheck(decode.heads()), 1);
    std::vector<RunTokens> runs;
    for (std::size_t sequence = 0; sequence < batch.lengths.size(); ++sequence)
        runs.push_back({.sequence = sequence});
    std::vector<Timed> times;
    // Events between the kernels of a GPU would cost time: there the parts are of a run of their
    // own through each step, which is then dropped.
    const bool separately = process_.device() == DeviceKind::cuda;
    for (std::int64_t token = 0; token < setup_.decoded; ++token) {
        Result<StepTimes> parts;
        if (separately) parts = decode.step(runs, {.abandon = true, .timed = true}, {});
        if (!parts) return tl::unexpected(parts.error());
        DecodeRun::OnOutput take;
        if (token + 1 == setup_.decoded) {
            take = [&](const Step&, int layer, std::span<const float> out) {
                spot_check.take(layer, 0, out);
            };
        }
        auto time = decode.step(runs, {.timed = !separately}, take);
        if (!time) return tl::unexpected(time.error());
        if (token >= options_.warmup)
            times.push_back({.of_parts = separately ? *parts : *time, .of_step = *time});
        progress_.update(
            fmt::format("context {}: {} of {} steps", batch.context, token + 1, setup_.decoded));
    }
    decode.releaseSequences();

    Row row = timings(batch, slowest(times));
    progress_.begin(fmt::format("context {}: checking", batch.context));
    check(spot_check.compare(batch.lengths, errorBound(setup_.config.output_format),
                             process_.threads(), [&](std::size_t) { process_.barrier(); }),
          row);
    report_.row(std::move(row));
    return {};
}

std::vector<Unit> BenchRun::unitsToCheck(const CacheHeads& heads) const {
    const int vectors = (vectors_to_check + process_.size() - 1) / process_.size();
    const int group = reference_.groupSize();
    return pickUnits(setup_.config.geometry.layers, options_.batch,
                     {.first = heads.first_kv_head, .count = heads.kv_heads},
                     (vectors + group - 1) / group, options_.seed);
}

Row BenchRun::timings(const Batch& batch, const std::vector<Times>& steps) const {
    const double tokens = std::accumulate(batch.lengths.begin(), batch.lengths.end(), 0.0);
    Row row{batch.context, tokens / options_.batch};
    for (std::size_t part = 0; part < part_count; ++part) {
        if (part == launch_part && !isAsynchronous(process_)) continue;
        std::vector<double> us;
        for (const Times& step : steps)
            us.push_back(step[part] * 1e6);
        row.emplace_back(percentile(us, 0.5));
        row.emplace_back(percentile(us, 0.99));
    }
    std::vector<double> gb_per_s;
    double seconds = 0;
    for (std::size_t step = 0; step < steps.size(); ++step) {
        gb_per_s.push_back(kvBytes(batch, static_cast<int>(step)) / steps[step][attend_part] / 1e9);
        seconds += steps[step][step_part];
    }
    row.emplace_back(percentile(gb_per_s, 0.5));
    row.emplace_back();
    if (!isOversubscribed()) row.back() = percentile(gb_per_s, 0.5) / ceiling_gb_per_s_;
    row.emplace_back(options_.batch * static_cast<double>(steps.size()) / seconds);
    return row;
}

std::vector<BenchRun::Times> BenchRun::slowest(const std::vector<Timed>& steps) {
    std::vector<double> mine;
    for (const auto& [of_parts, of_step] : steps) {
        const CacheTiming& parts = of_parts.parts;
        const double other = of_parts.step_s - parts.append_s - parts.attend_s - parts.join_s;
        mine.insert(mine.end(), {parts.append_s, parts.attend_s, parts.join_s, other,
                                 of_step.launch_s, of_step.step_s});
    }
    std::vector<Times> most(steps.size(), Times{});
    for (const std::vector<double>& rank : gatherValues(process_, mine)) {
        for (std::size_t i = 0; i < rank.size(); ++i) {
            double& value = most[i / part_count][i % part_count];
            value = std::max(value, rank[i]);
        }
    }
    return most;
}

void BenchRun::check(const SpotCheck::Found& found, Row& row) {
    const double mine[] = {static_cast<double>(found.checked), static_cast<double>(found.wrong),
                           found.max_rel_error, found.unquantised_rel_error};
    SpotCheck::Found all;
    for (const std::vector<double>& rank : gatherValues(process_, mine)) {
        all.checked += static_cast<std::int64_t>(rank[0]);
        all.wrong += static_cast<std::int64_t>(rank[1]);
        all.max_rel_error = std::max(all.max_rel_error, rank[2]);
        all.unquantised_rel_error = std::max(all.unquantised_rel_error, rank[3]);
    }
    row.insert(row.end(), {all.max_rel_error, all.checked, all.wrong});
    if (reference_.quantises()) row.emplace_back(all.unquantised_rel_error);
    checked_ += all.checked;
    wrong_ += all.wrong;
}

}  // namespace

int runBench(int argc, char** argv) {
    DecodeOptions options;
    const auto parsed = commandLine(options).parse(argc, argv);
    if (!parsed) return refuse(argc, argv, parsed.error());
    if (parsed->answer) return answer(*parsed->answer);
    const auto body = [&](Process& process) -> Result<Outcome> {
        auto destination = openDestination(process, options.json, options.csv);
        if (!destination) return tl::unexpected(destination.error());
        auto setup = prepareDecode(options, process);
        const Result<void> prepared = setup ? Result<void>() : tl::unexpected(setup.error());
        if (auto agreed = agree(process, prepared); !agreed) return tl::unexpected(agreed.error());
        return BenchRun(argc, argv, options, process, std::move(*destination), std::move(*setup))
            .run();
    };
    return runOnRanks(argc, argv, processOptions(options), options.json == "-", body);
}

}  // namespace kvgrid::launch
