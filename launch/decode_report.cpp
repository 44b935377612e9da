#include "launch/decode_report.h"

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <kvgrid/config.h>
#include <kvgrid/types.h>

namespace kvgrid::launch {

namespace {

void describeModel(Report& report, const DecodeOptions& options, const DecodeSetup& setup) {
    const Geometry& geometry = setup.config.geometry;
    report.note(fmt::format(
        "model: {}, {} layers x {} query heads, {} KV heads of {}{}", setup.model.name,
        geometry.layers, geometry.query_heads, setup.kvHeads(), setup.headDim(),
        options.share_of > 1 ? fmt::format(" (the share of one rank of {})", options.share_of)
                             : ""));
    std::vector<Row> group_rows;
    for (const LayerGroup& group : geometry.groups) {
        const auto layers = static_cast<std::int64_t>(group.layers.size());
        Cell window;
        if (group.window > 0) {
            window = group.window;
            report.note(fmt::format("windows: {} layers see {} tokens", layers, group.window));
        }
        group_rows.push_back({layers, window});
    }
    report.list("layer_groups", {"layers", "window_tokens"}, std::move(group_rows));
    report.fact("model", setup.model.name);
    report.fact("layers", std::int64_t{geometry.layers});
    report.fact("share_of", std::int64_t{options.share_of});
    report.fact("query_heads", std::int64_t{geometry.query_heads});
    report.fact("kv_heads", std::int64_t{setup.kvHeads()});
    report.fact("head_dim", std::int64_t{setup.headDim()});
}

// "0.01 to 0.25"
std::string rangeOf(const CacheConfig& config, std::vector<float> KvScales::*scales) {
    float least = KvScales::most, most = KvScales::least;
    for (const KvScales& layer : config.kv_scales) {
        for (const float scale : layer.*scales) {
            least = std::min(least, scale);
            most = std::max(most, scale);
        }
    }
    return fmt::format("{:.4g} to {:.4g}", least, most);
}

void describeCache(Report& report, const Process& process, const DecodeOptions& options,
                   const DecodeSetup& setup) {
    const CacheConfig& config = setup.config;
    const std::string grid = fmt::format("{}x{}", config.grid.heads, config.grid.context);
    const std::string blocks = config.layout == PoolLayout::contiguous
                                   ? "one block a sequence"
                                   : fmt::format("blocks of {} tokens", config.block_size);
    const std::string launch = setup.graph                            ? ", a CUDA graph a step"
                               : process.device() == DeviceKind::cuda ? ", eager"
                                                                      : "";
    report.note(fmt::format("cache: {} over {}, grid {}, {} KV, {} output, {}, {}{}",
                            name(process.device()), name(process.transport()), grid,
                            name(config.kv_format), name(config.output_format), name(config.layout),
                            blocks, launch));
    if (!config.kv_scales.empty()) {
        report.note(fmt::format("KV scales: fixed, from {}; K {}, V {}", options.kv_scales,
                                rangeOf(config, &KvScales::k), rangeOf(config, &KvScales::v)));
        report.fact("kv_scales", options.kv_scales);
    }
    report.fact("device", std::string(name(process.device())));
    report.fact("transport", std::string(name(process.transport())));
    report.fact("grid", grid);
    report.fact("kv_dtype", std::string(name(config.kv_format)));
    report.fact("output_dtype", std::string(name(config.output_format)));
    report.fact("graph", std::string(setup.graph ? "on" : "off"));
    report.fact("layout", std::string(name(config.layout)));
    report.fact("block_size_tokens", std::int64_t{config.block_size});
}

void describeRanks(Report& report, const Process& process) {
    const std::vector<std::string> libraries = process.libraries();
    report.note(fmt::format("libraries: {}", fmt::join(libraries, ", ")));
    std::vector<Row> library_rows;
    for (const std::string& library : libraries)
        library_rows.push_back({library});
    report.list("libraries", {"name"}, std::move(library_rows));

    std::vector<Row> rank_rows;
    for (const RankDescription& rank : process.ranks()) {
        report.note(fmt::format("rank {} host {} pid {} device {}", rank.rank, rank.host, rank.pid,
                                rank.device));
        rank_rows.push_back(
            {std::int64_t{rank.rank}, rank.host, std::int64_t{rank.pid}, rank.device});
    }
    report.list("ranks", {"rank", "host", "pid", "device"}, std::move(rank_rows));
}

}  // namespace

void describeRun(Report& report, const Process& process, const DecodeOptions& options,
                 const DecodeSetup& setup) {
    describeRanks(report, process);
    describeModel(report, options, setup);
    describeCache(report, process, options, setup);
    report.note(fmt::format("run: {} sequences, {} steps after {} of warm-up, seed {}",
                            options.batch, options.steps, options.warmup, options.seed));
    report.fact("batch", std::int64_t{options.batch});
    report.fact("steps", std::int64_t{options.steps});
    report.fact("warmup_steps", std::int64_t{options.warmup});
    report.fact("seed", fmt::format("{}", options.seed));
}

}  // namespace kvgrid::launch
