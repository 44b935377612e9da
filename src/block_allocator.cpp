#include "src/block_allocator.h"

namespace kvgrid {

BlockAllocator::BlockAllocator(std::int64_t blocks)
    : references_(static_cast<std::size_t>(blocks)) {
    free_.reserve(references_.size());
    // The top of the stack is the lowest id: a pool fills from its start.
    for (std::int64_t block = blocks; block > 0; --block) {
        free_.push_back(static_cast<std::int32_t>(block - 1));
    }
}

std::optional<BlockId> BlockAllocator::allocate() {
    if (free_.empty()) return std::nullopt;
    const std::int32_t block = free_.back();
    free_.pop_back();
    references_[static_cast<std::size_t>(block)] = 1;
    return BlockId{block};
}

bool BlockAllocator::retain(BlockId block) {
    if (references(block) == 0) return false;
    ++references_[static_cast<std::size_t>(block)];
    return true;
}

bool BlockAllocator::release(BlockId block) {
    if (references(block) == 0) return false;
    const auto index = static_cast<std::int32_t>(block);
    if (--references_[static_cast<std::size_t>(index)] == 0) free_.push_back(index);
    return true;
}

std::int32_t BlockAllocator::references(BlockId block) const noexcept {
    const auto index = static_cast<std::int32_t>(block);
    if (index < 0 || index >= total()) return 0;
    return references_[static_cast<std::size_t>(index)];
}

}  // namespace kvgrid
