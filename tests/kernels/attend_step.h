// One layer's attention in a paged pool, as attend_benchmark times it: K and V, tables, queries,
// and the check of what came out.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "kernels/device.h"
#include "kernels/number_formats.h"
#include "kernels/ops.h"
#include "kernels/paging.h"
#include "launch/oracle.h"
#include "launch/parallel.h"
#include "tests/kernels/attend_shapes.h"

namespace kvgrid {

inline constexpr std::int64_t block_size = 64;
// How far an output may be from the oracle: the CPU computes in fp32, CUDA multiplies in the format
// of K and V, or in fp16 where that has one byte.
inline double errorBound(const Device& device, NumberFormat format) {
    if (device.kind() == DeviceKind::cpu) return 1e-5;
    return format == NumberFormat::bf16 ? 4e-3 : 1e-3;
}

// Layers that take turns: 40, and for small shapes more, so that no cache holds all of them.
inline constexpr std::int64_t usual_layers = 40;
inline constexpr std::int64_t most_layers = 512;
inline constexpr std::int64_t uncached_bytes = 512 << 20;
// Of K and V that the oracle sees for one shape, and the vectors that it checks at most and at
// least.
inline constexpr std::int64_t checked_tokens = 2 << 20;
inline constexpr std::size_t most_checked = 64;
inline constexpr std::size_t least_checked = 3;

template <typename T>
Buffer upload(Device& device, const std::vector<T>& values) {
    Buffer buffer = orThrow(Buffer::onDevice(device, values.size() * sizeof(T)));
    device.copy(buffer.data(), values.data(), buffer.bytes(), device.defaultStream());
    device.synchronize(device.defaultStream());
    return buffer;
}

// [0, count) in an order of its own, the same in every run.
inline std::vector<std::int32_t> permutation(std::int64_t count, unsigned seed) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    return order;
}

// Numbers that repeat through the pool with a period that is prime, so that any number is known
// from where it lies: in [-1, 1), or, of formats with scales, bytes of which any is a number and
// any two a scale (0.03 to 0.5 with e4m3, 0.002 to 0.008 with int8) or its negative.
class Pattern {
public:
    explicit Pattern(NumberFormat format) : format_(format), bits_(33'554'393) {
        std::uint64_t state = 1;
        for (std::uint16_t& bits : bits_) {
            state = state * 6364136223846793005U + 1442695040888963407U;
            const float value =
                static_cast<float>(static_cast<std::int64_t>(state >> 40) - (1 << 23)) * 0x1p-23F;
            if (hasScales(format))
                bits = static_cast<std::uint16_t>(format == NumberFormat::int8
                                                      ? 0x1818U + (state >> 40 & 0x8787U)
                                                      : 0x2828U + (state >> 40 & 0x8F8FU));
            else
                bits = format == NumberFormat::fp16 ? fp16FromFloat(value) : bf16FromFloat(value);
        }
    }
    void fill(Device& device, const Buffer& memory) const {
        const StreamView stream = device.defaultStream();
        std::size_t done = std::min(bits_.size() * 2, memory.bytes());
        device.copy(memory.data(), bits_.data(), done, stream);
        for (; done < memory.bytes(); done *= 2)
            device.copy(memory.data() + done, memory.data(), std::min(done, memory.bytes() - done),
                        stream);
        device.synchronize(stream);
    }
    [[nodiscard]] double at(std::int64_t byte) const {
        const auto number = static_cast<std::uint8_t>(bits(byte) >> byte % 2 * 8);
        switch (format_) {
        case NumberFormat::fp8_e4m3:
            return static_cast<double>(e4m3ToFloat(number));
        case NumberFormat::int8:
            return static_cast<std::int8_t>(number);
        case NumberFormat::fp16:
            return static_cast<double>(fp16ToFloat(bits(byte)));
        default:
            return static_cast<double>(bf16ToFloat(bits(byte)));
        }
    }
    // 1 where the format has none.
    [[nodiscard]] double scaleAt(std::int64_t byte) const {
        return hasScales(format_) ? static_cast<double>(fp16ToFloat(bits(byte))) : 1.0;
    }

private:
    [[nodiscard]] std::uint16_t bits(std::int64_t byte) const {
        return bits_[static_cast<std::size_t>(byte / 2) % bits_.size()];
    }

    NumberFormat format_;
    std::vector<std::uint16_t> bits_;
};

struct Checked {
    std::int64_t vectors = 0;  // compared with the oracle
    std::int64_t wrong = 0;    // of them, and numbers that are none
    double max_rel_error = 0;
};

