// Sequences in a paged pool whose every number follows from (seed, sequence, position, head,
// element), so that the same tokens can be laid out in many ways. What no token owns is poison: NaN
// in the pool, ids out of range in the tables, NaN in outputs and workspace.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "kernels/attention_state.h"
#include "kernels/number_formats.h"
#include "launch/oracle.h"
#include "tests/kernels/devices.h"

namespace kvgrid::test {

// GoogleTest's Test::Run hides kvgrid::Run in test bodies.
using Runs = std::vector<kvgrid::Run>;

enum class Kind : std::uint64_t { q, k, v };

// In [-1, 1), a multiple of 2^-23.
inline float hashed(std::uint64_t seed, Kind kind, std::uint64_t sequence, std::uint64_t position,
                    std::uint64_t head, std::uint64_t element) {
    std::uint64_t x = seed;
    for (const std::uint64_t part :
         {static_cast<std::uint64_t>(kind), sequence, position, head, element}) {
        x = (x ^ part) * 0x9E3779B97F4A7C15U;
        x ^= x >> 29;
        x *= 0xBF58476D1CE4E5B9U;
        x ^= x >> 32;
    }
    return static_cast<float>(static_cast<std::int64_t>(x >> 40) - (1 << 23)) * 0x1p-23F;
}

inline std::uint16_t toBits(NumberFormat format, float value) {
    return format == NumberFormat::fp16 ? fp16FromFloat(value) : bf16FromFloat(value);
}
inline float fromBits(NumberFormat format, std::uint16_t bits) {
    return format == NumberFormat::fp16 ? fp16ToFloat(bits) : bf16ToFloat(bits);
}

// K or V of one token and KV head as the pool holds it.
struct StoredRow {
    std::vector<std::uint16_t> bits;  // of each element; of formats with scales the low 8 count
    std::uint16_t scale = 0;          // bits of fp16, where the format has scales
    std::vector<float> worth;         // what the elements stand for
};

template <NumberFormat format>
StoredRow scaledRow(const std::vector<float>& values) {
    std::uint32_t amax_bits = 0;
    for (const float value : values)
        amax_bits = std::max(amax_bits, magnitudeBits(value));
    StoredRow row;
    row.scale = scaleFor(amax_bits, Stored<format>::largest);
    const float scale = fp16ToFloat(row.scale);
    for (const float value : values) {
        const auto bits = quantised<format>(value, scale);
        row.bits.push_back(static_cast<std::uint8_t>(bits));
        row.worth.push_back(Stored<format>::toFloat(bits) * scale);
    }
    return row;
}

inline StoredRow storedRow(NumberFormat format, const std::vector<float>& values) {
    if (format == NumberFormat::fp8_e4m3) return scaledRow<NumberFormat::fp8_e4m3>(values);
    if (format == NumberFormat::int8) return scaledRow<NumberFormat::int8>(values);
    StoredRow row;
    for (const float value : values) {
        row.bits.push_back(toBits(format, value));
        row.worth.push_back(fromBits(format, row.bits.back()));
    }
    return row;
}

struct Model {
    NumberFormat format = NumberFormat::bf16;
    int query_heads = 4;
    int kv_heads = 2;
    int head_dim = 64;
    float scale = 0.0F;    // 0: 1 / sqrt(head_dim)
    float softcap = 0.0F;  // 0: none
    std::uint64_t seed = 1;
    // Numbers other than `hashed`, before they are rounded to the format.
    std::function<float(Kind, int sequence, std::int64_t position, int head, int element)> number =
        {};

