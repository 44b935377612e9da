#include <kvgrid/error.h>
#include <kvgrid/types.h>

namespace kvgrid {

std::string_view name(NumberFormat format) noexcept {
    switch (format) {
    case NumberFormat::fp32:
        return "fp32";
    case NumberFormat::fp16:
        return "fp16";
    case NumberFormat::bf16:
        return "bf16";
    case NumberFormat::fp8_e4m3:
        return "fp8-e4m3";
    case NumberFormat::int8:
        return "int8";
    }
    return "unknown";
}

std::string_view name(PoolLayout layout) noexcept {
    switch (layout) {
    case PoolLayout::block_major:
        return "block-major";
    case PoolLayout::layer_major:
        return "layer-major";
    case PoolLayout::contiguous:
        return "contiguous";
    }
    return "unknown";
}

std::string_view name(DeviceKind kind) noexcept {
    switch (kind) {
    case DeviceKind::cpu:
        return "cpu";
    case DeviceKind::cuda:
        return "cuda";
    }
    return "unknown";
}

std::string_view name(TransportKind kind) noexcept {
    switch (kind) {
    case TransportKind::mpi:
        return "mpi";
    case TransportKind::nccl:
        return "nccl";
    }
    return "unknown";
}

int exitCode(ErrorCode code) noexcept {
    switch (code) {
    case ErrorCode::invalid_argument:
        return 2;
    case ErrorCode::does_not_fit:
        return 3;
    case ErrorCode::unavailable:
        return 4;
    case ErrorCode::deadline:
        return 5;
    case ErrorCode::internal:
        return 1;
    }
    return 1;
}

}  // namespace kvgrid
