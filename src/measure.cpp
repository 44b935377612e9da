#include <kvgrid/measure.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "comm/process.h"
#include "kernels/device.h"
#include "kernels/ops.h"

namespace kvgrid {

namespace {

constexpr std::int64_t run_bytes = 32 * 1024;
constexpr int repetitions = 7;

struct Probe {
    Buffer data, order, sink;
};

Result<Probe> makeProbe(Device& device, std::int64_t runs) {
    Result<Buffer> data = Buffer::onDevice(device, static_cast<std::size_t>(runs * run_bytes));
    if (!data) return tl::unexpected<Failure>(data.error());
    Result<Buffer> order =
        Buffer::onDevice(device, static_cast<std::size_t>(runs) * sizeof(std::int32_t));
    if (!order) return tl::unexpected<Failure>(order.error());
    Result<Buffer> sink = Buffer::onDevice(device, sizeof(std::uint64_t));
    if (!sink) return tl::unexpected<Failure>(sink.error());
    return Probe{std::move(*data), std::move(*order), std::move(*sink)};
}

// Of one launch; the first one is not counted.
double medianSeconds(comm::ProcessState& ranks, const ReadRunsParams& params) {
    Device& device = *ranks.device;
    const StreamView stream = device.defaultStream();
    Event from(device, true);
    Event to(device, true);
    std::vector<double> seconds;
    for (int i = 0; i < repetitions + 1; ++i) {
        ranks.control->barrier();
        from.record(stream);
        device.operations().readRuns(params, stream);
        to.record(stream);
        ranks.synchronize(stream);
        if (i > 0) seconds.push_back(to.secondsSince(from));
    }
    return percentile(seconds, 0.5);
}

}  // namespace

double percentile(std::vector<double> values, double q) {
    if (values.empty()) return 0.0;
    const auto index =
        static_cast<std::ptrdiff_t>(std::lround(q * static_cast<double>(values.size() - 1)));
    std::nth_element(values.begin(), values.begin() + index, values.end());
    return values[static_cast<std::size_t>(index)];
}

Result<ReadCeiling> measureReadCeiling(Process& process, std::int64_t bytes) {
    comm::ProcessState& ranks = process.state();
    if (bytes < run_bytes || bytes / run_bytes > std::int64_t{1} << 30) {
        return failure(ErrorCode::invalid_argument,
                       "bytes: " + std::to_string(bytes) + " is not in [32 KB, 32 TB]");
    }
    Device& device = *ranks.device;
    const StreamView stream = device.defaultStream();
    const std::int64_t runs = bytes / run_bytes;
    Result<Probe> probe = makeProbe(device, runs);
    const Result<void> made = probe ? Result<void>() : tl::unexpected<Failure>(probe.error());
    if (Result<void> agreed = ranks.control->agree(made); !agreed)
        return tl::unexpected<Failure>(agreed.error());

    device.fill(probe->data.data(), 0x5A, probe->data.bytes(), stream);
    std::vector<std::int32_t> order(static_cast<std::size_t>(runs));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(),
                 std::mt19937_64(1));  // NOLINT(cert-msc51-cpp): the same order each time
    device.copy(probe->order.data(), order.data(), probe->order.bytes(), stream);
    ranks.synchronize(stream);

    ReadRunsParams params;
    params.data = probe->data.data();
    params.order = probe->order.as<const std::int32_t>();
    params.count = runs;
    params.run_bytes = run_bytes;
    params.sink = probe->sink.as<std::uint64_t>();
    const double paged = medianSeconds(ranks, params);
    std::sort(order.begin(), order.end());
    device.copy(probe->order.data(), order.data(), probe->order.bytes(), stream);
    ranks.synchronize(stream);
    const double contiguous = medianSeconds(ranks, params);
    const auto read = static_cast<double>(runs * run_bytes);
    return ReadCeiling{.gb_per_s = read / paged / 1e9,
                       .contiguous_gb_per_s = read / contiguous / 1e9,
                       .bytes = runs * run_bytes,
                       .repetitions = repetitions};
}

}  // namespace kvgrid
