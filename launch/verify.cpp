// kvgrid verify: decodes with data from a seed and checks every part of the way. See
// docs/verify.md.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <fmt/format.h>

#include "launch/commands.h"
#include "launch/decode_options.h"
#include "launch/decode_report.h"
#include "launch/decode_run.h"
#include "launch/destination.h"
#include "launch/planted_fault.h"
#include "launch/progress.h"
#include "launch/ranks.h"
#include "launch/report.h"
#include "launch/verify_run.h"

namespace kvgrid::launch {

namespace {

std::string scientific(const Cell& cell) {
    const auto* value = std::get_if<double>(&cell);
    return value != nullptr ? fmt::format("{:.2e}", *value) : plain(cell);
}

std::string hexadecimal(std::uint64_t digest) {
    return fmt::format("{:016x}", digest);
}

std::vector<Column> columns(NumberFormat kv_format) {
    std::vector<Column> all{{"context_tokens", "context", "tokens"},
                            {"vectors", "vectors", ""},
                            {"vectors_checked", "checked", ""},
                            {"max_rel_error", "max error", "relative", scientific},
                            {"stored_wrong", "stored", "wrong"},
                            {"replayed", "replayed", "outputs"},
                            {"replayed_different", "different", ""},
                            {"offloaded_blocks", "offloaded", "blocks"},
                            {"distinct_offloaded_blocks", "distinct", "blocks"},
                            {"restored_blocks", "restored", "blocks"},
                            {"output_digest", "digest", "", plain, 16}};
    if (hasScales(kv_format))
        all.push_back({"unquantised_rel_error", "unquantised", "max error", scientific});
    return all;
}

CommandLine commandLine(DecodeOptions& options) {
    CommandLine line("verify", "runs distributed decode and checks every value");
    line.value("context", "L[,L]", "tokens of each sequence at the last step (4K)",
               sizesInto(options.contexts, 1));
    declareDecodeFlags(line, options, "of the offload phase (a quarter of what the run needs)",
                       "of the offload phase (what the run needs)");
    line.note(
            "Decodes all sequences together, a token of each a step, and holds the outputs "
            "against\n"
            "attention in fp64 from the seed. Then decodes the same tokens again, a sequence at a\n"
            "time, in a device pool too small for all of them: every bit must come back.\n"
            "The digest depends on model, layers, context, batch, steps, warm-up, seed, KV format\n"
            "and KV scales; not on ranks, block size, layout or threads.")
        .example("mpirun -n 4 kvgrid verify")
        .example("mpirun -n 8 kvgrid verify --model llama-3.1-8b --layers 2 --context 4K,40000")
        .example("kvgrid verify --batch 16 --block-size 16 --device-blocks 1024 --layers 1",
                 "offload under pressure");
    return line;
}

// What all ranks found in one context. The ranks' vectors and errors are their own heads'.
struct Findings {
    std::int64_t context = 0;
    std::int64_t vectors = 0;
    std::int64_t checked = 0;
    double max_rel_error = 0;
    double unquantised_rel_error = 0;
    std::int64_t stored_wrong = 0;
    std::uint64_t digest = 0;
    std::uint64_t first_sequence_digest = 0;
    DecodedInTurns in_turns;
};

Findings combine(Process& process, std::int64_t context, const DecodedTogether& together,
                 const DecodedInTurns& in_turns) {
    Findings all{.context = context,
                 .digest = together.digest,
                 .first_sequence_digest = together.first_sequence_digest,
                 .in_turns = in_turns};
    all.in_turns.different = 0;
    const double mine[] = {static_cast<double>(together.vectors),
                           static_cast<double>(together.found.checked),
                           together.found.max_rel_error,
                           static_cast<double>(together.stored_wrong),
                           static_cast<double>(in_turns.different),
                           together.found.unquantised_rel_error};
    for (const std::vector<double>& rank : gatherValues(process, mine)) {
        all.vectors += static_cast<std::int64_t>(rank[0]);
        all.checked += static_cast<std::int64_t>(rank[1]);
        all.max_rel_error = std::max(all.max_rel_error, rank[2]);
        all.stored_wrong += static_cast<std::int64_t>(rank[3]);
        all.in_turns.different =
            std::max(all.in_turns.different, static_cast<std::int64_t>(rank[4]));
        all.unquantised_rel_error = std::max(all.unquantised_rel_error, rank[5]);
    }
    return all;
}

// Why the run is wrong; empty when it is right. The same on every rank.
std::string wrongness(Process& process, const std::vector<Findings>& findings, double bound,
                      const std::string& digest) {
    for (const Findings& found : findings) {
        const std::string where = fmt::format("context {}: ", found.context);
        if (!(found.max_rel_error <= bound)) {
            return where +
                   fmt::format("max_rel_error {:.2e} is beyond {:.0e}", found.max_rel_error, bound);
        }
        if (found.stored_wrong > 0) {
            return where + fmt::format("{} stored elements of K and V are not what was appended",
                                       found.stored_wrong);
        }
        if (found.in_turns.different > 0) {
            return where + fmt::format("{} of {} outputs changed in turns with offload",
                                       found.in_turns.different, found.in_turns.compared);
        }
    }
    const std::vector<std::string> digests = process.allGather(digest);
    for (std::size_t rank = 1; rank < digests.size(); ++rank) {
        if (digests[rank] != digests.front()) {
            return fmt::format("rank {} has other gathered outputs than rank 0 (digest {}, not {})",
                               rank, digests[rank], digests.front());
        }
    }
    return "";
}

struct Run {
    int argc;
    char** argv;
    const DecodeOptions& options;
    Process& process;
};

Result<Outcome> conclude(const Run& run, const Destination& destination, Report& report,
                         const std::vector<Findings>& findings, const Digest& overall,
                         NumberFormat output_format) {
    double max_rel_error = 0;
    for (const Findings& found : findings) {
        max_rel_error = std::max(max_rel_error, found.max_rel_error);
        report.note(fmt::format("context {}: the outputs of sequence 0 digest to {}", found.context,
                                hexadecimal(found.first_sequence_digest)));
        Row row{found.context,
                found.vectors,
                found.checked,
                found.max_rel_error,
                found.stored_wrong,
                found.in_turns.compared,
                found.in_turns.different,
                found.in_turns.stats.offloaded_blocks,
                found.in_turns.stats.distinct_offloaded_blocks,
                found.in_turns.stats.restored_blocks,
                hexadecimal(found.digest)};
        if (hasScales(run.options.kv_format)) row.emplace_back(found.unquantised_rel_error);
        report.row(std::move(row));
    }
    std::string digest = hexadecimal(overall.value());
    if (isPlanted("digest") && run.process.rank() + 1 == run.process.size()) digest.back() ^= 1;
    const double bound = errorBound(output_format);
    const std::string wrong = wrongness(run.process, findings, bound, digest);
    report.result("max_rel_error", max_rel_error);
    report.result("max_rel_error_bound", bound);
    report.result("output_digest", digest);
    report.result("ok", wrong.empty());

    Result<void> written;
    if (run.process.rank() == 0) {
        fmt::print(destination.text(), "{}max_rel_error: {:.3e}\noutput_digest: {}\n",
                   report.table(), max_rel_error, digest);
        written = destination.write(report);
    }
    if (auto agreed = agree(run.process, written); !agreed) return tl::unexpected(agreed.error());
    return Outcome{.code = wrong.empty() ? 0 : 1, .reason = wrong};
}

Result<Outcome> verify(const Run& run) {
    auto destination = openDestination(run.process, run.options.json, run.options.csv);
    if (!destination) return tl::unexpected(destination.error());
    const auto setup = prepareDecode(run.options, run.process);
    const Result<void> prepared = setup.map([](const DecodeSetup&) {});
    if (auto agreed = agree(run.process, prepared); !agreed) return tl::unexpected(agreed.error());

    Progress progress(run.process.rank() == 0 &&
                      (run.options.progress || isatty(STDERR_FILENO) == 1));
    VerifyRun verify_run(run.process, run.options, *setup, progress);
    for (const Batch& batch : setup->batches) {
        if (auto fits = verify_run.checkPools(batch); !fits) return tl::unexpected(fits.error());
    }
    Digest overall;
    std::vector<DecodedTogether> together;
    {
        auto decode = DecodeRun::create(run.process, setup->config, run.options.seed, setup->graph);
        if (!decode) return tl::unexpected(decode.error());
        for (const Batch& batch : setup->batches) {
            auto decoded = verify_run.decodeTogether(*decode, batch, overall);
            if (!decoded) return tl::unexpected(decoded.error());
            together.push_back(std::move(*decoded));
        }
    }
    std::vector<Findings> findings;
    for (std::size_t i = 0; i < together.size(); ++i) {
        const Batch& batch = setup->batches[i];
        const auto in_turns = verify_run.decodeInTurns(batch, together[i]);
        if (!in_turns) return tl::unexpected(in_turns.error());
        findings.push_back(combine(run.process, batch.context, together[i], *in_turns));
    }
    Report results("verify", commandArguments(run.argc, run.argv), columns(run.options.kv_format));
    describeRun(results, run.process, run.options, *setup);
    return conclude(run, *destination, results, findings, overall, setup->config.output_format);
}

}  // namespace

int runVerify(int argc, char** argv) {
    DecodeOptions options;
    const auto parsed = commandLine(options).parse(argc, argv);
    if (!parsed) return refuse(argc, argv, parsed.error());
    if (parsed->answer) return answer(*parsed->answer);
    return runOnRanks(argc, argv, processOptions(options), options.json == "-",
                      [&](Process& process) {
                          return verify({argc, argv, options, process});
                      });
}

}  // namespace kvgrid::launch
