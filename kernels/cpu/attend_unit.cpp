#include "kernels/cpu/attend_unit.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <kvgrid/error.h>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/merge_states.h"
#include "kernels/cpu/simd_targets.h"
#include "kernels/paging.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend_unit.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/cpu/stripe-inl.h"
#include "kernels/cpu/token_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvgrid::cpu::HWY_NAMESPACE {

// Folds the states of a unit. A fold* function leaves the states of its subtree in `slot` of the
// scratch and says whether there are any; a subtree without tokens leaves nothing, and its sibling
// passes up unchanged, as merging the empty state would have it. Lanes makes the scores.
template <NumberFormat format, class Lanes>
class UnitFold {
public:
    UnitFold(const AttendUnit& unit, AttendScratch& scratch)
        : unit_(unit),
          params_(*unit.params),
          pool_(params_.pool),
          scratch_(scratch),
          group_(params_.query_heads / params_.kv_heads),
          query_rows_(unit.rows * group_),
          ahead_(std::clamp(
              bytes_ahead / (params_.head_dim * static_cast<int>(bytesPerElement(format))), 1,
              AttendScratch::most_ahead)),
          first_position_(unit.run->first_position + unit.first_row),
          last_position_(first_position_ + unit.rows - 1),
          first_seen_(firstSeen(first_position_, params_.window)) {}

    void run() {
        scratch_.tokens[0].stripe = no_stripe;
        scratch_.tokens[1].stripe = no_stripe;
        stageQueries();
        const bool any = foldLanes(unit_.first_lane, unit_.lane_stride, 0);
        for (int r = 0; r < unit_.rows; ++r)
            store(r, any);
    }

private:
    static constexpr std::int64_t no_stripe = -1;
    // Enough for the memory's latency at its full rate, and a small part of the second-level cache.
    static constexpr int bytes_ahead = 16384;

    float* slotOut(int slot) const {
        return scratch_.out + static_cast<std::ptrdiff_t>(slot) * query_rows_ * params_.head_dim;
    }
    float* slotLse(int slot) const { return scratch_.lse + slot * max_unit_rows; }

    // Tiles as attendStripe cuts them, which gets rows_at_once rows at a time.
    void stageQueries() {
        static_assert(AttendScratch::rows_at_once % Lanes::most_rows == 0);
        for (int first = 0; first < query_rows_; first += Lanes::most_rows) {
            const int rows = std::min(Lanes::most_rows, query_rows_ - first);
            for (int r = 0; r < rows; ++r)
                Lanes::stage(query(first + r), params_.head_dim, rows, r, stagedQuery(first));
        }
    }

    const float* query(int query_row) const {
        const std::int64_t row = unit_.run->first_row + unit_.first_row + query_row / group_;
        const std::int64_t head = unit_.kv_head * group_ + query_row % group_;
        return params_.q + (row * params_.query_heads + head) * params_.head_dim;
    }

    // Of a tile that begins with this query row.
    float* stagedQuery(int query_row) const {
        return scratch_.q +
               static_cast<std::ptrdiff_t>(query_row) * Lanes::staged_factor * params_.head_dim;
    }

    // Lanes lane, lane + stride, ...
    bool foldLanes(int lane, int stride, int slot) {
        if (stride == lane_count) {
            const std::int64_t last_stripe = last_position_ / stripe_tokens;
            if (firstStripeOf(lane) > last_stripe) return false;
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
        const std::int64_t last = stripe + ((std::int64_t{1} << level) - 1) * lane_count;
        if (stripe * stripe_tokens > last_position_ || last < firstStripeOf(lane)) return false;
        if (level == 0) return leaf(stripe, slot);
        const std::int64_t half = std::int64_t{1} << (level - 1);
        const bool left = foldStripes(lane, first, level - 1, slot);
        const bool right = foldStripes(lane, first + half, level - 1, left ? slot + 1 : slot);
        return join(left, right, slot);
    }

    // The lane's first stripe that is not wholly behind the window of every row.
    std::int64_t firstStripeOf(int lane) const {
        const std::int64_t behind = std::max<std::int64_t>(0, first_seen_ / stripe_tokens - lane);
        return (behind + lane_count - 1) / lane_count * lane_count + lane;
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
            const MergeWeights weights = mergeWeights(left_lse[r], right_lse[r]);
            mergeOuts(weights, left + at, right + at, params_.head_dim);
            left_lse[r] = weights.lse;
        }
    }

