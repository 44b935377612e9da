// Times decode attention of the CPU device against the read ceiling of the same threads, and prints
// a table. Not a test: nothing is asserted.
//   attend_benchmark [threads]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention_state.h"
#include "kernels/device.h"
#include "kernels/number_formats.h"
#include "kernels/ops.h"

namespace kvgrid {
namespace {

struct Shape {
    NumberFormat format;
    int group;
    int head_dim;
    int batch;
    std::int64_t context;
    int kv_heads = 8;
    int rows = 1;  // a sequence
};

double seconds(const std::function<void()>& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double medianSeconds(int repetitions, const std::function<void()>& work) {
    work();
    std::vector<double> times;
    for (int i = 0; i < repetitions; ++i)
        times.push_back(seconds(work));
    std::nth_element(times.begin(), times.begin() + repetitions / 2, times.end());
    return times[static_cast<std::size_t>(repetitions / 2)];
}

class Benchmark {
public:
    explicit Benchmark(int threads) : device_(makeCpuDevice(threads)) {}

    void ceiling() {
        constexpr std::int64_t run_bytes = 32768;
        constexpr std::int64_t count = 32768;
        const Buffer data = Buffer::onDevice(*device_, run_bytes * count).value();
        std::vector<std::int32_t> order(count);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(1));
        std::uint64_t sink = 0;
        const ReadRunsParams params{.data = data.data(),
                                    .order = order.data(),
                                    .count = count,
                                    .run_bytes = run_bytes,
                                    .sink = &sink};
        const double time = medianSeconds(
            9, [&] { device_->operations().readRuns(params, device_->defaultStream()); });
        ceiling_ = static_cast<double>(run_bytes * count) / time / 1e9;
        std::printf("# %s\n# read ceiling: %.2f GB/s\n", device_->description().c_str(), ceiling_);
        std::printf(
            "# format group head_dim kv_heads batch context rows    GB/s  of_ceiling  GFLOP/s\n");
    }

    void attend(const Shape& shape) {
        constexpr std::int64_t block_size = 64;
        const std::int64_t blocks_per_sequence = (shape.context + block_size - 1) / block_size;
        const std::int64_t blocks = blocks_per_sequence * shape.batch;
        const std::int64_t row_bytes =
            shape.head_dim * static_cast<std::int64_t>(bytesPerElement(shape.format));
        const std::int64_t tile_bytes =
            block_size * row_bytes + scaleBytes(shape.format, block_size);
        PoolView pool{.max_num_blocks = blocks,
                      .block_stride = shape.kv_heads * 2 * tile_bytes,
                      .head_stride = 2 * tile_bytes,
                      .token_stride = row_bytes,
                      .value_offset = tile_bytes,
                      .scale_offset = block_size * row_bytes,
                      .scale_head_stride = 2 * tile_bytes,
                      .block_size = block_size,
                      .format = shape.format};
        // Several layers, so that none is warm: two gigabytes in turn.
        pool.layer_stride = blocks * pool.block_stride;
        const std::int64_t layers =
            std::clamp<std::int64_t>((std::int64_t{2} << 30) / pool.layer_stride, 1, 16);
        const Buffer data =
            Buffer::onDevice(*device_, static_cast<std::size_t>(layers * pool.layer_stride))
                .value();
        pool.data = data.data();
        auto* const bits = data.as<std::uint16_t>();
        // Numbers near 1 in every format, and as scales.
        const std::uint16_t one = shape.format == NumberFormat::bf16 ? 0x3F00 : 0x3800;
        for (std::size_t i = 0; i < data.bytes() / 2; ++i)
            bits[i] = static_cast<std::uint16_t>(one ^ (i * 2654435761U & 0x803FU));

        std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
        std::iota(table.begin(), table.end(), 0);
        std::shuffle(table.begin(), table.end(), std::mt19937(2));
        const std::int64_t rows = shape.batch * shape.rows;
        const int query_heads = shape.kv_heads * shape.group;
        std::vector<float> q(static_cast<std::size_t>(rows * query_heads * shape.head_dim), 0.01F);
        std::vector<float> out(q.size());
        std::vector<float> lse(static_cast<std::size_t>(rows * query_heads));
        std::vector<Run> runs;
        for (int i = 0; i < shape.batch; ++i)
            runs.push_back({.slot = i,
                            .rows = shape.rows,
                            .first_row = std::int64_t{i} * shape.rows,
                            .first_position = shape.context - shape.rows});
        const Buffer workspace =
            Buffer::onDevice(*device_, device_->operations().attendWorkspaceBytes(rows, query_heads,
                                                                                  shape.head_dim))
                .value();
        AttendParams params{.query_heads = query_heads,
                            .kv_heads = shape.kv_heads,
                            .head_dim = shape.head_dim,
                            .scale = 0.1F,
                            .q = q.data(),
                            .runs = runs.data(),
                            .run_count = shape.batch,
                            .max_position = shape.context - 1,
                            .tables = {table.data(), blocks_per_sequence},
                            .pool = pool,
                            .out = out.data(),
                            .lse = lse.data(),
                            .workspace = workspace.data(),
                            .workspace_bytes = workspace.bytes()};
        const double time =
            medianSeconds(5,
                          [&] {
                              for (params.layer = 0; params.layer < layers; ++params.layer)
                                  device_->operations().attend(params, device_->defaultStream());
                          }) /
            static_cast<double>(layers);
        const double bytes = 2.0 * static_cast<double>(tile_bytes) / block_size * shape.kv_heads *
                             static_cast<double>(shape.context) * shape.batch;
        const double tokens = static_cast<double>(shape.context) * shape.batch;
        const double rate = bytes / time / 1e9;
        std::printf("%8s %5d %8d %8d %5d %7lld %4d %7.2f %10.1f%% %8.1f\n",
                    std::string(name(shape.format)).c_str(), shape.group, shape.head_dim,
                    shape.kv_heads, shape.batch, static_cast<long long>(shape.context), shape.rows,
                    rate, 100.0 * rate / ceiling_,
                    4.0 * tokens * query_heads * shape.head_dim * shape.rows / time / 1e9);
        std::fflush(stdout);
    }

private:
    std::unique_ptr<Device> device_;
    double ceiling_ = 0;
};

void runAll(int threads) {
    Benchmark benchmark(threads);
    benchmark.ceiling();
    for (const NumberFormat format :
         {NumberFormat::bf16, NumberFormat::fp16, NumberFormat::fp8_e4m3, NumberFormat::int8}) {
        for (const int head_dim : {64, 80, 96, 128, 256})
            benchmark.attend({format, 4, head_dim, 4, 16384});
        for (const int group : {1, 2, 3, 8, 16})
            benchmark.attend({format, group, 128, 4, 16384});
        benchmark.attend({format, 71, 64, 4, 16384, 1});
        benchmark.attend({format, 4, 128, 1, 131072});
        benchmark.attend({format, 4, 128, 64, 1024});
    }
    benchmark.attend({NumberFormat::bf16, 4, 128, 1, 4096, 8, 256});
}

}  // namespace
}  // namespace kvgrid

int main(int argc, char** argv) {
    kvgrid::runAll(argc > 1 ? std::atoi(argv[1]) : 2);
    return 0;
}
