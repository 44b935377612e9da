// Times decode attention of the CUDA device against the read ceiling of the same run, over
// saturating and small shapes, bf16. Prints a table, and JSON on request; exit code 1 when an
// output is wrong.
//   attend_benchmark_gpu [--json FILE] [--only TEXT] [--gib POOL]
//
// Every launch reads another layer. ceiling: readRuns of 32 KB runs over as many bytes as the
// launch reads, scattered over the pool, plain launches. plain: events around one launch (attention
// and fold). graph: one CUDA graph of a launch a layer, divided by the layers. GB/s count K and V
// alone.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention_state.h"
#include "kernels/device.h"
#include "kernels/number_formats.h"
#include "kernels/ops.h"
#include "kernels/paging.h"
#include "launch/oracle.h"

namespace kvgrid {
namespace {

constexpr std::int64_t block_size = 64;
constexpr std::int64_t run_bytes = 32768;
constexpr int repetitions = 24;
constexpr double error_bound = 4e-3;

struct Shape {
    std::string name;
    std::vector<std::int64_t> lengths;
    int query_heads;
    int kv_heads;
    int head_dim = 128;

    [[nodiscard]] std::int64_t blocks() const {
        std::int64_t count = 0;
        for (const std::int64_t length : lengths)
            count += (length + block_size - 1) / block_size;
        return count;
    }
    // Of one layer, K and V of the tokens that are there.
    [[nodiscard]] std::int64_t bytes() const {
        return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}) * kv_heads * 2 *
               head_dim * 2;
    }
    [[nodiscard]] std::int64_t layerBytes() const {
        return blocks() * block_size * kv_heads * 2 * head_dim * 2;
    }
};

Shape even(const std::string& name, std::size_t batch, std::int64_t context, int query_heads,
           int kv_heads, int head_dim = 128) {
    return {name, std::vector<std::int64_t>(batch, context), query_heads, kv_heads, head_dim};
}

