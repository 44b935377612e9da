#include "launch/verify_run.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "launch/planted_fault.h"
#include "launch/ranks.h"

namespace kvgrid::launch {

namespace {

// Multiplications and additions that the oracle does over all ranks before it turns to a sample.
constexpr double most_oracle_work = 1e10;

std::uint64_t digestOf(std::span<const float> values) {
    return XXH3_64bits(values.data(), values.size_bytes());
}

// Which sequence runs, with what must be asked before: the one that ran is paused, so that its
// blocks are cold.
class Turns {
public:
    explicit Turns(const DecodeRun& run) : run_(&run) {}

    Requests next(std::size_t sequence) {
        Requests requests;
        if (running_ == sequence) return requests;
        if (running_) {
            requests.pause(run_->id(*running_));
            paused_.resize(std::max(paused_.size(), *running_ + 1));
            paused_[*running_] = true;
        }
        if (sequence < paused_.size() && paused_[sequence]) {
            requests.resume(run_->id(sequence));
            paused_[sequence] = false;
        }
        running_ = sequence;
        return requests;
    }

private:
    const DecodeRun* run_;
    std::optional<std::size_t> running_;
    std::vector<bool> paused_;
};

}  // namespace

Digest::Digest() : state_(XXH3_createState()) {
    XXH3_64bits_reset(state_.get());
}

void Digest::update(std::span<const float> values) {
    XXH3_64bits_update(state_.get(), values.data(), values.size_bytes());
}

std::uint64_t Digest::value() const {
    return XXH3_64bits_digest(state_.get());
}

VerifyRun::VerifyRun(Process& process, const DecodeOptions& options, const DecodeSetup& setup,
                     Progress& progress)
    : process_(process),
      options_(options),
      setup_(setup),
      progress_(progress),
      reference_(setup.config, options.seed),
      row_size_(static_cast<std::size_t>(setup.queryHeads()) *
                static_cast<std::size_t>(setup.headDim())) {}

Result<void> VerifyRun::fill(DecodeRun& run, const Batch& batch) {
    progress_.begin(fmt::format("context {}: filling", batch.context));
    const std::int64_t filled = batch.context - setup_.decoded;
    for (std::size_t sequence = 0; sequence < batch.lengths.size(); ++sequence) {
        const auto filling = [&](std::int64_t tokens) {
            progress_.update(fmt::format("context {}: sequence {} of {} has {} tokens",
                                         batch.context, sequence + 1, batch.lengths.size(),
                                         tokens));
        };
        auto done = run.addSequence(static_cast<std::int64_t>(sequence), batch.context);
        if (done) done = run.fill(sequence, filled, {}, filling);
        if (!done) return done;
    }
    return {};
}

Result<DecodedTogether> VerifyRun::decodeTogether(DecodeRun& run, const Batch& batch,
                                                  Digest& overall) {
    if (auto filled = fill(run, batch); !filled) return tl::unexpected(filled.error());
    std::vector<RunTokens> runs;
    for (std::size_t sequence = 0; sequence < batch.lengths.size(); ++sequence)
        runs.push_back({.sequence = sequence});

    SpotCheck spot_check(reference_, unitsToCheck(run.heads(), batch), options_.steps);
    DecodedTogether together;
    Digest digest;
    Digest first_sequence;
    for (int token = 0; token < setup_.decoded; ++token) {
        const auto on_output = [&](const Step&, int layer, std::span<const float> out) {
            for (std::size_t row = 0; row < runs.size(); ++row)
                together.outputs.push_back(digestOf(out.subspan(row * row_size_, row_size_)));
            if (token < options_.warmup) return;
            overall.update(out);
            digest.update(out);
            first_sequence.update(out.first(row_size_));
            spot_check.take(layer, token - options_.warmup, out);
        };
        const StepOptions step_options{.append_twice = token % 2 == 1, .poison = true};
        if (auto done = run.step(runs, step_options, on_output); !done)
            return tl::unexpected(done.error());
        progress_.update(
            fmt::format("context {}: {} of {} steps", batch.context, token + 1, setup_.decoded));
    }
    together.digest = digest.value();
    together.first_sequence_digest = first_sequence.value();
    together.vectors = std::int64_t{setup_.config.geometry.layers} * options_.batch *
                       run.heads().query_heads * options_.steps;
    const auto compared = [&](std::size_t units) {
        process_.barrier();
        progress_.update(fmt::format("context {}: the oracle computed {} of {} KV heads",
                                     batch.context, units, spot_check.units().size()));
    };
    together.found = spot_check.compare(batch.lengths, errorBound(setup_.config.output_format),
                                        process_.threads(), compared);
    together.stored_wrong = compareStored(run, batch.context, spot_check.units());
    run.releaseSequences();
    return together;
}

std::vector<Unit> VerifyRun::unitsToCheck(const CacheHeads& heads, const Batch& batch) const {
    const double work = 2.0 * setup_.headDim() * reference_.groupSize() * options_.steps *
                        static_cast<double>(batch.context);
    const double affordable = most_oracle_work / process_.size() / work;
    const auto count = static_cast<std::int64_t>(std::max(1.0, affordable));
    return pickUnits(setup_.config.geometry.layers, options_.batch,
                     {.first = heads.first_kv_head, .count = heads.kv_heads}, count, options_.seed);
}

std::int64_t VerifyRun::compareStored(DecodeRun& run, std::int64_t tokens,
                                      std::span<const Unit> units) const {
    run.settle();
    const int heads = run.heads().kv_heads;
    std::int64_t wrong = 0;
    // The layers of both may be of different groups.
    for (const Unit& unit : {units.front(), units.back()}) {
        const DecodeRun::KeysValues stored =
            run.stored(static_cast<std::size_t>(unit.key), unit.layer);
        // Zeros where the window has left.
        const std::int64_t first = reference_.firstSeen(unit.layer, tokens);
        Reference::KeysValues expected = reference_.keysValues(unit, first, tokens);
        const auto left = static_cast<std::size_t>(first * reference_.headDim());
        expected.k.insert(expected.k.begin(), left, 0.0);
        expected.v.insert(expected.v.begin(), left, 0.0);
        const int head = unit.kv_head - run.heads().first_kv_head;
        wrong += reference_.countDifferences(stored.k, heads, head, expected.k);
        wrong += reference_.countDifferences(stored.v, heads, head, expected.v);
    }
    return wrong;
}

Result<void> VerifyRun::checkPools(const Batch& batch) const {
    const CacheConfig config = pressedConfig(batch);
    const std::int64_t sequence = setup_.blocksOf(batch.context);
    if (const std::int64_t missing = sequence - config.device_blocks; missing > 0) {
        return failure(ErrorCode::does_not_fit,
                       fmt::format("--device-blocks {}: a sequence of {} tokens needs {}, {} {} "
                                   "missing",
                                   config.device_blocks, batch.context, sequence, missing,
                                   missing == 1 ? "is" : "are"));
    }
    const std::int64_t rest = sequence * config.max_sequences - config.device_blocks;
    if (const std::int64_t missing = rest - config.host_blocks; missing > 0) {
        return failure(ErrorCode::does_not_fit,
                       fmt::format("--host-blocks {}: {} do not fit the device pool, {} {} missing",
                                   config.host_blocks, rest, missing, missing == 1 ? "is" : "are"));
    }
    return {};
}

CacheConfig VerifyRun::pressedConfig(const Batch& batch) const {
    CacheConfig config = setup_.config;
    // A sequence alone has nobody to make room for.
    config.max_sequences = std::max(2, options_.batch);
    const std::int64_t sequence = setup_.blocksOf(batch.context);
    const std::int64_t working_set = sequence * config.max_sequences;
    config.device_blocks =
        options_.device_blocks.value_or(std::max(sequence, (working_set + 3) / 4));
    config.host_blocks = options_.host_blocks.value_or(working_set);
    return config;
}

Result<DecodedInTurns> VerifyRun::decodeInTurns(const Batch& batch,
                                                const DecodedTogether& together) {
    const CacheConfig config = pressedConfig(batch);
    auto run = DecodeRun::create(process_, config, options_.seed, setup_.graph);
    if (!run) return tl::unexpected(run.error());
    if (isPlanted("replay")) run->plantFault();
    progress_.begin(fmt::format("context {}: again in turns, {} of {} device blocks", batch.context,
                                config.device_blocks,
                                config.max_sequences * setup_.blocksOf(batch.context)));

    const auto sequences = static_cast<std::size_t>(config.max_sequences);
    const std::int64_t filled = batch.context - setup_.decoded;
    Turns turns(*run);
    for (std::size_t sequence = 0; sequence < sequences; ++sequence) {
        auto done = run->addSequence(static_cast<std::int64_t>(sequence), batch.context);
        if (done && filled > 0)
            done = run->fill(sequence, filled, {.before = turns.next(sequence)});
        if (!done) return tl::unexpected(done.error());
        progress_.update(fmt::format("context {}: filled {} of {} sequences between offloads",
                                     batch.context, sequence + 1, sequences));
    }

    DecodedInTurns result;
    for (int round = 0; run->length(sequences - 1) < batch.context; ++round) {
        for (std::size_t sequence = 0; sequence < sequences; ++sequence) {
            const std::int64_t left = batch.context - run->length(sequence);
            for (Turn turn : turnsOf(round, left)) {
                turn.run.sequence = sequence;
                turn.options.before = turns.next(sequence);
                if (auto done = replay(*run, turn, filled, together, result); !done)
                    return tl::unexpected(done.error());
            }
        }
        progress_.update(
            fmt::format("context {}: round {} between offloads", batch.context, round + 1));
    }
    result.stats = run->cache().stats();
    return result;
}

std::vector<VerifyRun::Turn> VerifyRun::turnsOf(int round, std::int64_t left) {
    const std::int64_t several = std::min<std::int64_t>(3, left);
    switch (round % 3) {
    case 0:
        return {{}};
    case 1:
        return {{.run = {.tokens = several, .drafted = several - 1}}};
    default:
        return {{.run = {.tokens = several}, .options = {.abandon = true}},
                {.run = {.tokens = several}, .options = {.append_twice = true}}};
    }
}

Result<void> VerifyRun::replay(DecodeRun& run, const Turn& turn, std::int64_t filled,
                               const DecodedTogether& together, DecodedInTurns& result) const {
    const std::size_t sequence = turn.run.sequence;
    const std::int64_t first = run.length(sequence) - filled;
    const auto compare = [&](const Step&, int layer, std::span<const float> out) {
        // The sequence that is there only to make room for was not decoded before.
        if (sequence >= static_cast<std::size_t>(options_.batch)) return;
        for (std::int64_t token = 0; token < turn.run.tokens - turn.run.drafted; ++token) {
            const std::int64_t output =
                ((first + token) * setup_.config.geometry.layers + layer) * options_.batch;
            const auto row = out.subspan(static_cast<std::size_t>(token) * row_size_, row_size_);
            ++result.compared;
            if (digestOf(row) != together.outputs[static_cast<std::size_t>(output) + sequence])
                ++result.different;
        }
    };
    StepOptions options = turn.options;
    options.poison = true;
    return run.step({&turn.run, 1}, options, compare).map([](const StepTimes&) {});
}

}  // namespace kvgrid::launch
