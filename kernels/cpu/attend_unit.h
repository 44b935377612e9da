// One unit of attend: a block of rows of a run, the query heads of one KV head, a subtree of lanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_state.h"
#include "kernels/ops.h"

namespace kvgrid::cpu {

inline constexpr int max_head_dim = 256;
// Query rows of a unit: rows of the step times query heads of a KV head.
inline constexpr int max_unit_rows = 128;
// Head dims are multiples of this.
inline constexpr int head_dim_unit = 16;

struct AttendUnit {
    const AttendParams* params = nullptr;
    const Run* run = nullptr;
    std::int64_t first_row = 0;  // within the run
    int rows = 0;                // rows x query heads of a KV head <= max_unit_rows
    int kv_head = 0;
    // Lanes first_lane, + lane_stride, ... below lane_count: one subtree of the fold.
    int first_lane = 0;
    int lane_stride = 1;
    // Where the states go: row r, query head h of the KV head at out + (r * query_heads + h) *
    // head_dim and lse + r * query_heads + h.
    float* out = nullptr;
    float* lse = nullptr;
};

// The tokens of a stripe that some row of the unit sees and whose blocks exist.
struct StripeTokens {
    std::int64_t stripe;
    int count;
    const std::byte* keys[stripe_tokens];  // K rows
    std::int16_t offsets[stripe_tokens];   // positions in the stripe
    // Their scales, where the format has them: those of a block's tokens lie side by side.
    struct ScaleRun {
        const std::byte* keys;
        int count;
    };
    int scale_runs;
    ScaleRun scales[stripe_tokens];
};

// The tokens of StripeTokens that a query row sees.
struct Seen {
    int begin;
    int end;
};

// Where one thread works. Query rows lie in order of row, then head.
struct alignas(64) AttendScratch {
    static constexpr int rows_at_once = 16;  // rows whose scores are held at a time
    static constexpr int padding = 16;       // what a tile or vector may run over an end
    static constexpr int most_ahead = 128;   // rows that are fetched before they are used
    static constexpr int fold_levels = 46;   // lanes 2^6, stripes of a lane below 2^40
    static constexpr int score_stride = stripe_tokens + padding;

    float q[2 * (max_unit_rows + padding) * max_head_dim];  // as Lanes::stage has it: up to twice
    float scores[rows_at_once * score_stride];
    float sums[rows_at_once * max_head_dim];
    StripeTokens tokens[2];  // of the stripe in work and the next
    // K rows of the stripe in work, its V rows, then the first K rows of the next.
    const std::byte* rows[2 * stripe_tokens + most_ahead + padding];
    std::uint16_t scale_bits[2 * stripe_tokens];  // of K, then of V
    float scales[2 * score_stride];               // likewise, of V from score_stride on
    Seen seen[max_unit_rows];                     // by query row
    float lse[(fold_levels + 1) * max_unit_rows];
    float out[(fold_levels + 1) * max_unit_rows * max_head_dim];
};

void attendUnit(const AttendUnit& unit, AttendScratch& scratch);

}  // namespace kvgrid::cpu
