// kvgrid plan: the bytes of a KV cache, and whether they fit. Needs no MPI and no device.

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <kvgrid/capacity.h>

#include "launch/commands.h"
#include "launch/destination.h"
#include "launch/model_config.h"
#include "launch/options.h"
#include "launch/ranks.h"
#include "launch/report.h"

namespace kvgrid::launch {

namespace {

struct PlanOptions {
    std::string model;
    int ranks = 0;
    std::int64_t context = 0;  // tokens
    std::int64_t batch = 1;
    NumberFormat kv_format = NumberFormat::bf16;
    Grid grid;
    int block_size = 64;
    std::int64_t gpu_memory = 0;  // bytes of each rank; 0: not given
    std::string json;
};

CommandLine planCommandLine(PlanOptions& options) {
    CommandLine line("plan", "bytes of the KV cache of a model and context over ranks, exactly");
    line.value("model", "M", "a shipped model's name, or a path to a Hugging Face config.json",
               textInto(options.model), Need::required)
        .value("ranks", "N", "ranks, one a GPU", intInto(options.ranks, 1), Need::required)
        .value("context", "L", "tokens of each sequence; K, M, G = 1024",
               sizeInto(options.context, 1), Need::required)
        .value("batch", "B", "sequences (default 1)", sizeInto(options.batch, 1))
        .value("kv-dtype", "T", "bf16, fp16, fp8 (e4m3) or int8 (default bf16)",
               choiceInto(options.kv_format, kvFormats()))
        .value("grid", "HxC", "head axis x context axis, or auto (default auto)",
               gridInto(options.grid))
        .value("block-size", "N", "tokens of a block, a power of two from 1 to 256 (default 64)",
               intInto(options.block_size, 0))
        .value("gpu-memory", "SIZE",
               "bytes that each rank has for the cache; without it, whether "
               "it fits is not judged",
               sizeInto(options.gpu_memory, 1))
        .value("json", "FILE|-", "write JSON to a new file, or to stdout", textInto(options.json))
        .note(
            "Counts the KV cache alone, not weights or activations. Exit code 3: it does not fit.\n"
            "The last line of stdout is OK or FAILED: reason. With --json - the JSON is the only\n"
            "thing on stdout, and all else goes to stderr.")
        .example("kvgrid plan --model llama-3.1-70b --ranks 8 --context 128K --batch 8")
        .example("kvgrid plan --model ./config.json --ranks 4 --context 1M --gpu-memory 80G",
                 "does it fit?")
        .example("kvgrid plan --model gemma-3-27b --ranks 2 --context 128K --json - 2>/dev/null",
                 "for a program");
    return line;
}

const std::vector<Column> columns{
    {.key = "layers", .heading = "layers", .unit = ""},
    {.key = "window_tokens", .heading = "window", .unit = "tokens"},
    {.key = "kv_heads", .heading = "KV heads", .unit = ""},
    {.key = "head_dim", .heading = "head dim", .unit = ""},
    {.key = "bytes_per_token", .heading = "a token", .unit = "B", .format = bytes},
    {.key = "block_bytes", .heading = "a block of a rank", .unit = "B", .format = bytes},
    {.key = "blocks_per_sequence", .heading = "a sequence", .unit = "blocks"},
    {.key = "rank_bytes", .heading = "a rank", .unit = "B", .format = bytes},
};

// K and V of all layers and heads of the blocks that the ranks hold.
CapacityRequest capacityRequest(const PlanOptions& options, const ModelConfig& model) {
    return {.geometry = model.geometry,
            .ranks = options.ranks,
            .grid = options.grid,
            .context = options.context,
            .batch = options.batch,
            .kv_format = options.kv_format,
            .block_size = options.block_size,
            .memory_bytes = options.gpu_memory};
}

void describeModel(const PlanOptions& options, const ModelConfig& model, Report& report) {
    report.fact("model", model.name, "model");
    report.fact("query_heads", std::int64_t{model.geometry.query_heads}, "query heads");
    std::int64_t with_kv = 0;
    for (const LayerGroup& group : model.geometry.groups) {
        with_kv += static_cast<std::int64_t>(group.layers.size());
    }
    report.fact("layers", std::int64_t{model.geometry.layers});
    report.fact("layers_without_kv", model.geometry.layers - with_kv);
    if (with_kv < model.geometry.layers) {
        report.note(fmt::format("layers without KV: {} of {}", model.geometry.layers - with_kv,
                                model.geometry.layers));
    }
    report.fact("max_positions",
                model.max_positions > 0 ? Cell(model.max_positions) : Cell(std::monostate{}));
    if (model.max_positions > 0 && options.context > model.max_positions) {
        report.note(fmt::format("the model itself ends at {} positions", model.max_positions));
    }
    std::vector<Row> obstacles;
    for (const Obstacle& obstacle : model.obstacles) {
        if (obstacle.beyond >= options.context) continue;
        report.note(fmt::format("not decoded yet: {}: {}", obstacle.key, obstacle.why));
        obstacles.push_back({obstacle.key, obstacle.why});
    }
    report.list("not_decoded_yet", {"key", "why"}, std::move(obstacles));
}

void describeRun(const PlanOptions& options, const Capacity& capacity, Report& report) {
    report.fact("ranks", std::int64_t{options.ranks}, "ranks");
    report.fact("grid", fmt::format("{}x{}", capacity.grid.heads, capacity.grid.context),
                "grid (head axis x context axis)");
    report.fact("duplication_factor", capacity.duplication_factor, "duplication factor");
    report.fact("context_tokens", options.context, "context (tokens)");
    report.fact("batch", options.batch, "batch (sequences)");
    report.fact("kv_dtype", std::string(name(options.kv_format)), "KV dtype");
    report.fact("block_size_tokens", std::int64_t{options.block_size}, "block size (tokens)");
}

void addGroups(const ModelConfig& model, const Capacity& capacity, Report& report) {
    for (std::size_t i = 0; i < capacity.groups.size(); ++i) {
        const GroupCapacity& group = capacity.groups[i];
        const LayerGroup& shape = model.geometry.groups[i];
        report.row({std::int64_t{group.layers},
                    group.window > 0 ? Cell(group.window) : Cell(std::monostate{}),
                    std::int64_t{shape.kv_heads}, std::int64_t{shape.head_dim},
                    group.bytes_per_token, group.block_bytes, group.blocks_per_sequence,
                    group.rank_bytes});
    }
}

void addTotals(const PlanOptions& options, const Capacity& capacity, Report& report) {
    report.result("bytes_per_token", capacity.bytes_per_token, "bytes a token", bytes);
    report.result("rank_bytes", capacity.rank_bytes, "bytes a rank", bytes);
    report.result("total_bytes", capacity.total_bytes, "bytes in all", bytes);
    const bool judged = options.gpu_memory > 0;
    const auto known = [&](Cell value) {
        return judged ? std::move(value) : Cell(std::monostate{});
    };
    report.result("gpu_memory_bytes", known(options.gpu_memory),
                  judged ? "bytes of memory a rank" : "", bytes);
    report.result("fits", known(capacity.fits));
    report.result("spare_bytes", known(capacity.spare_bytes),
                  judged && capacity.fits ? "bytes to spare a rank" : "", bytes);
}

int finish(const PlanOptions& options, const Capacity& capacity, const Destination& destination) {
    if (capacity.fits) return verdict(destination.text(), 0);
    return verdict(
        destination.text(), exitCode(ErrorCode::does_not_fit),
        fmt::format("does not fit: {} bytes ({}) a rank, {} ({}) missing of {}",
                    capacity.rank_bytes, humanBytes(capacity.rank_bytes), -capacity.spare_bytes,
                    humanBytes(-capacity.spare_bytes), humanBytes(options.gpu_memory)));
}

}  // namespace

int runPlan(int argc, char** argv) {
    PlanOptions options;
    const auto parsed = planCommandLine(options).parse(argc, argv);
    if (!parsed) return refuse(argc, argv, parsed.error());
    if (parsed->answer) return answer(*parsed->answer);
    // Under a launcher the first rank says it all, and its exit code is the job's.
    if (launcherRank() != 0) return 0;
    const auto destination = Destination::check(options.json, "");
    if (!destination) return refuse(argc, argv, destination.error());
    const auto model = loadModelConfig(options.model);
    if (!model) return refuse(argc, argv, model.error());
    const auto capacity = computeCapacity(capacityRequest(options, *model));
    if (!capacity) return refuse(argc, argv, capacity.error());

    Report report("plan", commandArguments(argc, argv), columns);
    describeModel(options, *model, report);
    describeRun(options, *capacity, report);
    addGroups(*model, *capacity, report);
    addTotals(options, *capacity, report);
    std::fputs(report.table().c_str(), destination->text());
    if (const auto written = destination->write(report); !written) {
        return refuse(argc, argv, written.error());
    }
    return finish(options, *capacity, *destination);
}

}  // namespace kvgrid::launch