    bool leaf(std::int64_t stripe, int slot) {
        const StripeTokens& tokens = takeTokens(stripe);
        if (tokens.count == 0) return false;
        findSeen(tokens);
        Stripe view{.rows = scratch_.rows,
                    .tokens = tokens.count,
                    .head_dim = params_.head_dim,
                    .scale = params_.scale * Lanes::unit,
                    .softcap = params_.softcap,
                    .ahead = ahead_,
                    .key_scales = scratch_.scales,
                    .value_scales = scratch_.scales + AttendScratch::score_stride};
        for (int r = 0; r < query_rows_; r += AttendScratch::rows_at_once) {
            const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(r) * params_.head_dim;
            attendStripe<format, Lanes>(view, stagedQuery(r), scratch_.seen + r,
                                        std::min(AttendScratch::rows_at_once, query_rows_ - r),
                                        scratch_, slotOut(slot) + at, slotLse(slot) + r);
            view.ahead = 0;  // fetched already
        }
        return true;
    }

    // The stripe's tokens, their rows in scratch_.rows, with those of the next stripe behind.
    const StripeTokens& takeTokens(std::int64_t stripe) {
        StripeTokens* current = &scratch_.tokens[0];
        StripeTokens* next = &scratch_.tokens[1];
        if (next->stripe == stripe) std::swap(current, next);
        if (current->stripe != stripe) findTokens(stripe, *current);
        const std::int64_t next_stripe = stripeAfter(stripe);
        if (next_stripe != no_stripe)
            findTokens(next_stripe, *next);
        else
            next->count = 0;
        if (current->count > 0) {
            listRows(*current, *next);
            if constexpr (hasScales(format)) readScales(*current);
        }
        return *current;
    }

    void readScales(const StripeTokens& tokens) {
        std::uint16_t* bits = scratch_.scale_bits;
        for (const std::int64_t kind : {std::int64_t{0}, pool_.value_offset}) {
            for (int i = 0; i < tokens.scale_runs; ++i) {
                const StripeTokens::ScaleRun& run = tokens.scales[i];
                std::memcpy(bits, run.keys + kind,
                            static_cast<std::size_t>(run.count) * sizeof(*bits));
                bits += run.count;
            }
        }
        toFloats(NumberFormat::fp16, scratch_.scale_bits, tokens.count, scratch_.scales);
        toFloats(NumberFormat::fp16, scratch_.scale_bits + tokens.count, tokens.count,
                 scratch_.scales + AttendScratch::score_stride);
    }

    void listRows(const StripeTokens& current, const StripeTokens& next) {
        const std::byte** row = std::copy_n(current.keys, current.count, scratch_.rows);
        for (int t = 0; t < current.count; ++t)
            *row++ = current.keys[t] + pool_.value_offset;
        constexpr int behind = AttendScratch::most_ahead + AttendScratch::padding;
        const int known = std::min(behind, next.count);
        row = std::copy_n(next.keys, known, row);
        std::fill_n(row, behind - known, row[-1]);
    }

    // Lists the stripe's tokens that some row sees and whose blocks exist.
    void findTokens(std::int64_t stripe, StripeTokens& tokens) const {
        const std::int64_t begin = stripe * stripe_tokens;
        const std::int64_t end = std::min(begin + stripe_tokens, last_position_ + 1);
        int count = 0;
        tokens.scale_runs = 0;
        for (std::int64_t position = std::max(begin, first_seen_); position < end;) {
            const std::int64_t logical = position / pool_.block_size;
            const std::int64_t within = position - logical * pool_.block_size;
            const std::int64_t next = std::min(end, position - within + pool_.block_size);
            const std::int64_t block =
                findBlock(params_.tables, unit_.run->slot, logical, pool_.max_num_blocks);
            if (block != no_block) {
                if constexpr (hasScales(format))
                    addScales(tokens, block, within, static_cast<int>(next - position));
                const std::byte* key = keyRow(pool_, params_.layer, block, unit_.kv_head, within);
                for (std::int64_t p = position; p < next; ++p, key += pool_.token_stride) {
                    tokens.keys[count] = key;
                    tokens.offsets[count] = static_cast<std::int16_t>(p - begin);
                    ++count;
                }
            }
            position = next;
        }
        tokens.stripe = stripe;
        tokens.count = count;
    }

