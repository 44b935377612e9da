#include "kernels/cpu/attend_unit.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/cpu/merge_states.h"
#include "kernels/cpu/simd_targets.h"
#include "kernels/paging.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend_unit.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/cpu/stripe-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {

// Folds the states of a unit. A fold* function leaves the states of its subtree in `slot` of the
// scratch and says whether there are any; a subtree without tokens leaves nothing, and its sibling
// passes up unchanged, as merging the empty state would have it.
template <NumberFormat format>
class UnitFold {
public:
    UnitFold(const AttendUnit& unit, AttendScratch& scratch)
        : unit_(unit),
          params_(*unit.params),
          pool_(params_.pool),
          scratch_(scratch),
          group_(params_.query_heads / params_.kv_heads),
          query_rows_(unit.rows * group_),
          first_position_(unit.run->first_position + unit.first_row),
          last_position_(first_position_ + unit.rows - 1) {}

    void run() {
        stageQueries();
        const bool any = foldLanes(unit_.first_lane, unit_.lane_stride, 0);
        for (int r = 0; r < unit_.rows; ++r)
            store(r, any);
    }

private:
    float* slotOut(int slot) const {
        return scratch_.out + static_cast<std::ptrdiff_t>(slot) * query_rows_ * params_.head_dim;
    }
    float* slotLse(int slot) const { return scratch_.lse + slot * max_unit_rows; }

    void stageQueries() {
        for (int r = 0; r < unit_.rows; ++r) {
            const std::int64_t row = unit_.run->first_row + unit_.first_row + r;
            const float* const q =
                params_.q + (row * params_.query_heads + unit_.kv_head * group_) * params_.head_dim;
            for (int h = 0; h < group_; ++h)
                toVectorOrder<format>(q + h * params_.head_dim, params_.head_dim,
                                      scratch_.q + (r * group_ + h) * params_.head_dim);
        }
    }

    // Lanes lane, lane + stride, ...
    bool foldLanes(int lane, int stride, int slot) {
        if (stride == lane_count) {
            const std::int64_t last_stripe = last_position_ / stripe_tokens;
            if (last_stripe < lane) return false;
            const auto last = static_cast<std::uint64_t>((last_stripe - lane) / lane_count);
            return foldStripes(lane, 0, std::bit_width(last), slot);
        }
        const bool left = foldLanes(lane, 2 * stride, slot);
        const bool right = foldLanes(lane + stride, 2 * stride, left ? slot + 1 : slot);
        return join(left, right, slot);
    }

    // Stripes n * lane_count + lane for n in [first, first + 2^level).
    bool foldStripes(int lane, std::int64_t first, int level, int slot) {
        const std::int64_t stripe = first * lane_count + lane;
        if (stripe * stripe_tokens > last_position_) return false;
        if (level == 0) return leaf(stripe, slot);
        const std::int64_t half = std::int64_t{1} << (level - 1);
        const bool left = foldStripes(lane, first, level - 1, slot);
        const bool right = foldStripes(lane, first + half, level - 1, left ? slot + 1 : slot);
        return join(left, right, slot);
    }

    bool join(bool left, bool right, int slot) {
        if (left && right) mergeSlots(slot);
        return left || right;
    }

    // slot = merge(slot, slot + 1)
    void mergeSlots(int slot) {
        float* const left = slotOut(slot);
        const float* const right = slotOut(slot + 1);
        float* const left_lse = slotLse(slot);
        const float* const right_lse = slotLse(slot + 1);
        for (int r = 0; r < query_rows_; ++r) {
            const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(r) * params_.head_dim;
            left_lse[r] = mergeState(left + at, left_lse[r], right + at, right_lse[r],
                                     params_.head_dim, left + at);
        }
    }

