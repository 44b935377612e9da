// Times one layer's attention against the read ceiling of the same run and checks its outputs;
// attend_benchmark on the CPU device, attend_benchmark_gpu on a GPU. `--help` says how to call it.
//
// Every launch reads another layer, over block ids that are scattered through the whole pool.
// ceiling: readRuns of 32 KB runs, permuted, over as many bytes as a launch reads. plain: from an
// event before a launch to one behind it. graph: one CUDA graph of many launches, divided by their
// number; null on the CPU. GB/s count K and V alone, once for a GQA group.
// roof, on the CPU alone: K and V over the longer of the times that they take to be read at the
// ceiling and that the launch's multiply-adds take at the peak of the same run, which is fp32
// multiply-adds of all threads in registers.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/device.h"
#include "kernels/ops.h"
#include "launch/git_hash.h"
#include "tests/kernels/attend_shapes.h"
#include "tests/kernels/attend_step.h"
#ifndef KVGRID_TEST_CUDA
#include "kernels/cpu/multiply_adds.h"
#endif

namespace kvgrid {
namespace {

#ifdef KVGRID_TEST_CUDA
constexpr DeviceKind device_kind = DeviceKind::cuda;
constexpr const char* program = "attend_benchmark_gpu";
constexpr std::int64_t default_pool_gib = 24;
#else
constexpr DeviceKind device_kind = DeviceKind::cpu;
constexpr const char* program = "attend_benchmark";
constexpr std::int64_t default_pool_gib = 2;
#endif

constexpr const char* usage = R"( [--shape SHAPE]... [--only TEXT] [--formats LIST] [--json FILE]
        [--gib POOL] [--threads N]

