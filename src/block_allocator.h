// Physical blocks of one tier, layer group and context coordinate: who holds them, who may take
// them. Pure host metadata.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace kvgrid {

enum class BlockId : std::int32_t {};

// Every block is free or has a reference count of at least one; the two always sum to the total.
class BlockAllocator {
public:
    explicit BlockAllocator(std::int64_t blocks);

    // A block with one reference, or none when all are taken. Constant time.
    [[nodiscard]] std::optional<BlockId> allocate();
    // One more holder. False, and nothing changes, for an id that is out of range or free.
    [[nodiscard]] bool retain(BlockId block);
    // One holder fewer; free with the last. False, and nothing changes, for an id that is out of
    // range or free.
    [[nodiscard]] bool release(BlockId block);

    [[nodiscard]] std::int64_t total() const noexcept {
        return static_cast<std::int64_t>(references_.size());
    }
    [[nodiscard]] std::int64_t free() const noexcept {
        return static_cast<std::int64_t>(free_.size());
    }
    [[nodiscard]] std::int32_t references(BlockId block) const noexcept;  // 0: free or out of range

private:
    std::vector<std::int32_t> references_;
    std::vector<std::int32_t> free_;
};

}  // namespace kvgrid
