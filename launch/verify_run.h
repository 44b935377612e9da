// The two decodes that `kvgrid verify` compares, and their checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <xxhash.h>

#include <kvgrid/cache.h>
#include <kvgrid/error.h>
#include <kvgrid/process.h>

#include "launch/decode_options.h"
#include "launch/decode_run.h"
#include "launch/progress.h"
#include "launch/reference.h"
#include "launch/spot_check.h"

namespace kvgrid::launch {

// XXH3-64 of values in the order in which they come.
class Digest {
public:
    Digest();
    void update(std::span<const float> values);
    [[nodiscard]] std::uint64_t value() const;

private:
    struct Free {
        void operator()(XXH3_state_t* state) const noexcept { XXH3_freeState(state); }
    };
    std::unique_ptr<XXH3_state_t, Free> state_;
};

// All sequences together, one token of each a step; what this rank saw.
struct DecodedTogether {
    std::vector<std::uint64_t> outputs;       // [token][layer][sequence]: digest of all heads
    std::uint64_t digest = 0;                 // of the timed steps' outputs
    std::uint64_t first_sequence_digest = 0;  // of those of sequence 0
    std::int64_t vectors = 0;                 // outputs of one (step, layer, sequence, query head)
    SpotCheck::Found found;                   // among them, against the oracle
    std::int64_t stored_wrong = 0;  // elements of K and V that are not what the seed gives
};

// The same tokens again, a sequence at a time, between offloads and restores.
struct DecodedInTurns {
    std::int64_t compared = 0;   // outputs of one (token, layer, sequence)
    std::int64_t different = 0;  // of those, in any bit
    CacheStats stats;
};

class VerifyRun {
public:
    VerifyRun(Process& process, const DecodeOptions& options, const DecodeSetup& setup,
              Progress& progress);

    // Whether the pools of decodeInTurns would hold the batch. does_not_fit: by flag, with the
    // blocks that are missing. The same on every rank.
    [[nodiscard]] Result<void> checkPools(const Batch& batch) const;

    // Collective. Every output of `batch` goes into `overall` too.
    [[nodiscard]] Result<DecodedTogether> decodeTogether(DecodeRun& run, const Batch& batch,
                                                         Digest& overall);

    // Collective. In a cache of its own, which holds device_blocks of the working set (default a
    // quarter, but a sequence at least) and offloads the rest. Turns decode one token, or several
    // at once, some with drafted tokens that are dropped, some appended twice or abandoned first.
    [[nodiscard]] Result<DecodedInTurns> decodeInTurns(const Batch& batch,
                                                       const DecodedTogether& together);

private:
    struct Turn {
        RunTokens run = {};
        StepOptions options = {};
    };
    // What a sequence with `left` tokens to come does when it is its turn.
    [[nodiscard]] static std::vector<Turn> turnsOf(int round, std::int64_t left);

    [[nodiscard]] Result<void> fill(DecodeRun& run, const Batch& batch);
    [[nodiscard]] std::vector<Unit> unitsToCheck(const CacheHeads& heads, const Batch& batch) const;
    // Elements of K and V, of the first and the last unit, that the cache holds otherwise than
    // appended.
    [[nodiscard]] std::int64_t compareStored(DecodeRun& run, std::int64_t tokens,
                                             std::span<const Unit> units) const;
    [[nodiscard]] CacheConfig pressedConfig(const Batch& batch) const;
    [[nodiscard]] Result<void> replay(DecodeRun& run, const Turn& turn, std::int64_t filled,
                                      const DecodedTogether& together,
                                      DecodedInTurns& result) const;

    Process& process_;
    const DecodeOptions& options_;
    const DecodeSetup& setup_;
    Progress& progress_;
    Reference reference_;
    std::size_t row_size_;  // values of one token's output: all query heads
};

}  // namespace kvgrid::launch
