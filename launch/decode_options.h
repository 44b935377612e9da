// What verify and bench have in common before they run: their flags, and what follows from them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <kvgrid/config.h>
#include <kvgrid/error.h>
#include <kvgrid/process.h>
#include <kvgrid/types.h>

#include "launch/model_config.h"
#include "launch/options.h"

namespace kvgrid::launch {

struct DecodeOptions {
    std::string model = "llama-3.1-8b";
    int layers = 0;    // the first of the model; 0: all
    int share_of = 1;  // the shard of one rank of so many
    std::vector<std::int64_t> contexts{4096};
    std::string lengths_from;  // a trace; empty: every sequence is as long as the context
    int batch = 4;
    int steps = 8;
    int warmup = 2;
    std::uint64_t seed = 0;

    std::optional<DeviceKind> device;
    std::optional<TransportKind> transport;
    bool share_gpu = false;
    std::optional<bool> graph;  // none: where device and transport can
    Grid grid;
    NumberFormat kv_format = NumberFormat::bf16;
    std::string kv_scales;  // of a checkpoint; empty: every row has a scale of its own
    int block_size = 64;
    PoolLayout layout = PoolLayout::block_major;
    std::optional<std::int64_t> device_blocks;
    std::optional<std::int64_t> host_blocks;
    int threads = 0;  // of a rank; 0: what its cores give
    int timeout_s = 60;

    std::string json;
    std::string csv;
    bool progress = false;
};

// Declares the flags that verify and bench share. The pools' sizes mean different things to them.
void declareDecodeFlags(CommandLine& line, DecodeOptions& options, const std::string& device_blocks,
                        const std::string& host_blocks);

[[nodiscard]] ProcessOptions processOptions(const DecodeOptions& options);

// Whether the host only enqueues a step's append, attend and join, and does not wait for them: not
// on the CPU device, nor with joins over MPI. Such steps can be captured into a graph.
[[nodiscard]] bool isAsynchronous(const Process& process);

// The sequences of one row of a report.
struct Batch {
    std::int64_t context = 0;           // tokens of the longest at the last step
    std::vector<std::int64_t> lengths;  // tokens of each sequence at the last step
};

// The run that the flags describe. The last timed step attends over `lengths` tokens, its own
// included: warmup + steps of them are decoded one by one, the ones before are filled in.
struct DecodeSetup {
    ModelConfig model;
    CacheConfig config;  // device_blocks: what the largest batch needs
    std::vector<Batch> batches;
    std::int64_t decoded = 0;  // tokens of a sequence: warmup + steps
    bool graph = false;        // steps are captured and launched as CUDA graphs

    [[nodiscard]] int queryHeads() const noexcept { return config.geometry.query_heads; }
    [[nodiscard]] int kvHeads() const noexcept { return config.geometry.groups.front().kv_heads; }
    [[nodiscard]] int headDim() const noexcept { return config.geometry.groups.front().head_dim; }
    // Device blocks that a sequence of so many tokens takes in the layer group that needs most.
    [[nodiscard]] std::int64_t blocksOf(std::int64_t tokens) const noexcept;
};

// The same on every rank. invalid_argument: what of the model or of the flags the run cannot have,
// by key or flag; does_not_fit: more blocks than a pool can number; unavailable: --graph on where
// device or transport has none. q, k and v are in the format of K and V, or bf16 where that has
// scales; outputs likewise on a GPU, whose products have 16-bit operands, and fp32 on the CPU
// device.
[[nodiscard]] Result<DecodeSetup> prepareDecode(const DecodeOptions& options,
                                                const Process& process);

}  // namespace kvgrid::launch
