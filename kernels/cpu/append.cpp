#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/operations.h"
#include "kernels/paging.h"

namespace kvgrid::cpu {
namespace {

constexpr int max_row = 1024;  // head_dim at most

// As ops.h writes it: two products and one sum, each rounded. In place.
void rotate(float* head, int half, const float* cosines, const float* sines) {
    for (int i = 0; i < half; ++i) {
        const float low = head[i];
        const float high = head[i + half];
        head[i] = low * cosines[i] - high * sines[i];
        head[i + half] = high * cosines[i] + low * sines[i];
    }
}

class Append {
public:
    explicit Append(const AppendParams& params)
        : params_(params),
          half_(params.rotary_dim / 2),
          input_bytes_(static_cast<std::int64_t>(bytesPerElement(params.input_format))) {
        if (params.head_dim > max_row)
            throw Error(ErrorCode::internal, "append: head dim " + std::to_string(params.head_dim));
        for (std::int64_t i = 0; i < params.run_count; ++i)
            run_rows_ += params.runs[i].rows;
    }

    std::int64_t runRows() const { return run_rows_; }

    // Does rows [begin, end), counted over the runs.
    void perform(std::int64_t begin, std::int64_t end) const {
        const Run* run = params_.runs;
        std::int64_t run_begin = 0;
        for (std::int64_t row = begin; row < end; ++row) {
            while (row >= run_begin + run->rows)
                run_begin += (run++)->rows;
            if (params_.q != nullptr) rotateQuery(run->first_row + row - run_begin);
            writeToken(*run, row - run_begin);
        }
    }

private:
    void rotateQuery(std::int64_t row) const {
        for (int head = 0; head < params_.query_heads; ++head) {
            float* const out =
                params_.q_rotated + (row * params_.query_heads + head) * params_.head_dim;
            load(params_.q, row * params_.query_heads + head, out);
            rotateRow(row, out);
        }
    }

    void load(const void* source, std::int64_t head_row, float* out) const {
        const auto* const bytes = static_cast<const std::byte*>(source);
        toFloats(params_.input_format, bytes + head_row * params_.head_dim * input_bytes_,
                 params_.head_dim, out);
    }

    void rotateRow(std::int64_t row, float* head) const {
        if (half_ > 0)
            rotate(head, half_, params_.cosines + row * half_, params_.sines + row * half_);
    }

    void writeToken(const Run& run, std::int64_t row_of_run) const {
        const PoolView& pool = params_.pool;
        const std::int64_t position = run.first_position + row_of_run;
        const std::int64_t logical = position / pool.block_size;
        const std::int64_t block =
            findBlock(params_.tables, run.slot, logical, pool.max_num_blocks);
        if (block == no_block) return;
        const std::int64_t row = run.first_row + row_of_run;
        const std::int64_t within = position - logical * pool.block_size;
        alignas(64) std::array<float, max_row> numbers;
        for (int head = 0; head < params_.kv_heads; ++head) {
            std::byte* const key = keyRow(pool, params_.layer, block, head, within);
            std::byte* const scale = keyScale(pool, params_.layer, block, head, within);
            load(params_.k, row * params_.kv_heads + head, numbers.data());
            rotateRow(row, numbers.data());
            writeRow(numbers.data(), key, scale, fixedScale(head));
            load(params_.v, row * params_.kv_heads + head, numbers.data());
            writeRow(numbers.data(), key + pool.value_offset, scale + pool.value_offset,
                     fixedScale(params_.kv_heads + head));
        }
    }

    std::optional<std::uint16_t> fixedScale(int index) const {
        if (params_.fixed_scales == nullptr) return std::nullopt;
        return params_.fixed_scales[index];
    }

    void writeRow(const float* numbers, std::byte* row, std::byte* scale,
                  std::optional<std::uint16_t> fixed_scale) const {
        const NumberFormat format = params_.pool.format;
        if (!hasScales(format)) {
            fromFloats(format, numbers, params_.head_dim, row);
            return;
        }
        const std::uint16_t bits = quantise(format, numbers, params_.head_dim, row, fixed_scale);
        std::memcpy(scale, &bits, sizeof(bits));
    }

    const AppendParams& params_;
    int half_;
    std::int64_t input_bytes_;
    std::int64_t run_rows_ = 0;
};

}  // namespace

void append(const AppendParams& params, StreamView stream) {
    ThreadPool& pool = cpuDevice(stream).pool();
    const Append task(params);
    // Several rows a task, so that finding their run costs little.
    const std::int64_t rows = task.runRows();
    const std::int64_t step = std::clamp<std::int64_t>(rows / (8 * pool.threads()), 1, 64);
    pool.parallelFor((rows + step - 1) / step, [&task, rows, step](std::int64_t index, int) {
        task.perform(index * step, std::min(rows, (index + 1) * step));
    });
}

}  // namespace kvgrid::cpu