std::vector<Shape> allShapes() {
    constexpr std::int64_t k = 1024;
    std::vector<Shape> shapes{even("1x128Kx32/8", 1, 128 * k, 32, 8),
                              even("1x1Mx8/1", 1, 1024 * k, 8, 1),
                              even("8x128Kx8/1", 8, 128 * k, 8, 1),
                              even("32x32Kx8/1", 32, 32 * k, 8, 1),
                              even("64x8Kx32/8", 64, 8 * k, 32, 8),
                              even("16x64Kx64/8", 16, 64 * k, 64, 8),
                              even("64x8Kx32/32", 64, 8 * k, 32, 32),
                              even("4x64Kx16/1 dim 256", 4, 64 * k, 16, 1, 256),
                              even("128x4Kx8/8 dim 64", 128, 4 * k, 8, 8, 64)};
    Shape ragged{"ragged 64x(1K..100K)x8/1", {}, 8, 1};
    std::mt19937 random(11);
    for (int i = 0; i < 64; ++i)
        ragged.lengths.push_back(static_cast<std::int64_t>(
            std::exp2(10.0 + 6.6 * (static_cast<double>(random()) / 4294967296.0))));
    shapes.push_back(ragged);
    Shape uneven{"1M beside 63x2K, 8/1", std::vector<std::int64_t>(64, 2 * k), 8, 1};
    uneven.lengths[17] = 1024 * k;
    shapes.push_back(uneven);
    shapes.push_back(even("6x90Kx8/1", 6, 90'000, 8, 1));
    shapes.push_back(even("1x128Kx8/1", 1, 128 * k, 8, 1));
    shapes.push_back(even("1x32Kx8/1", 1, 32 * k, 8, 1));
    shapes.push_back(even("16x8Kx8/1", 16, 8 * k, 8, 1));
    return shapes;
}

void require(cudaError_t status, const char* call) {
    if (status != cudaSuccess)
        throw Error(ErrorCode::internal, std::string(call) + ": " + cudaGetErrorString(status));
}

double median(std::vector<double> values) {
    std::nth_element(values.begin(),
                     values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
}

class Timer {
public:
    Timer() {
        require(cudaEventCreate(&begin_), "cudaEventCreate");
        require(cudaEventCreate(&end_), "cudaEventCreate");
    }
    ~Timer() {
        (void)cudaEventDestroy(begin_);
        (void)cudaEventDestroy(end_);
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

    // Microseconds on the GPU.
    double time(::cudaStream_t stream, const std::function<void()>& work) {
        require(cudaEventRecord(begin_, stream), "cudaEventRecord");
        work();
        require(cudaEventRecord(end_, stream), "cudaEventRecord");
        require(cudaEventSynchronize(end_), "cudaEventSynchronize");
        float milliseconds = 0;
        require(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
        return 1e3 * static_cast<double>(milliseconds);
    }

private:
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
};

template <typename T>
Buffer upload(Device& device, const std::vector<T>& values) {
    Buffer buffer = Buffer::onDevice(device, values.size() * sizeof(T)).value();
    device.copy(buffer.data(), values.data(), buffer.bytes(), device.defaultStream());
    device.synchronize(device.defaultStream());
    return buffer;
}

// Numbers in [-1, 1) that repeat through the pool with a period that is prime, so that any number
// is known from where it lies.
class Pattern {
public:
    Pattern() : bits_(33'554'393) {
        std::uint64_t state = 1;
        for (std::uint16_t& bits : bits_) {
            state = state * 6364136223846793005U + 1442695040888963407U;
            bits = bf16FromFloat(
                static_cast<float>(static_cast<std::int64_t>(state >> 40) - (1 << 23)) * 0x1p-23F);
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
        return static_cast<double>(
            bf16ToFloat(bits_[static_cast<std::size_t>(byte / 2) % bits_.size()]));
    }

private:
    std::vector<std::uint16_t> bits_;
};

// What is resident for one shape.
class Step {
public:
    Step(Device& device, const Shape& shape, const Buffer& pool, const Pattern& pattern)
        : device_(&device),
          shape_(&shape),
          pattern_(&pattern) {
        const std::int64_t blocks = shape.blocks();
        layers = std::clamp<std::int64_t>(
            static_cast<std::int64_t>(pool.bytes()) / shape.layerBytes(), 1, 40);
        const std::int64_t row = std::int64_t{2} * shape.head_dim;
        PoolView view;
        view.data = pool.data();
        view.max_num_blocks = blocks;
        view.block_size = block_size;
        view.token_stride = row;
        view.value_offset = row * block_size;
        view.head_stride = 2 * view.value_offset;
        view.layer_stride = view.head_stride * shape.kv_heads;
        view.block_stride = view.layer_stride * layers;

        std::vector<std::int32_t> ids(static_cast<std::size_t>(blocks));
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
        const std::int64_t longest = *std::max_element(shape.lengths.begin(), shape.lengths.end());
        columns_ = (longest + block_size - 1) / block_size;
        table_.assign(shape.lengths.size() * static_cast<std::size_t>(columns_), -1);
        std::vector<Run> runs;
        auto next = ids.begin();
        for (std::size_t i = 0; i < shape.lengths.size(); ++i) {
            const std::int64_t count = (shape.lengths[i] + block_size - 1) / block_size;
            std::copy_n(next, count, table_.begin() + static_cast<std::ptrdiff_t>(i) * columns_);
            next += count;
            const auto slot = static_cast<std::int32_t>(i);
            runs.push_back({.slot = slot,
                            .rows = 1,
                            .first_row = slot,
                            .first_position = shape.lengths[i] - 1});
        }
        const std::size_t states =
            shape.lengths.size() * static_cast<std::size_t>(shape.query_heads);
        q_.resize(states * static_cast<std::size_t>(shape.head_dim));
        std::mt19937 random(4);
        for (float& number : q_)
            number = static_cast<float>(random()) * 0x1p-31F - 1.0F;
        buffers_.push_back(upload(device, table_));
        buffers_.push_back(upload(device, runs));
        buffers_.push_back(upload(device, q_));
        for (const std::size_t bytes :
             {q_.size() * sizeof(float), states * sizeof(float),
              device.operations().attendWorkspaceBytes(static_cast<std::int64_t>(runs.size()),
                                                       shape.query_heads, shape.head_dim),
              device.operations().attendPlanBytes(static_cast<std::int64_t>(runs.size()),
                                                  static_cast<std::int64_t>(runs.size()),
                                                  shape.query_heads)})
            buffers_.push_back(Buffer::onDevice(device, bytes).value());
        params = {.query_heads = shape.query_heads,
                  .kv_heads = shape.kv_heads,
                  .head_dim = shape.head_dim,
                  .scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim)),
                  .q = buffers_[2].as<float>(),
                  .runs = buffers_[1].as<Run>(),
                  .run_count = static_cast<std::int64_t>(runs.size()),
                  .max_position = longest - 1,
                  .tables = {buffers_[0].as<std::int32_t>(), columns_},
                  .pool = view,
                  .out = buffers_[3].as<float>(),
                  .lse = buffers_[4].as<float>(),
                  .workspace = buffers_[5].data(),
                  .workspace_bytes = buffers_[5].bytes(),
                  .plan = buffers_[6].data(),
                  .plan_bytes = buffers_[6].bytes()};
        device.operations().planAttend(params, device.defaultStream());
    }

    void attend(std::int64_t layer) {
        params.layer = layer % layers;
        device_->operations().attend(params, device_->defaultStream());
    }

    // The largest error among some rows and heads of the last launch.
    double error() const {
        std::vector<float> out(q_.size());
        device_->copy(out.data(), params.out, out.size() * sizeof(float), device_->defaultStream());
        device_->synchronize(device_->defaultStream());
        double worst = 0;
        const auto batch = static_cast<std::int64_t>(shape_->lengths.size());
        for (const auto& [row, head] : {std::pair<std::int64_t, int>{0, 0},
                                        {batch / 2, shape_->query_heads / 2},
                                        {batch - 1, shape_->query_heads - 1}}) {
            const std::int64_t state = row * shape_->query_heads + head;
            const std::span<const float> mine(out.data() + state * shape_->head_dim,
                                              static_cast<std::size_t>(shape_->head_dim));
            worst = std::max(worst, oracle::relativeError(mine, expected(row, head).out));
        }
        return worst;
    }

    AttendParams params;
    std::int64_t layers = 1;

private:
    [[nodiscard]] oracle::State expected(std::int64_t row, int head) const {
        const auto dim = static_cast<std::size_t>(shape_->head_dim);
        const int kv_head = head / (shape_->query_heads / shape_->kv_heads);
        const std::int64_t length = shape_->lengths[static_cast<std::size_t>(row)];
        std::vector<double> q(dim);
        for (std::size_t i = 0; i < dim; ++i)
            q[i] = static_cast<double>(
                q_[static_cast<std::size_t>(row * shape_->query_heads + head) * dim + i]);
        std::vector<double> k(static_cast<std::size_t>(length) * dim);
        std::vector<double> v(k.size());
        const PoolView& pool = params.pool;
        for (std::int64_t token = 0; token < length; ++token) {
            const std::int64_t block =
                table_[static_cast<std::size_t>(row * columns_ + token / block_size)];
            const std::int64_t key = params.layer * pool.layer_stride + block * pool.block_stride +
                                     kv_head * pool.head_stride +
                                     token % block_size * pool.token_stride;
            for (int i = 0; i < shape_->head_dim; ++i) {
                const std::int64_t stored = 2 * storedElement(token, i, shape_->head_dim, 2);
                const auto to = static_cast<std::size_t>(token * shape_->head_dim + i);
                k[to] = pattern_->at(key + stored);
                v[to] = pattern_->at(key + pool.value_offset + stored);
            }
        }
        return oracle::attention(q, k, v, static_cast<double>(params.scale));
    }

    Device* device_;
    const Shape* shape_;
    const Pattern* pattern_;
    std::int64_t columns_ = 0;
    std::vector<std::int32_t> table_;
    std::vector<float> q_;
    std::vector<Buffer> buffers_;
};

class Benchmark {
public:
    explicit Benchmark(std::int64_t pool_bytes)
        : device_(makeCudaDevice(0)),
          pool_(Buffer::onDevice(*device_, static_cast<std::size_t>(pool_bytes)).value()),
          sink_(Buffer::onDevice(*device_, sizeof(std::uint64_t)).value()) {
        pattern_.fill(*device_, pool_);
        const auto runs = static_cast<std::int32_t>(pool_bytes / run_bytes);
        std::vector<std::int32_t> order(static_cast<std::size_t>(runs));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(1));
        order_ = upload(*device_, order);
        report["schema"] = 1;
        report["device"] = device_->description();
        report["pool_bytes"] = pool_bytes;
        report["repetitions"] = repetitions;
        std::printf("# %s, bf16, blocks of %lld tokens, medians of %d\n",
                    device_->description().c_str(), static_cast<long long>(block_size),
                    repetitions);
        const double large = ceiling(pool_bytes / 4);
        report["ceiling_gb_per_s"] = large;
        std::printf("# ceiling, %.1f GB in 32 KB runs: %.0f GB/s\n",
                    static_cast<double>(pool_bytes / 4) / 1e9, large);
        std::printf("# %-26s %8s %9s %10s %8s %10s %8s %9s %s\n", "batch x context x heads", "MB",
                    "ceiling", "plain us", "of ceil", "graph us", "of ceil", "error", "wrong");
    }

    void run(const Shape& shape) {
        Step step(*device_, shape, pool_, pattern_);
        const auto bytes = static_cast<double>(shape.bytes());
        const double ceiling_rate = ceiling(shape.bytes());
        std::int64_t layer = 0;
        for (int i = 0; i < 3; ++i)
            step.attend(layer++);
        std::vector<double> plain;
        for (int i = 0; i < repetitions; ++i)
            plain.push_back(timer_.time(stream(), [&] { step.attend(layer++); }));
        const double plain_us = median(plain);
        const double graph_us = timeGraph(step);
        const double error = step.error();
        const bool wrong = !(error <= error_bound);
        any_wrong_ = any_wrong_ || wrong;
        const auto rate = [bytes](double microseconds) { return bytes / microseconds / 1e3; };
        std::printf("  %-26s %8.0f %9.0f %10.1f %7.1f%% %10.1f %7.1f%% %9.1e %d\n",
                    shape.name.c_str(), bytes / 1e6, ceiling_rate, plain_us,
                    100 * rate(plain_us) / ceiling_rate, graph_us,
                    100 * rate(graph_us) / ceiling_rate, error, wrong ? 1 : 0);
        std::fflush(stdout);
        report["rows"].push_back({{"shape", shape.name},
                                  {"batch", shape.lengths.size()},
                                  {"query_heads", shape.query_heads},
                                  {"kv_heads", shape.kv_heads},
                                  {"head_dim", shape.head_dim},
                                  {"kv_bytes", shape.bytes()},
                                  {"layers", step.layers},
                                  {"ceiling_gb_per_s", ceiling_rate},
                                  {"plain_us", plain_us},
                                  {"plain_gb_per_s", rate(plain_us)},
                                  {"graph_us", graph_us},
                                  {"graph_gb_per_s", rate(graph_us)},
                                  {"relative_error", error},
                                  {"wrong", wrong}});
    }

    [[nodiscard]] bool anyWrong() const { return any_wrong_; }

    nlohmann::json report;

private:
    [[nodiscard]] ::cudaStream_t stream() const {
        return static_cast<::cudaStream_t>(device_->defaultStream().handle());
    }

    // GB/s of the probe over `bytes` a launch, other runs each time.
    double ceiling(std::int64_t bytes) {
        const std::int64_t all = static_cast<std::int64_t>(pool_.bytes()) / run_bytes;
        const std::int64_t count = std::min(all, bytes / run_bytes);
        std::vector<double> times;
        std::int64_t first = 0;
        for (int i = 0; i < repetitions + 2; ++i) {
            if (first + count > all) first = 0;
            const ReadRunsParams params{.data = pool_.data(),
                                        .order = order_.as<std::int32_t>() + first,
                                        .count = count,
                                        .run_bytes = run_bytes,
                                        .sink = sink_.as<std::uint64_t>()};
            const double time = timer_.time(stream(), [&] {
                device_->operations().readRuns(params, device_->defaultStream());
            });
            if (i >= 2) times.push_back(time);
            first += count;
        }
        return static_cast<double>(count * run_bytes) / median(times) / 1e3;
    }

    double timeGraph(Step& step) {
        const std::int64_t launches = std::max<std::int64_t>(step.layers, 8);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        require(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal),
                "cudaStreamBeginCapture");
        for (std::int64_t i = 0; i < launches; ++i)
            step.attend(i);
        require(cudaStreamEndCapture(stream(), &graph), "cudaStreamEndCapture");
        require(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        std::vector<double> times;
        for (int i = 0; i < repetitions + 2; ++i) {
            const double time = timer_.time(stream(), [&] {
                require(cudaGraphLaunch(executable, stream()), "cudaGraphLaunch");
            });
            if (i >= 2) times.push_back(time / static_cast<double>(launches));
        }
        require(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
        require(cudaGraphDestroy(graph), "cudaGraphDestroy");
        return median(times);
    }

    std::unique_ptr<Device> device_;
    Buffer pool_;
    Buffer sink_;
    Buffer order_;
    Pattern pattern_;
    Timer timer_;
    bool any_wrong_ = false;
};

int benchmark(int argc, char** argv) {
    std::string json;
    std::string only;
    std::int64_t gib = 24;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        if (option == "--json")
            json = argv[i + 1];
        else if (option == "--only")
            only = argv[i + 1];
        else if (option == "--gib")
            gib = std::atoll(argv[i + 1]);
        else
            throw Error(ErrorCode::invalid_argument, "unknown option " + option);
    }
    Benchmark bench(gib << 30);
    for (const Shape& shape : allShapes())
        if (shape.name.find(only) != std::string::npos && shape.layerBytes() <= gib << 30)
            bench.run(shape);
    if (!json.empty()) std::ofstream(json) << bench.report.dump(2) << '\n';
    std::printf("# %s\n", bench.anyWrong() ? "FAILED" : "OK");
    return bench.anyWrong() ? 1 : 0;
}

}  // namespace
}  // namespace kvgrid

int main(int argc, char** argv) {
    try {
        return kvgrid::benchmark(argc, argv);
    } catch (const kvgrid::Error& error) {
        std::fprintf(stderr, "attend_benchmark_gpu: %s\n", error.what());
        return error.code() == kvgrid::ErrorCode::unavailable ? 4 : 1;
    }
}
