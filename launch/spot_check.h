// Output vectors of a sample of KV heads, kept while a run decodes and then held against the
// reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "launch/reference.h"

namespace kvgrid::launch {

class SpotCheck {
public:
    // Of each unit the query heads of its group in `steps` steps.
    SpotCheck(const Reference& reference, std::vector<Unit> units, int steps);

    // out [sequences, query heads of all ranks, head_dim] of one layer; sequence i has key i.
    void take(int layer, int step, std::span<const float> out);

    struct Found {
        std::int64_t checked = 0;  // vectors
        std::int64_t wrong = 0;    // of those, with an error beyond the bound
        double max_rel_error = 0;
        // Against K and V as they were before they were stored; 0 where no format with scales is.
        double unquantised_rel_error = 0;
    };
    // lengths[i]: tokens of sequence i at the last step. `compared` is told how many units are
    // done, every 16 of them and at the end: a place where ranks can meet, so that none waits long.
    [[nodiscard]] Found compare(std::span<const std::int64_t> lengths, double bound, int threads,
                                const std::function<void(std::size_t)>& compared = {}) const;

    [[nodiscard]] const std::vector<Unit>& units() const noexcept { return units_; }

private:
    [[nodiscard]] Found compareUnit(std::size_t index, std::int64_t length, double bound) const;

    const Reference* reference_;
    std::vector<Unit> units_;
    int steps_;
    std::size_t unit_size_;       // values of a unit in one step
    std::vector<float> outputs_;  // [unit][step][query head of the group][head_dim]
};

}  // namespace kvgrid::launch