    [[nodiscard]] int group() const { return query_heads / kv_heads; }
    [[nodiscard]] float softmaxScale() const {
        return scale != 0.0F ? scale : 1.0F / std::sqrt(static_cast<float>(head_dim));
    }
    [[nodiscard]] float value(Kind kind, int sequence, std::int64_t position, int head,
                              int element) const {
        if (number) return number(kind, sequence, position, head, element);
        return hashed(seed, kind, static_cast<std::uint64_t>(sequence),
                      static_cast<std::uint64_t>(position), static_cast<std::uint64_t>(head),
                      static_cast<std::uint64_t>(element));
    }
    [[nodiscard]] StoredRow row(Kind kind, int sequence, std::int64_t position, int head) const {
        std::vector<float> values;
        for (int element = 0; element < head_dim; ++element)
            values.push_back(value(kind, sequence, position, head, element));
        return storedRow(format, values);
    }
    // One element of a 16-bit format.
    [[nodiscard]] std::uint16_t stored(Kind kind, int sequence, std::int64_t position, int head,
                                       int element) const {
        return toBits(format, value(kind, sequence, position, head, element));
    }
};

// Scores rise or fall over a stripe by 63, 16 or 2, as the query head says: by a third, an eleventh
// or a ninetieth of a power of two with each token. Besides, they differ little.
inline Model modelOfRisingScores(NumberFormat format, int query_heads, int head_dim) {
    Model model{.format = format,
                .query_heads = query_heads,
                .kv_heads = 1,
                .head_dim = head_dim,
                .scale = 1.0F};
    model.number = [](Kind kind, int id, std::int64_t position, int head, int element) {
        constexpr float rates[] = {1.0F, -1.0F, 0.25F, -0.25F, 0.03125F};
        if (kind == Kind::q && element == 0) return rates[head % 5];
        if (kind == Kind::k && element == 0) return static_cast<float>(position % 256 / 4);
        const float value =
            hashed(9, kind, static_cast<std::uint64_t>(id), static_cast<std::uint64_t>(position),
                   static_cast<std::uint64_t>(head), static_cast<std::uint64_t>(element));
        return kind == Kind::v ? value : 0.125F * value;
    };
    return model;
}

enum class Layout { block_major, layer_major, contiguous };

struct Placement {
    int block_size = 64;
    Layout layout = Layout::block_major;
    int layers = 2;
    int layer = 1;
    unsigned permutation = 1;  // of the block ids; 0: in order
    int spare_blocks = 3;      // that no sequence owns
    int spare_columns = 2;     // of the tables, with ids out of range
};

struct Sequence {
    int id = 0;  // what its numbers follow from
    std::int64_t length = 0;
    std::int64_t first = 0;  // a block's first position: blocks before it are absent
    std::vector<std::int64_t> absent_blocks = {};  // these too: their ids are out of range
};

// An id out of range, another one each time.
inline std::int32_t wildId(std::int64_t i, std::int64_t max_num_blocks) {
    const std::int32_t wild[] = {
        static_cast<std::int32_t>(max_num_blocks), -1, std::numeric_limits<std::int32_t>::max(),
        std::numeric_limits<std::int32_t>::min(), static_cast<std::int32_t>(max_num_blocks + 1)};
    return wild[i % 5];
}

// The byte strides of a layout, written here from its definition.
inline PoolView strides(const Model& model, const Placement& placement, std::int64_t block_size,
                        std::int64_t blocks) {
    const bool low_bit = hasScales(model.format);
    const std::int64_t row = std::int64_t{low_bit ? 1 : 2} * model.head_dim;
    const std::int64_t scales = low_bit ? (2 * block_size + 15) / 16 * 16 : 0;
    PoolView pool;
    pool.max_num_blocks = blocks;
    pool.block_size = block_size;
    pool.format = model.format;
    if (placement.layout == Layout::layer_major) {
        // [K, V][layer][block]: [token][KV head][head_dim], [KV head][token] scales
        pool.head_stride = row;
        pool.token_stride = row * model.kv_heads;
        pool.scale_offset = pool.token_stride * block_size;
        pool.scale_head_stride = scales;
        pool.block_stride = pool.scale_offset + scales * model.kv_heads;
        pool.layer_stride = pool.block_stride * blocks;
        pool.value_offset = pool.layer_stride * placement.layers;
    } else {
        // [block][layer][KV head][K, V]: [token][head_dim], [token] scales
        pool.token_stride = row;
        pool.scale_offset = row * block_size;
        pool.value_offset = pool.scale_offset + scales;
        pool.head_stride = 2 * pool.value_offset;
        pool.scale_head_stride = pool.head_stride;
        pool.layer_stride = pool.head_stride * model.kv_heads;
        pool.block_stride = pool.layer_stride * placement.layers;
    }
    return pool;
}

class PagedWorld {
public:
    PagedWorld(Device& device, const Model& model, const Placement& placement,
               std::vector<Sequence> sequences)
        : device_(&device),
          model_(model),
          sequences_(std::move(sequences)) {
        layOut(placement);
        pool_.data = nullptr;
        image_.assign(static_cast<std::size_t>(bytes_), std::byte{0xFF});
        for (std::size_t slot = 0; slot < sequences_.size(); ++slot)
            for (std::int64_t position = sequences_[slot].first; position < sequences_[slot].length;
                 ++position)
                if (present(slot, position)) writeToken(static_cast<int>(slot), position);
        pool_memory_.push_back(DeviceArray<std::byte>::of(device, image_));
        pool_.data = pool_memory_.back().data();
        table_memory_.push_back(DeviceArray<std::int32_t>::of(device, table_));
    }

