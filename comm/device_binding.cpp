#include "comm/device_binding.h"

#include <charconv>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include <fmt/format.h>

namespace kvgrid::comm {
namespace {

std::string textOf(const std::vector<std::byte>& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Result<int> countGpus(const NodePlace& place) {
    try {
        return cudaDeviceCount();
    } catch (const Error& error) {
        if (error.code() != ErrorCode::unavailable) throw;
        return failure(error.code(), fmt::format("host {}: {}", place.host, error.what()));
    }
}

// GPUs for all ranks or for none: else some would be right for the wrong reason.
Result<DeviceKind> chooseKind(Control& control, const ProcessOptions& options,
                              const NodePlace& place) {
    if (options.device == DeviceKind::cpu) return DeviceKind::cpu;
    const Result<int> counted = countGpus(place);
    if (auto agreed = control.agree(counted.map([](int) {})); !agreed)
        return tl::unexpected(agreed.error());
    const int count = *counted;
    if (!options.device && control.maximum(count) == 0) return DeviceKind::cpu;
    Result<void> mine;
    if (count == 0) {
        mine = failure(ErrorCode::unavailable,
                       fmt::format("device cuda: host {} has no GPU for this process", place.host));
    }
    if (auto agreed = control.agree(mine); !agreed) return tl::unexpected(agreed.error());
    return DeviceKind::cuda;
}

Result<int> chooseIndex(const NodePlace& place) {
    const int count = cudaDeviceCount();
    const char* const wanted = std::getenv("KVGRID_DEVICE");
    if (wanted == nullptr) return place.node_rank % count;
    const std::string_view digits(wanted);
    int index = 0;
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), index);
    if (error != std::errc{} || end != digits.end() || index < 0) {
        return failure(ErrorCode::invalid_argument,
                       fmt::format("KVGRID_DEVICE={}: not the number of a GPU", wanted));
    }
    if (index >= count) {
        return failure(ErrorCode::unavailable,
                       fmt::format("KVGRID_DEVICE={}: host {} has {} GPU{}", index, place.host,
                                   count, count == 1 ? "" : "s"));
    }
    return index;
}

// How many ranks have this rank's GPU.
Result<int> countSharers(Control& control, const ProcessOptions& options, const NodePlace& place,
                         int index) {
    const std::string mine = place.host + " " + cudaDeviceId(index);
    const auto all = control.allGather(std::as_bytes(std::span(mine)));
    int sharers = 0;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        if (textOf(all[rank]) == mine) ++sharers;
        for (std::size_t other = 0; other < rank && !options.share_gpu; ++other) {
            if (all[other] != all[rank]) continue;
            const std::string gpu = textOf(all[rank]);
            const std::size_t space = gpu.find(' ');
            return failure(ErrorCode::unavailable,
                           fmt::format("ranks {} and {} have one GPU, {} of host {}: start as many "
                                       "ranks as there are GPUs, or share it with --share-gpu",
                                       other, rank, gpu.substr(space + 1), gpu.substr(0, space)));
        }
    }
    return sharers;
}

Result<std::unique_ptr<Device>> makeGpu(int index) {
    try {
        return makeCudaDevice(index);
    } catch (const Error& error) {
        if (error.code() != ErrorCode::unavailable) throw;
        return failure(error.code(), error.what());
    }
}

}  // namespace

Result<BoundDevice> bindDevice(Control& control, const ProcessOptions& options,
                               const NodePlace& place) {
    const auto kind = chooseKind(control, options, place);
    if (!kind) return tl::unexpected(kind.error());
    if (*kind == DeviceKind::cpu) return BoundDevice{.device = makeCpuDevice(place.threads)};

    const auto index = chooseIndex(place);
    if (auto agreed = control.agree(index.map([](int) {})); !agreed)
        return tl::unexpected(agreed.error());
    const auto sharers = countSharers(control, options, place, *index);
    if (!sharers) return tl::unexpected(sharers.error());
    auto gpu = makeGpu(*index);
    const Result<void> made = gpu ? Result<void>() : tl::unexpected(gpu.error());
    if (auto agreed = control.agree(made); !agreed) return tl::unexpected(agreed.error());
    return BoundDevice{.device = std::move(*gpu), .sharers = *sharers};
}

}  // namespace kvgrid::comm
