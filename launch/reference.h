// What attention over a Workload must give, computed from the seed alone: generated, rotated and
// rounded as the cache stores it, then attended by the oracle in fp64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <kvgrid/config.h>

#include "launch/oracle.h"
#include "launch/workload.h"

namespace kvgrid::launch {

// One KV head of one layer and sequence; its K and V serve all query heads of the group.
struct Unit {
    int layer = 0;
    std::int64_t key = 0;  // of the sequence's data
    int kv_head = 0;       // by its number in the model
};

// The rotation of a cache as the oracle names it.
[[nodiscard]] oracle::Rotary oracleRotary(const RotaryEmbedding& rotary);

// fp32, fp16 or bf16 values as fp32: the same values. Infinities of a 16-bit format become NaN.
[[nodiscard]] std::vector<float> widened(NumberFormat format, std::span<const std::byte> bytes);

// Largest relative error of one output vector that counts as right.
[[nodiscard]] double errorBound(NumberFormat output_format) noexcept;

class Reference {
public:
    Reference(const CacheConfig& config, std::uint64_t seed);

    // The first position that the token at `position` sees in a layer.
    [[nodiscard]] std::int64_t firstSeen(int layer, std::int64_t position) const noexcept;

    // What the cache must hold is worth, of the positions [first, end): [end - first, head_dim].
    struct KeysValues {
        std::int64_t first = 0;
        std::vector<double> k, v;
    };
    [[nodiscard]] KeysValues keysValues(const Unit& unit, std::int64_t first,
                                        std::int64_t end) const;
    // The same before it is stored: rotated, in fp32.
    [[nodiscard]] KeysValues unquantised(const Unit& unit, std::int64_t first,
                                         std::int64_t end) const;

    // Output of the token at `position`: of `stored` it sees firstSeen to itself. [head_dim]
    [[nodiscard]] std::vector<double> attend(const Unit& unit, const KeysValues& stored,
                                             int query_head, std::int64_t position) const;

    // Elements of K or V as the cache gives them back, in 16 bits, [tokens, heads, head_dim], of
    // which one head is compared: how many differ from `expected` [tokens, head_dim] in any bit.
    [[nodiscard]] std::int64_t countDifferences(std::span<const std::uint16_t> stored, int heads,
                                                int head, std::span<const double> expected) const;

    // Whether K and V are stored in a format with scales.
    [[nodiscard]] bool quantises() const noexcept;
    [[nodiscard]] int kvHeads() const noexcept { return kv_heads_; }  // of all ranks
    [[nodiscard]] int groupSize() const noexcept { return group_size_; }
    [[nodiscard]] int headDim() const noexcept { return workload_.headDim(); }

private:
    // What differs between layers.
    struct Layer {
        std::int64_t window = 0;  // 0: none
        oracle::Rotary rotary;
        std::optional<KvScales> scales = std::nullopt;  // none: every row has its own
    };
    [[nodiscard]] const Layer& layerAt(int layer) const {
        return layers_[static_cast<std::size_t>(layer)];
    }
    [[nodiscard]] KeysValues keysValues(const Unit& unit, std::int64_t first, std::int64_t end,
                                        oracle::Format format) const;

    Workload workload_;
    std::vector<Layer> layers_;
    oracle::Format kv_format_;
    oracle::Format gathered_format_;
    double scale_;
    double softcap_;
    bool sinks_;
    int kv_heads_;
    int group_size_;  // query heads of a KV head
};

// `count` of the units of `heads` in all layers and sequences, or all when there are no more: a
// sample that the seed picks.
[[nodiscard]] std::vector<Unit> pickUnits(int layers, std::int64_t sequences, Heads heads,
                                          std::int64_t count, std::uint64_t seed);

}  // namespace kvgrid::launch