// What is resident for one shape.
class Step {
public:
    Step(Device& device, const AttendShape& shape, const Buffer& pool, const Pattern& pattern,
         NumberFormat format)
        : device_(&device),
          shape_(&shape),
          pattern_(&pattern) {
        const std::int64_t layer_bytes = shape.blockBytes(block_size, format);
        const std::int64_t wanted =
            std::clamp(uncached_bytes / layer_bytes, usual_layers, most_layers);
        layers = std::clamp<std::int64_t>(static_cast<std::int64_t>(pool.bytes()) / layer_bytes, 1,
                                          wanted);
        const std::int64_t row =
            static_cast<std::int64_t>(bytesPerElement(format)) * shape.head_dim;
        PoolView view;
        view.data = pool.data();
        view.block_size = block_size;
        view.token_stride = row;
        view.scale_offset = row * block_size;
        view.value_offset = view.scale_offset + scaleBytes(format, block_size);
        view.head_stride = 2 * view.value_offset;
        view.scale_head_stride = view.head_stride;
        view.layer_stride = view.head_stride * shape.kv_heads;
        view.block_stride = view.layer_stride * layers;
        view.max_num_blocks = static_cast<std::int64_t>(pool.bytes()) / view.block_stride;
        view.format = format;

        const std::int64_t longest = *std::max_element(shape.lengths.begin(), shape.lengths.end());
        columns_ = (longest + block_size - 1) / block_size;
        table_.assign(shape.lengths.size() * static_cast<std::size_t>(columns_), -1);
        const std::vector<std::int32_t> ids = permutation(view.max_num_blocks, 3);
        std::vector<Run> runs;
        auto next = ids.begin();
        for (std::size_t i = 0; i < shape.lengths.size(); ++i) {
            const std::int64_t before = shape.firstSeen(shape.lengths[i]) / block_size;
            const std::int64_t count = (shape.lengths[i] + block_size - 1) / block_size - before;
            std::copy_n(next, count,
                        table_.begin() + static_cast<std::ptrdiff_t>(i) * columns_ + before);
            next += count;
            const auto slot = static_cast<std::int32_t>(i);
            runs.push_back({.slot = slot,
                            .rows = static_cast<std::int32_t>(shape.rows),
                            .first_row = slot * shape.rows,
                            .first_position = shape.lengths[i] - shape.rows});
        }
        rows_ = static_cast<std::int64_t>(runs.size()) * shape.rows;
        const auto states = static_cast<std::size_t>(rows_ * shape.query_heads);
        q_.resize(states * static_cast<std::size_t>(shape.head_dim));
        std::mt19937 random(4);
        for (float& number : q_)
            number = static_cast<float>(random()) * 0x1p-31F - 1.0F;
        buffers_.push_back(upload(device, table_));
        buffers_.push_back(upload(device, runs));
        buffers_.push_back(upload(device, q_));
        const auto run_count = static_cast<std::int64_t>(runs.size());
        for (const std::size_t bytes :
             {q_.size() * sizeof(float), states * sizeof(float),
              device.operations().attendWorkspaceBytes(rows_, shape.query_heads, shape.head_dim),
              device.operations().attendPlanBytes(rows_, run_count, shape.query_heads)})
            buffers_.push_back(orThrow(Buffer::onDevice(device, bytes)));
        params_ = {.query_heads = shape.query_heads,
                   .kv_heads = shape.kv_heads,
                   .head_dim = shape.head_dim,
                   .scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim)),
                   .window = shape.window,
                   .q = buffers_[2].as<float>(),
                   .runs = buffers_[1].as<Run>(),
                   .run_count = run_count,
                   .max_position = longest - 1,
                   .run_rows = shape.rows,
                   .tables = {buffers_[0].as<std::int32_t>(), columns_},
                   .pool = view,
                   .out = buffers_[3].as<float>(),
                   .lse = buffers_[4].as<float>(),
                   .workspace = buffers_[5].data(),
                   .workspace_bytes = buffers_[5].bytes(),
                   .plan = buffers_[6].data(),
                   .plan_bytes = buffers_[6].bytes()};
        device.operations().planAttend(params_, device.defaultStream());
    }

    // Launches take turns over the layers.
    void attend(std::int64_t launch) {
        params_.layer = launch % layers;
        device_->operations().attend(params_, device_->defaultStream());
    }

    // NaN, so that what no launch writes is seen.
    void poisonOut() {
        device_->fill(params_.out, 0xFF, q_.size() * sizeof(float), device_->defaultStream());
    }
    [[nodiscard]] std::vector<float> out() const {
        std::vector<float> out(q_.size());
        device_->copy(out.data(), params_.out, out.size() * sizeof(float),
                      device_->defaultStream());
        device_->synchronize(device_->defaultStream());
        return out;
    }

    // Compares vectors (row, query head) of the last launch with the oracle: as many as
    // checked_tokens allows, spread by chance. All others must be numbers at least.
    [[nodiscard]] Checked check(const std::vector<float>& out, double bound) const {
        std::set<std::int64_t> vectors{0, rows_ * shape_->query_heads - 1};
        std::mt19937 random(5);
        std::int64_t tokens = 0;
        for (std::size_t tries = 0; tries < most_checked; ++tries) {
            const std::int64_t vector =
                static_cast<std::int64_t>(random()) % (rows_ * shape_->query_heads);
            tokens += tokensSeen(vector / shape_->query_heads);
            if (tokens > checked_tokens && vectors.size() >= least_checked) break;
            vectors.insert(vector);
        }
        const std::vector<std::int64_t> chosen(vectors.begin(), vectors.end());
        std::vector<double> errors(chosen.size());
        launch::parallelFor(static_cast<int>(std::thread::hardware_concurrency()),
                            static_cast<std::int64_t>(chosen.size()), [&](std::int64_t i) {
                                const auto at = static_cast<std::size_t>(i);
                                errors[at] = error(out, chosen[at]);
                            });
        Checked checked{.vectors = static_cast<std::int64_t>(chosen.size())};
        checked.wrong = std::count_if(out.begin(), out.end(),
                                      [](float number) { return !std::isfinite(number); });
        for (const double error : errors) {
            checked.max_rel_error = std::max(checked.max_rel_error, error);
            if (!(error <= bound)) ++checked.wrong;
        }
        return checked;
    }

    std::int64_t layers = 1;