    bool leaf(std::int64_t stripe, int slot) {
        const int tokens = findTokens(stripe);
        if (tokens == 0) return false;
        findLimits(stripe, tokens);
        const Stripe view{.keys = scratch_.keys,
                          .tokens = tokens,
                          .value_offset = pool_.value_offset,
                          .head_dim = params_.head_dim,
                          .scale = params_.scale};
        for (int r = 0; r < query_rows_; r += AttendScratch::rows_at_once) {
            const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(r) * params_.head_dim;
            attendStripe<format>(view, scratch_.q + at, scratch_.limits + r,
                                 std::min(AttendScratch::rows_at_once, query_rows_ - r), scratch_,
                                 slotOut(slot) + at, slotLse(slot) + r);
        }
        return true;
    }

    // Lists the stripe's tokens up to the unit's last position whose blocks exist.
    int findTokens(std::int64_t stripe) {
        const std::int64_t begin = stripe * stripe_tokens;
        const std::int64_t end = std::min(begin + stripe_tokens, last_position_ + 1);
        int count = 0;
        for (std::int64_t position = begin; position < end;) {
            const std::int64_t logical = position / pool_.block_size;
            const std::int64_t within = position - logical * pool_.block_size;
            const std::int64_t next = std::min(end, position - within + pool_.block_size);
            const std::int64_t block =
                findBlock(params_.tables, unit_.run->slot, logical, pool_.max_num_blocks);
            if (block != no_block) {
                const std::byte* key = keyRow(pool_, params_.layer, block, unit_.kv_head, within);
                for (std::int64_t p = position; p < next; ++p, key += pool_.token_stride) {
                    scratch_.keys[count] = key;
                    scratch_.offsets[count] = static_cast<std::int16_t>(p - begin);
                    ++count;
                }
            }
            position = next;
        }
        if (count > 0)
            std::fill_n(scratch_.keys + count, AttendScratch::padding, scratch_.keys[count - 1]);
        return count;
    }

    // How many of the listed tokens each query row sees.
    void findLimits(std::int64_t stripe, int tokens) {
        for (int r = 0; r < unit_.rows; ++r) {
            const std::int64_t last = first_position_ + r - stripe * stripe_tokens;
            const auto* const end =
                std::upper_bound(scratch_.offsets, scratch_.offsets + tokens, last);
            std::fill_n(scratch_.limits + r * group_, group_,
                        static_cast<int>(end - scratch_.offsets));
        }
    }

    void store(int row, bool any) const {
        const std::int64_t to = static_cast<std::int64_t>(row) * params_.query_heads;
        float* const out = unit_.out + to * params_.head_dim;
        float* const lse = unit_.lse + to;
        const auto numbers = static_cast<std::size_t>(group_) * params_.head_dim;
        if (any) {
            const std::ptrdiff_t from = static_cast<std::ptrdiff_t>(row) * group_;
            std::memcpy(out, slotOut(0) + from * params_.head_dim, numbers * sizeof(float));
            std::copy_n(slotLse(0) + from, group_, lse);
        } else {
            std::fill_n(out, numbers, 0.0F);
            std::fill_n(lse, group_, empty_lse);
        }
    }

    const AttendUnit& unit_;
    const AttendParams& params_;
    const PoolView& pool_;
    AttendScratch& scratch_;
    int group_;
    int query_rows_;
    std::int64_t first_position_;
    std::int64_t last_position_;
};

void attendUnitFp16(const AttendUnit& unit, AttendScratch& scratch) {
    UnitFold<NumberFormat::fp16>(unit, scratch).run();
}

void attendUnitBf16(const AttendUnit& unit, AttendScratch& scratch) {
    UnitFold<NumberFormat::bf16>(unit, scratch).run();
}

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvgrid::cpu {

HWY_EXPORT(attendUnitFp16);
HWY_EXPORT(attendUnitBf16);

void attendUnit(const AttendUnit& unit, AttendScratch& scratch) {
    if (unit.params->pool.format == NumberFormat::fp16)
        HWY_DYNAMIC_DISPATCH(attendUnitFp16)(unit, scratch);
    else
        HWY_DYNAMIC_DISPATCH(attendUnitBf16)(unit, scratch);
}

}  // namespace kvgrid::cpu
#endif
