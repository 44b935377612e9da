#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/operations.h"

namespace kvgrid::cpu {
namespace {

// A task copies this much of one block's image.
constexpr std::int64_t piece_bytes = std::int64_t{256} << 10;

// Walks the runs of one block in order of its image.
class RunCursor {
public:
    RunCursor(const BlockRuns& runs, std::int64_t block, std::int64_t offset)
        : runs_(runs),
          block_(runs.data + block * runs.block_stride),
          run_(offset / runs.run_bytes),
          offset_(offset % runs.run_bytes) {}

    std::byte* data() const {
        return block_ + run_ / runs_.inner * runs_.outer_stride +
               run_ % runs_.inner * runs_.inner_stride + offset_;
    }
    std::int64_t contiguous() const { return runs_.run_bytes - offset_; }
    void advance(std::int64_t bytes) {
        offset_ += bytes;
        if (offset_ == runs_.run_bytes) {
            ++run_;
            offset_ = 0;
        }
    }

private:
    const BlockRuns& runs_;
    std::byte* block_;
    std::int64_t run_;
    std::int64_t offset_;
};

}  // namespace

void copyBlocks(const CopyBlocksParams& params, StreamView stream) {
    const std::int64_t bytes = params.source.outer * params.source.inner * params.source.run_bytes;
    const std::int64_t pieces = (bytes + piece_bytes - 1) / piece_bytes;
    cpuDevice(stream).pool().parallelFor(params.count * pieces, [&](std::int64_t index, int) {
        const BlockPair& pair = params.pairs[index / pieces];
        const std::int64_t begin = index % pieces * piece_bytes;
        std::int64_t left = std::min(piece_bytes, bytes - begin);
        RunCursor from(params.source, pair.source, begin);
        RunCursor to(params.destination, pair.destination, begin);
        while (left > 0) {
            const std::int64_t step = std::min({left, from.contiguous(), to.contiguous()});
            std::memcpy(to.data(), from.data(), static_cast<std::size_t>(step));
            from.advance(step);
            to.advance(step);
            left -= step;
        }
    });
}

}  // namespace kvgrid::cpu