    [[nodiscard]] Device& device() const { return *device_; }
    [[nodiscard]] const Model& model() const { return model_; }
    [[nodiscard]] const PoolView& pool() const { return pool_; }
    [[nodiscard]] std::int64_t layer() const { return layer_; }
    [[nodiscard]] BlockTableView tables() const { return {table_memory_[0].data(), columns_}; }
    [[nodiscard]] const std::vector<Sequence>& sequences() const { return sequences_; }
    [[nodiscard]] const std::vector<std::byte>& image() const { return image_; }
    [[nodiscard]] std::vector<std::byte> downloadPool() const { return pool_memory_[0].download(); }

    [[nodiscard]] bool present(std::size_t slot, std::int64_t position) const {
        const auto& absent = sequences_[slot].absent_blocks;
        return position >= sequences_[slot].first &&
               std::find(absent.begin(), absent.end(), position / pool_.block_size) == absent.end();
    }

    // Puts a token's K or V into an image of the pool, as the device keeps it.
    void put(const StoredRow& row, int slot, std::int64_t position, int head, Kind kind,
             std::vector<std::byte>& image) const {
        const std::int64_t block =
            table_[static_cast<std::size_t>(slot * columns_ + position / pool_.block_size)];
        const std::int64_t within = position % pool_.block_size;
        const std::int64_t start = layer_ * pool_.layer_stride + block * pool_.block_stride +
                                   (kind == Kind::v ? pool_.value_offset : 0);
        const std::size_t width = bytesPerElement(model_.format);
        std::byte* const to =
            image.data() + start + head * pool_.head_stride + within * pool_.token_stride;
        for (int i = 0; i < model_.head_dim; ++i)
            std::memcpy(to + width * static_cast<std::size_t>(storedElement(
                                         *device_, position, i, model_.head_dim, model_.format)),
                        &row.bits[static_cast<std::size_t>(i)], width);
        if (hasScales(model_.format))
            std::memcpy(image.data() + start + pool_.scale_offset + head * pool_.scale_head_stride +
                            2 * within,
                        &row.scale, 2);
    }

    // Leaves only one logical block of a sequence in its table; the others get ids out of range.
    void hideAllBut(int slot, std::int64_t logical) {
        std::vector<std::int32_t> table = table_;
        for (std::int64_t column = 0; column < columns_; ++column)
            if (column != logical)
                table[static_cast<std::size_t>(slot * columns_ + column)] =
                    wildId(column, pool_.max_num_blocks);
        table_memory_[0].upload(table);
    }

private:
    void layOut(const Placement& placement) {
        std::int64_t longest = 1;
        for (const Sequence& sequence : sequences_)
            longest = std::max(longest, sequence.length);
        std::int64_t block_size = placement.block_size;
        if (placement.layout == Layout::contiguous)
            block_size = (longest + stripe_tokens - 1) / stripe_tokens * stripe_tokens;
        std::int64_t used = 0;
        for (const Sequence& sequence : sequences_)
            used += (sequence.length - sequence.first + block_size - 1) / block_size;
        const std::int64_t blocks = used + placement.spare_blocks;
        pool_ = strides(model_, placement, block_size, blocks);
        layer_ = placement.layer;
        bytes_ = placement.layout == Layout::layer_major ? 2 * pool_.value_offset
                                                         : pool_.block_stride * blocks;
        columns_ = (longest + block_size - 1) / block_size + placement.spare_columns;

        std::vector<std::int32_t> ids(static_cast<std::size_t>(blocks));
        std::iota(ids.begin(), ids.end(), 0);
        if (placement.permutation != 0)
            std::shuffle(ids.begin(), ids.end(), std::mt19937(placement.permutation));
        auto next = ids.begin();
        for (const Sequence& sequence : sequences_) {
            const std::int64_t begin = sequence.first / block_size;
            const std::int64_t end = (sequence.length + block_size - 1) / block_size;
            for (std::int64_t column = 0; column < columns_; ++column) {
                const auto& absent = sequence.absent_blocks;
                const bool own = column >= begin && column < end;
                const bool wild =
                    !own || std::find(absent.begin(), absent.end(), column) != absent.end();
                table_.push_back(wild ? wildId(column, blocks) : *next);
                if (own) ++next;
            }
        }
    }