  --shape    BATCHxCONTEXT[+BATCHxCONTEXT...]xQUERY/KV[xDIM][qROWS][wWINDOW]: sequences, heads, head
             dim (128), new tokens of each (1), tokens that a row sees (all); again for another
             shape. Otherwise a list of its own
  --only     of the list, the shapes that have TEXT in their name
  --formats  of K and V, with commas: bf16, fp16, fp8, int8 (bf16)
  --json     the report, in a new file
  --gib      the pool, in GiB: all launches together read from it (CUDA 24, CPU 2)
  --threads  of the CPU device (all that this process may use)

Exit code 1: an output is wrong. 2: usage. 3: does not fit. 4: no GPU.
)";

constexpr std::int64_t run_bytes = 32768;
constexpr int repetitions = 24;
constexpr int warm_up = 3;

double median(std::vector<double> values) {
    std::nth_element(values.begin(),
                     values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
}

class Benchmark {
public:
    Benchmark(std::unique_ptr<Device> device, std::int64_t pool_bytes)
        : device_(std::move(device)),
          pool_(orThrow(Buffer::onDevice(*device_, static_cast<std::size_t>(pool_bytes)))),
          sink_(orThrow(Buffer::onDevice(*device_, sizeof(std::uint64_t)))),
          order_(upload(*device_, permutation(pool_bytes / run_bytes, 1))),
          begin_(*device_, true),
          end_(*device_, true) {
        report["schema"] = 2;
        report["program"] = program;
        report["commit"] = KVGRID_GIT_HASH;
        report["device"] = device_->description();
        report["threads"] = device_->threads();
        report["block_size"] = block_size;
        report["pool_bytes"] = pool_bytes;
        report["repetitions"] = repetitions;
        report["rows"] = nlohmann::json::array();
        std::printf("# %s (%s), blocks of %lld tokens, medians of %d\n",
                    device_->description().c_str(), KVGRID_GIT_HASH,
                    static_cast<long long>(block_size), repetitions);
    }

    // Fills the pool with numbers of this format.
    void use(NumberFormat format) {
        format_ = format;
        pattern_.emplace(format);
        pattern_->fill(*device_, pool_);
        const std::int64_t bytes = static_cast<std::int64_t>(pool_.bytes()) / 4;
        const double rate = ceiling(bytes);
        report["ceiling_gb_per_s"] = rate;
        std::printf("# %s, ceiling of %.1f GB in 32 KB runs: %.0f GB/s\n", name(format).data(),
                    static_cast<double>(bytes) / 1e9, rate);
        const bool cuda = device_kind == DeviceKind::cuda;
        std::printf("# %-26s %8s %9s %10s %8s %10s %8s %9s %7s %s\n", "batch x context x heads",
                    "MB", "ceiling", "plain us", "of ceil", cuda ? "graph us" : "roof",
                    cuda ? "of ceil" : "of roof", "error", "checked", "wrong");
    }

    void run(const AttendShape& shape) {
        Step step(*device_, shape, pool_, *pattern_, format_);
        const std::int64_t bytes = shape.bytes(format_);
        const double ceiling_rate = ceiling(bytes);
        const std::int64_t launches = std::max<std::int64_t>(step.layers, 8);

        for (int i = 0; i < warm_up; ++i)
            step.attend(i);
        std::vector<double> times;
        for (int i = 0; i < repetitions; ++i)
            times.push_back(time([&] { step.attend(warm_up + i); }));
        const double plain_us = median(times);
        step.poisonOut();
        step.attend(launches - 1);
        const std::vector<float> out = step.out();
        const Checked checked = step.check(out, errorBound(*device_, format_));
        std::int64_t wrong = checked.wrong;

        nlohmann::json row{{"shape", shape.name},
                           {"format", name(format_)},
                           {"sequences", shape.sequences()},
                           {"rows", shape.rows},
                           {"window", shape.window > 0 ? nlohmann::json(shape.window) : nullptr},
                           {"query_heads", shape.query_heads},
                           {"kv_heads", shape.kv_heads},
                           {"head_dim", shape.head_dim},
                           {"kv_bytes", bytes},
                           {"layers", step.layers},
                           {"launches", launches},
                           {"ceiling_gb_per_s", ceiling_rate},
                           {"multiply_adds", shape.multiplyAdds()},
                           {"multiply_add_peak_g_per_s", nullptr},
                           {"roof_gb_per_s", nullptr},
                           {"plain_roof_share", nullptr},
                           {"checked", checked.vectors},
                           {"max_rel_error", checked.max_rel_error}};
        const auto add = [&](const std::string& launch, std::optional<double> microseconds) {
            row[launch + "_us"] = nullptr;
            row[launch + "_gb_per_s"] = nullptr;
            row[launch + "_ceiling_share"] = nullptr;
            if (!microseconds) return std::string("         -        -");
            const double rate = static_cast<double>(bytes) / *microseconds / 1e3;
            row[launch + "_us"] = *microseconds;
            row[launch + "_gb_per_s"] = rate;
            row[launch + "_ceiling_share"] = rate / ceiling_rate;
            char text[64];
            std::snprintf(text, sizeof text, "%10.1f %7.1f%%", *microseconds,
                          100 * rate / ceiling_rate);
            return std::string(text);
        };
        const std::string plain = add("plain", plain_us);
        std::string last;
        if constexpr (device_kind == DeviceKind::cuda) {
            step.poisonOut();
            last = add("graph", timeGraph(step, launches));
            // Equal bits, every one: the graph's last launch is the one that the oracle saw.
            const std::vector<float> again = step.out();
            if (std::memcmp(again.data(), out.data(), out.size() * sizeof(float)) != 0) ++wrong;
        } else {
            add("graph", std::nullopt);
            const double peak = multiplyAddPeak();
            const double roof = static_cast<double>(bytes) /
                                std::max(static_cast<double>(bytes) / ceiling_rate,
                                         static_cast<double>(shape.multiplyAdds()) / peak);
            const double share = static_cast<double>(bytes) / plain_us / 1e3 / roof;
            row["multiply_add_peak_g_per_s"] = peak;
            row["roof_gb_per_s"] = roof;
            row["plain_roof_share"] = share;
            char text[64];
            std::snprintf(text, sizeof text, "%10.2f %7.1f%%", roof, 100 * share);
            last = text;
        }
        row["wrong"] = wrong;
        any_wrong_ = any_wrong_ || wrong > 0;
        report["rows"].push_back(row);
        std::printf("  %-26s %8.1f %9.2f %s %s %9.1e %7lld %lld\n", shape.name.c_str(),
                    static_cast<double>(bytes) / 1e6, ceiling_rate, plain.c_str(), last.c_str(),
                    checked.max_rel_error, static_cast<long long>(checked.vectors),
                    static_cast<long long>(wrong));
        std::fflush(stdout);
    }

    [[nodiscard]] bool anyWrong() const { return any_wrong_; }

    nlohmann::json report;

private:
    // Microseconds on the device.
    double time(const std::function<void()>& work) {
        const StreamView stream = device_->defaultStream();
        begin_.record(stream);
        work();
        end_.record(stream);
        device_->synchronize(stream);
        return 1e6 * end_.secondsSince(begin_);
    }

    // GB/s of the probe over `bytes` a launch, other runs each time.
    double ceiling(std::int64_t bytes) {
        const std::int64_t all = static_cast<std::int64_t>(pool_.bytes()) / run_bytes;
        const std::int64_t count = std::clamp<std::int64_t>(bytes / run_bytes, 1, all);
        std::vector<double> times;
        std::int64_t first = 0;
        for (int i = 0; i < warm_up + repetitions; ++i) {
            if (first + count > all) first = 0;
            const ReadRunsParams params{.data = pool_.data(),
                                        .order = order_.as<std::int32_t>() + first,
                                        .count = count,
                                        .run_bytes = run_bytes,
                                        .sink = sink_.as<std::uint64_t>()};
            const double taken =
                time([&] { device_->operations().readRuns(params, device_->defaultStream()); });
            if (i >= warm_up) times.push_back(taken);
            first += count;
        }
        return static_cast<double>(count * run_bytes) / median(times) / 1e3;
    }

    // Multiply-adds of all threads, 10^9 a second; 0 on CUDA, which has no such probe.
    double multiplyAddPeak() {
#ifdef KVGRID_TEST_CUDA
        return 0;
#else
        std::vector<double> rates;
        for (int i = 0; i < warm_up + repetitions; ++i) {
            std::int64_t count = 0;
            const double taken = time([&] { count = cpu::multiplyAdds(*device_); });
            if (i >= warm_up) rates.push_back(static_cast<double>(count) / taken / 1e3);
        }
        return median(rates);
#endif
    }

    double timeGraph(Step& step, std::int64_t launches) {
        const StreamView stream = device_->defaultStream();
        device_->beginCapture(stream);
        for (std::int64_t i = 0; i < launches; ++i)
            step.attend(i);
        const Graph graph = Graph::endCapture(stream);
        std::vector<double> times;
        for (int i = 0; i < warm_up + repetitions; ++i) {
            const double taken = time([&] { graph.launch(stream); });
            if (i >= warm_up) times.push_back(taken / static_cast<double>(launches));
        }
        return median(times);
    }

    std::unique_ptr<Device> device_;
    Buffer pool_;
    Buffer sink_;
    Buffer order_;
    Event begin_;
    Event end_;
    NumberFormat format_ = NumberFormat::bf16;
    std::optional<Pattern> pattern_;
    bool any_wrong_ = false;
};

struct Options {
    std::vector<AttendShape> shapes;
    std::vector<NumberFormat> formats{NumberFormat::bf16};
    std::string only;
    std::string json;
    std::int64_t gib = default_pool_gib;
    std::int64_t threads = std::max<std::int64_t>(1, std::thread::hardware_concurrency());
};

[[noreturn]] void refuse(const std::string& message) {
    throw Error(ErrorCode::invalid_argument, message);
}

std::int64_t number(const std::string& option, const std::string& text) {
    if (text.empty() || text.size() > 6 ||
        text.find_first_not_of("0123456789") != std::string::npos || std::stoll(text) < 1)
        refuse(option + ": '" + text + "' is no number from 1 on");
    return std::stoll(text);
}

std::vector<NumberFormat> parseFormats(const std::string& text) {
    std::vector<NumberFormat> formats;
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find(',', begin), text.size());
        const std::string word = text.substr(begin, end - begin);
        begin = end + 1;
        if (word == "bf16")
            formats.push_back(NumberFormat::bf16);
        else if (word == "fp16")
            formats.push_back(NumberFormat::fp16);
        else if (word == "fp8")
            formats.push_back(NumberFormat::fp8_e4m3);
        else if (word == "int8")
            formats.push_back(NumberFormat::int8);
        else
            refuse("--formats: '" + word + "' is none of bf16, fp16, fp8, int8");
    }
    return formats;
}

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; i += 2) {
        const std::string option = argv[i];
        if (i + 1 == argc) refuse(option + " is unknown or wants a value (--help)");
        const std::string value = argv[i + 1];
        if (option == "--shape")
            options.shapes.push_back(orThrow(parseAttendShape(value)));
        else if (option == "--only")
            options.only = value;
        else if (option == "--formats")
            options.formats = parseFormats(value);
        else if (option == "--json")
            options.json = value;
        else if (option == "--gib")
            options.gib = number(option, value);
        else if (option == "--threads")
            options.threads = number(option, value);
        else
            refuse("unknown option " + option + " (--help)");
    }
    if (options.shapes.empty()) options.shapes = attendShapes(device_kind);
    std::erase_if(options.shapes, [&](const AttendShape& shape) {
        return shape.name.find(options.only) == std::string::npos;
    });
    if (options.shapes.empty()) refuse("--only: no shape has '" + options.only + "' in its name");
    for (const AttendShape& shape : options.shapes)
        for (const NumberFormat format : options.formats)
            if (shape.blockBytes(block_size, format) > options.gib << 30)
                throw Error(
                    ErrorCode::does_not_fit,
                    shape.name + " wants " +
                        std::to_string(((shape.blockBytes(block_size, format) - 1) >> 30) + 1) +
                        " GiB: --gib says " + std::to_string(options.gib));
    if (!options.json.empty()) {
        if (std::ifstream(options.json))
            refuse("--json: " + options.json + " exists and is not overwritten");
        const auto folder = std::filesystem::absolute(options.json).parent_path();
        if (access(folder.c_str(), W_OK) != 0) refuse("--json: cannot write " + options.json);
    }
    return options;
}

int benchmark(int argc, char** argv) {
    if (argc == 2 && std::string(argv[1]) == "--help") {
        std::printf("%s%s", program, usage);
        return 0;
    }
    const Options options = parse(argc, argv);
    Benchmark bench(device_kind == DeviceKind::cuda
                        ? makeCudaDevice(0)
                        : makeCpuDevice(static_cast<int>(options.threads)),
                    options.gib << 30);
    for (const NumberFormat format : options.formats) {
        bench.use(format);
        for (const AttendShape& shape : options.shapes)
            bench.run(shape);
    }
    if (!options.json.empty() && !(std::ofstream(options.json) << bench.report.dump(1) << '\n'
                                                               << std::flush))
        refuse("--json: cannot write " + options.json);
    std::printf("# %s\n", bench.anyWrong() ? "FAILED" : "OK");
    return bench.anyWrong() ? 1 : 0;
}

}  // namespace
}  // namespace kvgrid

int main(int argc, char** argv) {
    try {
        return kvgrid::benchmark(argc, argv);
    } catch (const kvgrid::Error& error) {
        std::fprintf(stderr, "%s: %s\n", kvgrid::program, error.what());
        return kvgrid::exitCode(error.code());
    }
}