    // Lists the scales of tokens within a block, and asks for their lines: they are few, and read
    // when the stripe's turn comes.
    void addScales(StripeTokens& tokens, std::int64_t block, std::int64_t within, int count) const {
        const std::byte* const keys = keyScale(pool_, params_.layer, block, unit_.kv_head, within);
        tokens.scales[tokens.scale_runs++] = {keys, count};
        constexpr int line_bytes = 64;
        for (int at = 0; at < 2 * count; at += line_bytes) {
            __builtin_prefetch(keys + at);
            __builtin_prefetch(keys + pool_.value_offset + at);
        }
    }

    // The stripe whose leaf comes after this one's, or no_stripe.
    std::int64_t stripeAfter(std::int64_t stripe) const {
        const std::int64_t last_stripe = last_position_ / stripe_tokens;
        if (stripe + lane_count <= last_stripe) return stripe + lane_count;
        // Lanes come in the order of their reversed bits: count up from the highest bit.
        int lane = static_cast<int>(stripe % lane_count);
        do {
            int bit = lane_count / 2;
            for (; bit >= unit_.lane_stride && (lane & bit) != 0; bit /= 2)
                lane ^= bit;
            if (bit < unit_.lane_stride) return no_stripe;
            lane |= bit;
        } while (firstStripeOf(lane) > last_stripe);
        return firstStripeOf(lane);
    }

    // Which of the stripe's tokens each query row sees.
    void findSeen(const StripeTokens& tokens) {
        const std::int16_t* const begin = tokens.offsets;
        const std::int16_t* const end = begin + tokens.count;
        const std::int64_t stripe_begin = tokens.stripe * stripe_tokens;
        for (int r = 0; r < unit_.rows; ++r) {
            const std::int64_t position = first_position_ + r;
            const std::int64_t first = firstSeen(position, params_.window);
            const Seen seen{.begin = static_cast<int>(
                                std::lower_bound(begin, end, first - stripe_begin) - begin),
                            .end = static_cast<int>(
                                std::upper_bound(begin, end, position - stripe_begin) - begin)};
            std::fill_n(scratch_.seen + r * group_, group_, seen);
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
    int ahead_;
    std::int64_t first_position_;
    std::int64_t last_position_;
    std::int64_t first_seen_;  // by the first row
};

// By the GQA group alone, which is the layer's in every step and on every rank, as ranks own whole
// groups: what a row gets depends neither on the rows beside it nor on the grid.
template <NumberFormat format>
void attendUnitOf(const AttendUnit& unit, AttendScratch& scratch) {
#if HWY_CAP_GE512
    if constexpr (has_token_lanes<format>) {
        if (unit.params->query_heads / unit.params->kv_heads >= token_lanes_group)
            return UnitFold<format, TokenLanes<format>>(unit, scratch).run();
    }
#endif
    UnitFold<format, HeadDimLanes<format>>(unit, scratch).run();
}

void attendUnitFp16(const AttendUnit& unit, AttendScratch& scratch) {
    attendUnitOf<NumberFormat::fp16>(unit, scratch);
}

void attendUnitBf16(const AttendUnit& unit, AttendScratch& scratch) {
    attendUnitOf<NumberFormat::bf16>(unit, scratch);
}

void attendUnitE4m3(const AttendUnit& unit, AttendScratch& scratch) {
    attendUnitOf<NumberFormat::fp8_e4m3>(unit, scratch);
}

void attendUnitInt8(const AttendUnit& unit, AttendScratch& scratch) {
    attendUnitOf<NumberFormat::int8>(unit, scratch);
}

}  // namespace kvgrid::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvgrid::cpu {

HWY_EXPORT(attendUnitFp16);
HWY_EXPORT(attendUnitBf16);
HWY_EXPORT(attendUnitE4m3);
HWY_EXPORT(attendUnitInt8);

void attendUnit(const AttendUnit& unit, AttendScratch& scratch) {
    switch (unit.params->pool.format) {
    case NumberFormat::fp16:
        return HWY_DYNAMIC_DISPATCH(attendUnitFp16)(unit, scratch);
    case NumberFormat::bf16:
        return HWY_DYNAMIC_DISPATCH(attendUnitBf16)(unit, scratch);
    case NumberFormat::fp8_e4m3:
        return HWY_DYNAMIC_DISPATCH(attendUnitE4m3)(unit, scratch);
    case NumberFormat::int8:
        return HWY_DYNAMIC_DISPATCH(attendUnitInt8)(unit, scratch);
    case NumberFormat::fp32:
        break;
    }
    throw Error(ErrorCode::internal, "attend: fp32 K and V are not stored");
}

}  // namespace kvgrid::cpu
#endif