    void writeToken(int slot, std::int64_t position) {
        const int id = sequences_[static_cast<std::size_t>(slot)].id;
        for (const Kind kind : {Kind::k, Kind::v})
            for (int head = 0; head < model_.kv_heads; ++head)
                put(model_.row(kind, id, position, head), slot, position, head, kind, image_);
    }

    Device* device_;
    Model model_;
    std::vector<Sequence> sequences_;
    PoolView pool_;
    std::int64_t layer_ = 0;
    std::int64_t bytes_ = 0;
    std::int64_t columns_ = 0;
    std::vector<std::int32_t> table_;
    std::vector<std::byte> image_;
    // Vectors because a DeviceArray has no empty state.
    std::vector<DeviceArray<std::byte>> pool_memory_;
    std::vector<DeviceArray<std::int32_t>> table_memory_;
};

// States of rows, in host memory.
struct States {
    std::vector<float> out;  // [rows, query_heads, head_dim]
    std::vector<float> lse;  // [rows, query_heads]
};

inline bool sameBits(const States& a, const States& b) {
    return sameBits(a.out, b.out) && sameBits(a.lse, b.lse);
}

struct AttendOptions {
    std::int64_t window = 0;
    int context_rank = 0;
    int context_ranks = 1;
    std::int64_t rows = 0;      // of q and out; 0: as many as the runs have
    std::int64_t run_rows = 0;  // that attend is told of; 0: those of the longest run
};

// Runs attend for `runs`. q of a row is the model's, for the run's sequence and position.
inline States attend(const PagedWorld& world, const Runs& runs, const AttendOptions& options = {}) {
    Device& device = world.device();
    const Model& model = world.model();
    std::int64_t rows = options.rows;
    std::int64_t last = 0;
    std::int64_t run_rows = 1;
    for (const Run& run : runs) {
        rows = std::max(rows, run.first_row + run.rows);
        run_rows = std::max<std::int64_t>(run_rows, run.rows);
        last = std::max(last, run.first_position + run.rows - 1);
    }
    const auto states = static_cast<std::size_t>(rows * model.query_heads);
    const auto numbers = states * static_cast<std::size_t>(model.head_dim);
    std::vector<float> q(numbers, std::numeric_limits<float>::quiet_NaN());
    for (const Run& run : runs)
        for (std::int64_t row = 0; row < run.rows; ++row)
            for (int head = 0; head < model.query_heads; ++head)
                for (int element = 0; element < model.head_dim; ++element)
                    q[static_cast<std::size_t>(((run.first_row + row) * model.query_heads + head) *
                                                   model.head_dim +
                                               element)] =
                        model.value(Kind::q,
                                    world.sequences()[static_cast<std::size_t>(run.slot)].id,
                                    run.first_position + row, head, element);
    const auto device_q = DeviceArray<float>::of(device, q);
    const auto device_runs = DeviceArray<Run>::of(device, runs);
    const auto out = DeviceArray<float>::poisoned(device, numbers);
    const auto lse = DeviceArray<float>::poisoned(device, states);
    const auto workspace = DeviceArray<std::byte>::poisoned(
        device, device.operations().attendWorkspaceBytes(rows, model.query_heads, model.head_dim));
    const AttendParams params{.query_heads = model.query_heads,
                              .kv_heads = model.kv_heads,
                              .head_dim = model.head_dim,
                              .scale = model.softmaxScale(),
                              .softcap = model.softcap,
                              .window = options.window,
                              .q = device_q.data(),
                              .runs = device_runs.data(),
                              .run_count = static_cast<std::int64_t>(runs.size()),
                              .max_position = last,
                              .run_rows = options.run_rows > 0 ? options.run_rows : run_rows,
                              .context_rank = options.context_rank,
                              .context_ranks = options.context_ranks,
                              .tables = world.tables(),
                              .pool = world.pool(),
                              .layer = world.layer(),
                              .out = out.data(),
                              .lse = lse.data(),
                              .workspace = workspace.data(),
                              .workspace_bytes = workspace.size()};
    planAndAttend(device, params, rows);
    out.expectGuardIntact();
    lse.expectGuardIntact();
    workspace.expectGuardIntact();
    return {out.download(), lse.download()};
}

// The rows of one run, cut out of `states`.
inline States rowsOf(const States& states, const Model& model, std::int64_t first,
                     std::int64_t count) {
    const auto width = static_cast<std::ptrdiff_t>(model.query_heads) * model.head_dim;
    return {{states.out.begin() + first * width, states.out.begin() + (first + count) * width},
            {states.lse.begin() + first * model.query_heads,
             states.lse.begin() + (first + count) * model.query_heads}};
}

// The oracle's state of one row and query head over the positions that `sees` accepts.
inline oracle::State oracleState(const PagedWorld& world, int slot, std::int64_t position,
                                 int query_head,
                                 const std::function<bool(std::int64_t)>& sees = {}) {
    const Model& model = world.model();
    const int id = world.sequences()[static_cast<std::size_t>(slot)].id;
    const int kv_head = query_head / model.group();
    std::vector<double> q;
    std::vector<double> k;
    std::vector<double> v;
    for (int element = 0; element < model.head_dim; ++element)
        q.push_back(model.value(Kind::q, id, position, query_head, element));
    for (std::int64_t token = 0; token <= position; ++token) {
        if (!world.present(static_cast<std::size_t>(slot), token) || (sees && !sees(token)))
            continue;
        const StoredRow key = model.row(Kind::k, id, token, kv_head);
        const StoredRow value = model.row(Kind::v, id, token, kv_head);
        k.insert(k.end(), key.worth.begin(), key.worth.end());
        v.insert(v.end(), value.worth.begin(), value.worth.end());
    }
    return oracle::attention(q, k, v, static_cast<double>(model.softmaxScale()),
                             {.softcap = static_cast<double>(model.softcap)});
}

// The states of `ranks` context ranks, rank by rank, merged by the device.
inline States mergeParts(Device& device, const Model& model, int ranks,
                         const std::vector<float>& out_parts, const std::vector<float>& lse_parts) {
    const std::size_t states = lse_parts.size() / static_cast<std::size_t>(ranks);
    const auto device_out = DeviceArray<float>::of(device, out_parts);
    const auto device_lse = DeviceArray<float>::of(device, lse_parts);
    const auto out =
        DeviceArray<float>::poisoned(device, states * static_cast<std::size_t>(model.head_dim));
    const auto lse = DeviceArray<float>::poisoned(device, states);
    device.operations().merge({.rows = static_cast<std::int64_t>(states),
                               .parts = ranks,
                               .head_dim = model.head_dim,
                               .out_parts = device_out.data(),
                               .lse_parts = device_lse.data(),
                               .out = out.data(),
                               .lse = lse.data()},
                              device.defaultStream());
    return {out.download(), lse.download()};
}

// Compares some heads of a row with the oracle.
inline void expectOracle(const PagedWorld& world, const States& states, std::int64_t row, int slot,
                         std::int64_t position, std::int64_t window = 0) {
    const Model& model = world.model();
    const double bound = errorBound(world.device(), model.format);
    const auto sees = [&](std::int64_t token) { return window == 0 || position - token < window; };
    for (const int head : {0, model.query_heads / 2, model.query_heads - 1}) {
        const oracle::State expected = oracleState(world, slot, position, head, sees);
        const auto state = static_cast<std::size_t>(row * model.query_heads + head);
        const std::span<const float> out(
            states.out.data() + state * static_cast<std::size_t>(model.head_dim),
            static_cast<std::size_t>(model.head_dim));
        EXPECT_LE(oracle::relativeError(out, expected.out), bound)
            << "slot " << slot << " position " << position << " head " << head;
        EXPECT_NEAR(states.lse[state], expected.lse, bound * std::max(1.0, std::fabs(expected.lse)))
            << "slot " << slot << " position " << position << " head " << head;
    }
}

}  // namespace kvgrid::test
