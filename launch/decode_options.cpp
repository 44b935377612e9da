#include "launch/decode_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <kvgrid/capacity.h>

#include "launch/decode_run.h"
#include "launch/kv_scales.h"
#include "launch/trace.h"

namespace kvgrid::launch {

namespace {

constexpr int most_sequences = 1 << 20;
constexpr int most_steps = 1 << 20;

tl::unexpected<Failure> invalid(std::string message) {
    return failure(ErrorCode::invalid_argument, std::move(message));
}

// The part of the model that runs.
Result<Geometry> decodedGeometry(const ModelConfig& model, const DecodeOptions& options,
                                 std::int64_t longest) {
    if (model.max_positions > 0 && longest > model.max_positions) {
        return invalid(fmt::format("--context {}: {} has max_position_embeddings {}", longest,
                                   model.name, model.max_positions));
    }
    auto geometry = decodableGeometry(model, longest);
    if (geometry && options.layers > 0) geometry = firstLayers(*geometry, options.layers);
    if (!geometry || options.share_of == 1) return geometry;
    return shareOf(*geometry, options.share_of).map_error([](Failure refused) {
        refused.message = "--share-of: " + refused.message;
        return refused;
    });
}

Result<std::vector<Batch>> makeBatches(const DecodeOptions& options, std::int64_t decoded) {
    for (const std::int64_t context : options.contexts) {
        if (context < decoded) {
            return invalid(
                fmt::format("--context {}: shorter than the {} tokens of --warmup and --steps",
                            context, decoded));
        }
    }
    const auto count = static_cast<std::size_t>(options.batch);
    std::vector<Batch> batches;
    if (options.lengths_from.empty()) {
        for (const std::int64_t context : options.contexts)
            batches.push_back({context, std::vector<std::int64_t>(count, context)});
        return batches;
    }
    if (options.contexts.size() > 1) {
        return invalid("--context: with --lengths-from it is one number, the longest length");
    }
    const auto trace = readTrace(options.lengths_from);
    if (!trace) return tl::unexpected(trace.error());
    if (trace->requests.empty()) return invalid(options.lengths_from + ": no requests");
    auto lengths = drawLengths(*trace, options.batch, options.seed, options.contexts.front());
    for (std::int64_t& length : lengths)
        length = std::max(length, decoded);
    batches.push_back({*std::max_element(lengths.begin(), lengths.end()), std::move(lengths)});
    return batches;
}

Result<bool> chooseGraph(const DecodeOptions& options, const Process& process) {
    const bool possible = isAsynchronous(process);
    if (!options.graph.value_or(false) || possible) return options.graph.value_or(possible);
    return failure(ErrorCode::unavailable,
                   process.device() == DeviceKind::cuda
                       ? "--graph on: the MPI transport is eager, its joins cannot be captured"
                       : "--graph on: the CPU device has no graphs");
}

// Of the part of the model that runs; empty without --kv-scales.
Result<std::vector<KvScales>> kvScales(const DecodeOptions& options, const ModelConfig& model,
                                       const Geometry& part) {
    if (options.kv_scales.empty()) return std::vector<KvScales>();
    if (!hasScales(options.kv_format)) {
        return invalid(fmt::format("--kv-scales: {} has no scales, --kv-dtype fp8 and int8 have",
                                   name(options.kv_format)));
    }
    return readKvScales(options.kv_scales, model.geometry)
        .map([&](std::vector<KvScales> whole) { return scalesOf(part, std::move(whole)); })
        .map_error([](Failure refused) {
            refused.message = "--kv-scales: " + refused.message;
            return refused;
        });
}

Setter blocksInto(std::optional<std::int64_t>& out, std::int64_t least) {
    return [&out, least](const std::string& text) {
        constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
        return parseCount(text, least, most).map([&](std::int64_t blocks) { out = blocks; });
    };
}

// Of the largest batch.
Result<std::int64_t> neededBlocks(const DecodeSetup& setup) {
    std::int64_t most = 0;
    for (const Batch& batch : setup.batches) {
        std::int64_t blocks = 0;
        for (const std::int64_t length : batch.lengths) {
            if (__builtin_add_overflow(blocks, setup.blocksOf(length), &blocks)) {
                return invalid(fmt::format("--context {}: its blocks are beyond 64 bits", length));
            }
        }
        most = std::max(most, blocks);
    }
    constexpr std::int64_t limit = std::numeric_limits<std::int32_t>::max();
    if (most > limit) {
        return failure(ErrorCode::does_not_fit,
                       fmt::format("--context, --batch: {} blocks a rank are needed, a pool has at "
                                   "most {}: {} are missing",
                                   most, limit, most - limit));
    }
    return most;
}

}  // namespace

void declareDecodeFlags(CommandLine& line, DecodeOptions& options, const std::string& device_blocks,
                        const std::string& host_blocks) {
    line.value("model", "M", "shipped name, or path of a config.json (llama-3.1-8b)",
               textInto(options.model))
        .value("layers", "N", "the first N layers only (all)", intInto(options.layers, 1))
        .value("share-of", "N", "decode what one rank of N would own (1)",
               intInto(options.share_of, 1))
        .value("batch", "B", "sequences (4)", intInto(options.batch, 1, most_sequences))
        .value("steps", "N", "measured or checked decode steps (8)",
               intInto(options.steps, 1, most_steps))
        .value("warmup", "N", "decode steps before them (2)",
               intInto(options.warmup, 0, most_steps))
        .value("seed", "S", "of all data (0)", seedInto(options.seed))
        .value("device", "auto|cpu|cuda", "where the pools lie (auto)",
               choiceInto(options.device, deviceKinds()))
        .value("transport", "auto|mpi|nccl", "how ranks join outputs (auto)",
               choiceInto(options.transport, transportKinds()))
        .value("graph", "auto|on|off", "launch each step as one CUDA graph (auto: where it can)",
               choiceInto(options.graph, graphChoices()))
        .flag("share-gpu", "ranks may have one GPU together, for tests", options.share_gpu)
        .value("grid", "HxC|auto", "head axis x context axis (auto)", gridInto(options.grid))
        .value("kv-dtype", "bf16|fp16|fp8|int8", "format of stored K and V (bf16)",
               choiceInto(options.kv_format, kvFormats()))
        .value("kv-scales", "FILE",
               "fixed scales of fp8 or int8 from a checkpoint (each row its own)",
               textInto(options.kv_scales))
        .value("block-size", "N", "tokens of a block, a power of two up to 256 (64)",
               intInto(options.block_size, 0))
        .value("layout", "block-major|layer-major|contiguous",
               "how blocks lie in a pool (block-major)", choiceInto(options.layout, poolLayouts()))
        .value("device-blocks", "N", device_blocks, blocksInto(options.device_blocks, 1))
        .value("host-blocks", "N", host_blocks, blocksInto(options.host_blocks, 0))
        .value("threads", "N", "CPU threads of a rank (its cores)",
               intInto(options.threads, 1, 4096))
        .value("timeout", "S", "seconds after which a stuck operation ends the job (60)",
               intInto(options.timeout_s, 1, 1 << 20))
        .value("json", "FILE|-", "write the results as JSON", textInto(options.json))
        .value("csv", "FILE", "write the rows as CSV", textInto(options.csv))
        .flag("progress", "say on stderr how far it is (unasked when that is a terminal)",
              options.progress);
}

ProcessOptions processOptions(const DecodeOptions& options) {
    return {.device = options.device,
            .transport = options.transport,
            .timeout = std::chrono::seconds(options.timeout_s),
            .threads = options.threads,
            .share_gpu = options.share_gpu};
}

bool isAsynchronous(const Process& process) {
    const bool eager_join = process.transport() == TransportKind::mpi && process.size() > 1;
    return process.device() == DeviceKind::cuda && !eager_join;
}

std::int64_t DecodeSetup::blocksOf(std::int64_t tokens) const noexcept {
    if (config.layout == PoolLayout::contiguous) return 1;
    std::int64_t most = 0;
    for (const LayerGroup& group : config.geometry.groups) {
        most = std::max(most,
                        blocksOfSequence(group, tokens, DecodeRun::fill_tokens, config.block_size));
    }
    return most;
}

Result<DecodeSetup> prepareDecode(const DecodeOptions& options, const Process& process) {
    if (options.share_gpu && process.device() == DeviceKind::cpu)
        return invalid("--share-gpu: the ranks are on the CPU device");
    const auto graph = chooseGraph(options, process);
    if (!graph) return tl::unexpected(graph.error());
    auto model = loadModelConfig(options.model);
    if (!model) return tl::unexpected(model.error());
    const std::int64_t decoded = std::int64_t{options.warmup} + options.steps;
    auto batches = makeBatches(options, decoded);
    if (!batches) return tl::unexpected(batches.error());
    std::int64_t longest = 0;
    for (const Batch& batch : *batches)
        longest = std::max(longest, batch.context);

    const auto geometry = decodedGeometry(*model, options, longest);
    if (!geometry) return tl::unexpected(geometry.error());
    const auto grid = chooseGrid(*geometry, process.size(), options.grid);
    if (!grid) return tl::unexpected(grid.error());

    auto kv_scales = kvScales(options, *model, *geometry);
    if (!kv_scales) return tl::unexpected(kv_scales.error());

    const NumberFormat in_16_bits =
        hasScales(options.kv_format) ? NumberFormat::bf16 : options.kv_format;
    CacheConfig config{
        .geometry = *geometry,
        .grid = *grid,
        .kv_format = options.kv_format,
        .input_format = in_16_bits,
        .output_format = process.device() == DeviceKind::cuda ? in_16_bits : NumberFormat::fp32,
        .kv_scales = std::move(*kv_scales),
        .rotary = model->rotary,
        .softmax_scale = model->softmax_scale,
        .logit_softcap = model->logit_softcap,
        .attention_sinks = model->attention_sinks,
        .layout = options.layout,
        .block_size = options.block_size,
        .device_blocks = 1,
        .host_blocks = 0,
        .max_sequences = options.batch,
        .max_sequence_length = longest,
        .max_step_tokens = std::max<std::int64_t>(DecodeRun::fill_tokens, options.batch)};
    if (const auto valid = validate(config); !valid) return tl::unexpected(valid.error());

    DecodeSetup setup{.model = std::move(*model),
                      .config = std::move(config),
                      .batches = std::move(*batches),
                      .decoded = decoded,
                      .graph = *graph};
    const auto blocks = neededBlocks(setup);
    if (!blocks) return tl::unexpected(blocks.error());
    setup.config.device_blocks = *blocks;
    return setup;
}

}  // namespace kvgrid::launch
