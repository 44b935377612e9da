// The words that all floors speak.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

// CUDA's own names, forward-declared so that no CUDA header is needed here.
struct CUstream_st;
struct __half;  // NOLINT(bugprone-reserved-identifier,readability-identifier-naming): CUDA's name

namespace kvgrid {

using ::__half;
using half = ::__half;  // IEEE binary16, 2 bytes; incomplete unless cuda_fp16.h is included
using cudaStream_t = CUstream_st*;  // NOLINT(readability-identifier-naming): CUDA's name

// How one number is stored. fp8_e4m3 and int8 carry one 16-bit scale a token, KV head and K or V:
// of that row, or a fixed one (CacheConfig::kv_scales).
enum class NumberFormat : std::uint8_t { fp32, fp16, bf16, fp8_e4m3, int8 };

[[nodiscard]] constexpr std::size_t bytesPerElement(NumberFormat format) noexcept {
    switch (format) {
    case NumberFormat::fp32:
        return 4;
    case NumberFormat::fp16:
    case NumberFormat::bf16:
        return 2;
    case NumberFormat::fp8_e4m3:
    case NumberFormat::int8:
        return 1;
    }
    return 0;
}

[[nodiscard]] constexpr bool hasScales(NumberFormat format) noexcept {
    return format == NumberFormat::fp8_e4m3 || format == NumberFormat::int8;
}

// Bytes of the scales of K (or V) of `tokens` tokens and one KV head in a block, padded so that
// what follows begins at a multiple of 16 bytes.
[[nodiscard]] constexpr std::int64_t scaleBytes(NumberFormat format, std::int64_t tokens) noexcept {
    return hasScales(format) ? (2 * tokens + 15) / 16 * 16 : 0;
}

[[nodiscard]] std::string_view name(NumberFormat format) noexcept;  // "bf16"

// How the blocks of a pool lie in memory. The bits of every output are the same for all three.
enum class PoolLayout : std::uint8_t {
    block_major,  // a block is one contiguous run: [layer][KV head][K, V][token][head_dim]
    layer_major,  // [K, V][layer][block][token][KV head][head_dim]
    contiguous,   // block_major with one block a sequence
};

[[nodiscard]] std::string_view name(PoolLayout layout) noexcept;  // "block-major"

enum class DeviceKind : std::uint8_t { cpu, cuda };
enum class TransportKind : std::uint8_t { mpi, nccl };

[[nodiscard]] std::string_view name(DeviceKind kind) noexcept;     // "cpu"
[[nodiscard]] std::string_view name(TransportKind kind) noexcept;  // "mpi"

// What attend leaves behind on every rank.
enum class Output : std::uint8_t {
    gathered,  // [tokens, query heads, head_dim]: all heads on every rank
    sharded,   // [tokens, query heads of this rank, head_dim]: for a tensor-parallel projection
};

// A sequence of this cache. Ids are reused after release.
enum class SequenceId : std::int32_t {};

}  // namespace kvgrid
