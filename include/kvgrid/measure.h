// Step timings and the read ceiling they are held against.
#pragma once

#include <cstdint>
#include <vector>

#include <kvgrid/process.h>

namespace kvgrid {

struct ReadCeiling {
    double gb_per_s = 0;             // 1e9 bytes a second of this rank, all ranks reading at once
    double contiguous_gb_per_s = 0;  // the same with the runs in order
    std::int64_t bytes = 0;          // size of the buffer that was read
    int repetitions = 0;             // the median of these
};

// Collective. Reads `bytes` of device memory in runs of 32 KB in permuted order on every rank at
// once, after a barrier: what attention over the same bytes could reach at best. Then in order.
// Device time of one launch. does_not_fit: no memory.
[[nodiscard]] Result<ReadCeiling> measureReadCeiling(Process& process, std::int64_t bytes);

// Nearest-rank percentile: sorted[round(q * (n - 1))]. Empty input gives 0.
[[nodiscard]] double percentile(std::vector<double> values, double q);

}  // namespace kvgrid