private:
    [[nodiscard]] std::int64_t position(std::int64_t row) const {
        return shape_->lengths[static_cast<std::size_t>(row / shape_->rows)] - shape_->rows +
               row % shape_->rows;
    }
    [[nodiscard]] std::int64_t tokensSeen(std::int64_t row) const {
        return position(row) + 1 - firstSeen(position(row), shape_->window);
    }

    [[nodiscard]] double error(const std::vector<float>& out, std::int64_t vector) const {
        const auto dim = static_cast<std::size_t>(shape_->head_dim);
        const std::int64_t row = vector / shape_->query_heads;
        const std::int64_t head = vector % shape_->query_heads;
        const std::int64_t kv_head = head / (shape_->query_heads / shape_->kv_heads);
        const auto first = static_cast<std::size_t>(vector) * dim;
        const std::vector<double> q(q_.begin() + static_cast<std::ptrdiff_t>(first),
                                    q_.begin() + static_cast<std::ptrdiff_t>(first + dim));
        const std::int64_t tokens = tokensSeen(row);
        const std::int64_t first_seen = position(row) + 1 - tokens;
        std::vector<double> k(static_cast<std::size_t>(tokens) * dim);
        std::vector<double> v(k.size());
        const PoolView& pool = params_.pool;
        for (std::int64_t i = 0; i < tokens; ++i) {
            const std::int64_t token = first_seen + i;
            const std::int64_t block = table_[static_cast<std::size_t>(
                row / shape_->rows * columns_ + token / block_size)];
            const std::int64_t key = params_.layer * pool.layer_stride + block * pool.block_stride +
                                     kv_head * pool.head_stride +
                                     token % block_size * pool.token_stride;
            const std::int64_t scale = params_.layer * pool.layer_stride +
                                       block * pool.block_stride + pool.scale_offset +
                                       kv_head * pool.scale_head_stride + token % block_size * 2;
            const double key_scale = pattern_->scaleAt(scale);
            const double value_scale = pattern_->scaleAt(scale + pool.value_offset);
            const auto width = static_cast<int>(bytesPerElement(pool.format));
            for (int element = 0; element < shape_->head_dim; ++element) {
                const std::int64_t stored =
                    std::int64_t{width} *
                    (device_->kind() == DeviceKind::cuda
                         ? storedElement(token, element, shape_->head_dim, width)
                         : element);
                const auto to = static_cast<std::size_t>(i * shape_->head_dim + element);
                k[to] = pattern_->at(key + stored) * key_scale;
                v[to] = pattern_->at(key + pool.value_offset + stored) * value_scale;
            }
        }
        return oracle::relativeError(
            std::span(out).subspan(first, dim),
            oracle::attention(q, k, v, static_cast<double>(params_.scale)).out);
    }

    Device* device_;
    const AttendShape* shape_;
    const Pattern* pattern_;
    AttendParams params_;
    std::int64_t columns_ = 0;
    std::int64_t rows_ = 0;
    std::vector<std::int32_t> table_;
    std::vector<float> q_;
    std::vector<Buffer> buffers_;
};

}  // namespace kvgrid
