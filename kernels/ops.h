// The operations over paged KV: one parameter struct and one signature each, for every device.
//
// Conventions. Shapes are row-major, the last index contiguous, unless strides are given. A row is
// one token of the step. Heads are this rank's. All offsets are 64-bit. Pointers are device memory
// of the stream's device. Operations enqueue on the stream, allocate nothing and synchronise
// nothing. They trust their parameters (the floors above validate) except for block ids, which are
// data: an id outside [0, max_num_blocks) is skipped by append, read as zeros by gather, absent to
// attend.
//
// On CUDA every operation may be captured into a graph. A replay repeats the parameters as they
// were captured, host numbers and addresses alike; what lies at the addresses of device memory is
// read anew. append takes from the runs on the device, and attend from the plan and the runs, how
// many rows there are and where.
// So between replays these may change: the runs, where rows, run_count and max_position of the
// capture are upper bounds and a run of 0 rows is none; the block tables; q, k, v, cosines, sines,
// fixed scales and sinks. The pairs of copyBlocks are parameters and do not change.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvgrid/types.h>

#include "kernels/device.h"

namespace kvgrid {

// Where K and V of a token lie. Byte strides, so that every layout and format is the same code:
//   block start = data + layer * layer_stride + block * block_stride
//   key row     = block start + head * head_stride + within * token_stride
//   value row   = key row + value_offset
// A row is head_dim contiguous elements of `format`; on CUDA its 16-byte chunks are permuted as
// storedChunk (kernels/paging.h) says. Formats with scales (number_formats.h) have one fp16 number
// beside each row, those of a block and head side by side:
//   key scale   = block start + scale_offset + head * scale_head_stride + within * 2
//   value scale = key scale + value_offset
// Rows begin at multiples of 16 bytes, and so do the scales of a block and head, which are padded
// to such a multiple. `layer` counts within the layer group.
struct PoolView {
    std::byte* data = nullptr;
    std::int64_t max_num_blocks = 0;
    std::int64_t layer_stride = 0;
    std::int64_t block_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t value_offset = 0;
    std::int64_t scale_offset = 0;       // unused by formats without scales
    std::int64_t scale_head_stride = 0;  // likewise
    std::int64_t block_size = 0;         // tokens
    NumberFormat format = NumberFormat::bf16;
};

// Block tables of all sequence slots: entries[slot * stride + logical block] = physical block id.
// A logical block covers positions [index * block_size, (index + 1) * block_size).
struct BlockTableView {
    const std::int32_t* entries = nullptr;
    std::int64_t stride = 0;  // entries a slot
};

// One sequence of the step: rows [first_row, first_row + rows) are its positions first_position, +
// 1, ...
struct Run {
    std::int32_t slot = 0;  // row of the block table
    std::int32_t rows = 0;  // 0: nothing to do
    std::int64_t first_row = 0;
    std::int64_t first_position = 0;
};

// Rotates q and k and writes k and v into the pool.
// The rotation of elements i and i + rotary_dim / 2, i < rotary_dim / 2, in fp32 and without fused
// multiply-adds, so that a stored value is the same on every device:
//   x'[i] = x[i] * cos - x[i + half] * sin,   x'[i + half] = x[i + half] * cos + x[i] * sin
// then rounding to nearest even into the pool's format, or quantising by the rule of
// number_formats.h. Rows of no run are left alone.
struct AppendParams {
    std::int64_t rows = 0;
    int query_heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    NumberFormat input_format = NumberFormat::bf16;  // fp32, fp16 or bf16
    const void* q = nullptr;                         // [rows, query_heads, head_dim], or null
    const void* k = nullptr;                         // [rows, kv_heads, head_dim]
    const void* v = nullptr;                         // [rows, kv_heads, head_dim]
    float* q_rotated = nullptr;      // [rows, query_heads, head_dim]; unused when q is null
    int rotary_dim = 0;              // 0: none
    const float* cosines = nullptr;  // [rows, rotary_dim / 2]
    const float* sines = nullptr;    // [rows, rotary_dim / 2]
    // Of pools with scales: fp16 bits of the layer's fixed scales (number_formats.h), [K, V]
    // [kv_heads], normal numbers above 0; null: every row has its own.
    const std::uint16_t* fixed_scales = nullptr;
    const Run* runs = nullptr;  // [run_count]
    std::int64_t run_count = 0;
    BlockTableView tables;
    PoolView pool;
    std::int64_t layer = 0;
};

// K and V of one sequence, zeros where the block id is out of range: as stored where `format` is
// the pool's; numbers that have scales multiplied with them, rounded to nearest even into `format`.
struct GatherParams {
    std::int32_t slot = 0;
    std::int64_t first_position = 0;
    std::int64_t tokens = 0;
    int kv_heads = 0;
    int head_dim = 0;
    BlockTableView tables;
    PoolView pool;
    std::int64_t layer = 0;
    NumberFormat format = NumberFormat::bf16;  // the pool's; of one with scales fp32, fp16 or bf16
    void* k = nullptr;                         // [tokens, kv_heads, head_dim]
    void* v = nullptr;
};

// The attention states of the step's rows over the lanes that this rank owns: row at position p
// sees the positions <= p of its sequence that lie in those lanes, with a window only those beyond
// p - window. Query head h reads KV head h / (query_heads / kv_heads). A score is scale * q.k; with
// a softcap it becomes softcap * tanh(score / softcap), in (-softcap, softcap), before the softmax
// (Gemma 2, arXiv 2408.00118); NaN stays NaN. Rows that see nothing get the empty state (0, -inf).
// Lane l of the sequence in slot s is owned when (l + s) mod context_ranks == context_rank;
// context_ranks is a power of two up to 64, so that the owned lanes are one subtree of the fold.
//
// What a row does not see changes no bit of its state, whatever the table says of it and whatever
// lies there: an id behind the window may be out of range, or of a block that another sequence
// has by now. A leaf that a window cuts is the state of the tokens in it that the row sees. One
// exception: on CUDA, V of the step's own later tokens that is not finite may make NaN of rows of
// the same run before them, as their weight is 0 there, and not left out.
struct AttendParams {
    int query_heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    float scale = 1.0F;         // of q.k
    float softcap = 0.0F;       // of scores; 0: none
    std::int64_t window = 0;    // tokens that a row sees, its own included; 0: all
    const float* q = nullptr;   // [rows, query_heads, head_dim]
    const Run* runs = nullptr;  // [run_count]; rows of runs do not overlap
    std::int64_t run_count = 0;
    // The largest position of any row, or more: bounds the work, not the result.
    std::int64_t max_position = 0;
    // Rows that every run has at least, as far as the host knows: how the work is cut, not the
    // result. Tiles for long runs would serve a run of one row badly.
    std::int64_t run_rows = 1;
    int context_rank = 0;
    int context_ranks = 1;
    BlockTableView tables;
    PoolView pool;
    std::int64_t layer = 0;
    float* out = nullptr;       // [rows, query_heads, head_dim]
    float* lse = nullptr;       // [rows, query_heads]
    void* workspace = nullptr;  // attendWorkspaceBytes
    std::size_t workspace_bytes = 0;
    void* plan = nullptr;  // what planAttend made of the runs; attendPlanBytes
    std::size_t plan_bytes = 0;
};

// Folds `parts` states of each row as lanes fold: part with part + parts / 2, then + parts / 4, ...
// + 1. parts is a power of two; absent parts are empty states.
struct MergeParams {
    std::int64_t rows = 0;  // independent states
    int parts = 0;
    int head_dim = 0;
    const float* out_parts =
        nullptr;  // [parts, rows, head_dim]; what lies beside an lse of -inf does not count
    const float* lse_parts = nullptr;  // [parts, rows]
    float* out = nullptr;              // [rows, head_dim]; may be the first part
    float* lse = nullptr;              // [rows]
};

// What a block is made of, as byte runs: `outer` x `inner` runs of run_bytes. In order they make
// the block's image, which is the same for all layouts of one geometry only where their runs are
// alike.
struct BlockRuns {
    std::byte* data = nullptr;
    std::int64_t block_stride = 0;
    std::int64_t outer = 1;
    std::int64_t outer_stride = 0;
    std::int64_t inner = 1;
    std::int64_t inner_stride = 0;
    std::int64_t run_bytes = 0;
};

struct BlockPair {
    std::int32_t source = 0;
    std::int32_t destination = 0;
};

// Copies whole blocks between tiers. Both sides hold outer * inner * run_bytes bytes a block; the
// destination may be one run of all of them. Pairs are independent: no block is in two of them.
// `pairs` is host memory and may be reused when the call returns.
struct CopyBlocksParams {
    BlockRuns source;
    BlockRuns destination;
    const BlockPair* pairs = nullptr;
    std::int64_t count = 0;
};

// Writes states or gathered parts as the caller wants them:
//   destination[row, part * heads + head, :] = source[part, row, head, :], converted.
// With sinks the source is the `out` of states, and the state (0, the head's sink) is merged into
// each, as the right operand, before it is converted.
struct OutputParams {
    std::int64_t rows = 0;
    std::int64_t parts = 1;
    std::int64_t heads = 0;  // of a part
    int head_dim = 0;
    NumberFormat source_format = NumberFormat::fp32;       // fp32, or destination_format
    NumberFormat destination_format = NumberFormat::fp32;  // fp32, fp16 or bf16
    const void* source = nullptr;
    const float* lse = nullptr;    // [parts, rows, heads], of the source; unused without sinks
    const float* sinks = nullptr;  // [parts * heads] logits; null: none. The source is fp32
    void* destination = nullptr;
};

// Reads runs of run_bytes at data + order[i] * run_bytes as fast as the device can: the ceiling for
// attention. `sink` gets a value that depends on all of it.
struct ReadRunsParams {
    const std::byte* data = nullptr;
    const std::int32_t* order = nullptr;  // [count]
    std::int64_t count = 0;
    std::int64_t run_bytes = 0;  // a multiple of 256
    std::uint64_t* sink = nullptr;
};

struct Operations {
    void (*append)(const AppendParams&, StreamView);
    void (*gather)(const GatherParams&, StreamView);
    // How attend will cut the work, into the plan: once for all layers, whenever the runs or what
    // they say has changed. Parameters as in the attends that follow (q, out, lse, what is in the
    // tables, and layer do not matter), but run_count, which may be less. The plan is also one for
    // attends with run_rows = 1, as captured launches have it; other run_rows than these two are an
    // error. So is a position behind a sequence's table.
    void (*planAttend)(const AttendParams&, StreamView);
    // May begin while the launch before it still runs: the plan, the runs, the tables, and K and V
    // of positions before a run's first, must be there when that one begins. planAttend, or an
    // append, may come directly before.
    void (*attend)(const AttendParams&, StreamView);
    void (*merge)(const MergeParams&, StreamView);
    void (*copyBlocks)(const CopyBlocksParams&, StreamView);
    void (*output)(const OutputParams&, StreamView);
    void (*readRuns)(const ReadRunsParams&, StreamView);
    // Workspace with which attend can do any step of at most `rows` rows. More is faster, up to a
    // device's own bound; it never grows with the context.
    std::size_t (*attendWorkspaceBytes)(std::int64_t rows, int query_heads, int head_dim);
    // Of the plan of any step of at most `rows` rows in `runs` runs.
    std::size_t (*attendPlanBytes)(std::int64_t rows, std::int64_t runs, int query_heads);
};

}  // namespace kvgrid
