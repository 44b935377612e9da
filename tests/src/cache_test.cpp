// The whole path on 1, 2 and 4 ranks: the same calls on every rank, outputs held against the
// oracle, and the misuse that the public interface answers.
#include <kvgrid/cache.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include "launch/oracle.h"
#include "tests/src/cache_fixture.h"

namespace kvgrid {
namespace {

using testing::HasSubstr;

std::vector<double> expected(SequenceId sequence, std::int64_t position, int head,
                             const oracle::ScoreTerms& terms = {}) {
    const oracle::Rotary rotary{.dim = head_dim};
    const auto head_of = [&](int what, std::int64_t at, int which) {
        std::vector<float> values;
        for (int element = 0; element < head_dim; ++element) {
            values.push_back(valueAt(what, sequence, at, which, element));
        }
        if (what < 2) oracle::rotate(values, at, rotary);
        return values;
    };
    const int kv_head = head / (query_heads / kv_heads);
    std::vector<double> k, v;
    for (std::int64_t at = 0; at <= position; ++at) {
        for (const float x : head_of(1, at, kv_head))
            k.push_back(oracle::rounded(x, oracle::Format::bf16));
        for (const float x : head_of(2, at, kv_head))
            v.push_back(oracle::rounded(x, oracle::Format::bf16));
    }
    const std::vector<float> q = head_of(0, position, head);
    return oracle::attention(std::vector<double>(q.begin(), q.end()), k, v, 0.125, terms).out;
}

// Of a gathered row.
std::span<const float> outputOf(const std::vector<float>& out, std::size_t row, int head) {
    return std::span(out).subspan((row * query_heads + static_cast<std::size_t>(head)) * head_dim,
                                  head_dim);
}

TEST_F(CacheTest, EveryRankHasAllHeadsOfTheAnswer) {
    Cache cache = make(smallConfig());
    const SequenceId a = allocate(cache, 700);
    const SequenceId b = allocate(cache, 8);
    run(cache, Requests().run(a, 600), false);
    const std::vector<float> out = run(cache, Requests().run(b, 1).run(a, 2));  // b: a length of 1
    const std::pair<SequenceId, std::int64_t> rows[] = {{b, 0}, {a, 600}, {a, 601}};
    for (std::size_t row = 0; row < 3; ++row) {
        for (int head = 0; head < query_heads; ++head) {
            EXPECT_LE(oracle::relativeError(outputOf(out, row, head),
                                            expected(rows[row].first, rows[row].second, head)),
                      test::output_bound)
                << "row " << row << " head " << head;
        }
    }
    EXPECT_EQ(cache.length(a), 602);
}

TEST_F(CacheTest, ASoftcapBendsTheScores) {
    CacheConfig config = smallConfig();
    config.logit_softcap = 1.5;
    Cache cache = make(config);
    const SequenceId a = allocate(cache, 300);
    const std::vector<float> out = run(cache, Requests().run(a, 300));
    for (const std::size_t position : {0, 100, 299}) {
        for (int head = 0; head < query_heads; ++head) {
            const auto at = static_cast<std::int64_t>(position);
            EXPECT_LE(oracle::relativeError(outputOf(out, position, head),
                                            expected(a, at, head, {.softcap = 1.5})),
                      test::output_bound);
            if (position == 0) continue;
            EXPECT_GT(oracle::relativeError(outputOf(out, position, head), expected(a, at, head)),
                      10 * test::output_bound);
        }
    }
}

float sinkOf(int head) {
    return 0.75F * static_cast<float>(head);
}

std::vector<float> sinksOf(const CacheHeads& heads) {
    std::vector<float> logits;
    for (int head = 0; head < heads.query_heads; ++head)
        logits.push_back(sinkOf(heads.first_query_head + head));
    return logits;
}

CacheConfig sinkConfig() {
    CacheConfig config = smallConfig();
    config.attention_sinks = true;
    return config;
}

TEST_F(CacheTest, SinksJoinTheSoftmaxOfTheirHeads) {
    Cache cache = make(sinkConfig());
    ASSERT_TRUE(cache.setSinks(0, sinksOf(cache.heads())));
    const SequenceId a = allocate(cache, 301);
    const std::vector<float> out = run(cache, Requests().run(a, 300));
    for (const std::size_t position : {0, 7, 299}) {
        for (int head = 0; head < query_heads; ++head) {
            EXPECT_LE(oracle::relativeError(outputOf(out, position, head),
                                            expected(a, static_cast<std::int64_t>(position), head,
                                                     {.sink = sinkOf(head)})),
                      test::output_bound)
                << "position " << position << " head " << head;
        }
    }
    // Set again, they count from the next attend on; -inf is none, to the bit.
    Cache plain = make(smallConfig());
    ASSERT_EQ(allocate(plain, 301), a);
    run(plain, Requests().run(a, 300), false);
    ASSERT_TRUE(cache.setSinks(
        0, std::vector<float>(static_cast<std::size_t>(cache.heads().query_heads), -HUGE_VALF)));
    EXPECT_EQ(run(cache, Requests().run(a, 1)), run(plain, Requests().run(a, 1)));
}

TEST_F(CacheTest, ShardedOutputHasSinksToo) {
    Cache cache = make(sinkConfig());
    ASSERT_TRUE(cache.setSinks(0, sinksOf(cache.heads())));
    const SequenceId a = allocate(cache, 20);
    const Step step = cache.begin(Requests().run(a, 20)).value();
    ASSERT_TRUE(append(cache, step));
    const std::vector<float> mine = attend(cache, step, Output::sharded);
    const CacheHeads heads = cache.heads();
    for (int head = 0; head < heads.query_heads; ++head) {
        const auto at = static_cast<std::size_t>(19 * heads.query_heads + head) * head_dim;
        const int number = heads.first_query_head + head;
        EXPECT_LE(oracle::relativeError(std::span(mine).subspan(at, head_dim),
                                        expected(a, 19, number, {.sink = sinkOf(number)})),
                  test::output_bound);
    }
}

TEST_F(CacheTest, SinksAreRefusedByName) {
    Cache cache = make(sinkConfig());
    const std::vector<float> logits = sinksOf(cache.heads());
    const auto refused = [](const Result<void>& result, const std::string& why) {
        ASSERT_FALSE(result) << why;
        EXPECT_EQ(result.error().code, ErrorCode::invalid_argument);
        EXPECT_THAT(result.error().message, HasSubstr(why));
    };
    const SequenceId a = allocate(cache, 20);
    const Step step = cache.begin(Requests().run(a, 20)).value();
    ASSERT_TRUE(append(cache, step));
    const FloatsOnDevice out(*process, std::size_t{20} * query_heads * head_dim);
    refused(cache.attend(step, 0, out.data(), Output::gathered),
            "the sinks of layer 0 were never set");
    refused(cache.setSinks(1, logits), "layer 1 is not in [0, 1)");
    refused(cache.setSinks(-1, logits), "layer -1 is not in [0, 1)");
    refused(cache.setSinks(0, std::span(logits).first(logits.size() - 1)), "query heads");
    refused(cache.setSinks(0, {}), "0 logits for");
    for (const float wrong : {std::nanf(""), HUGE_VALF}) {
        std::vector<float> broken = logits;
        broken.back() = wrong;
        refused(cache.setSinks(0, broken), "logit " + std::to_string(logits.size() - 1) + " is");
    }
    refused(cache.attend(step, 0, out.data(), Output::gathered), "never set");
    EXPECT_TRUE(cache.setSinks(0, logits));
    EXPECT_TRUE(cache.attend(step, 0, out.data(), Output::gathered));
    Cache without = make(smallConfig());
    refused(without.setSinks(0, sinksOf(without.heads())), "without attention sinks");
}

TEST_F(CacheTest, ShardedOutputIsThisRanksPartOfTheGathered) {
    Cache cache = make(smallConfig());
    const SequenceId a = allocate(cache, 100);
    const Step step = cache.begin(Requests().run(a, 50)).value();
    ASSERT_TRUE(append(cache, step));
    const std::vector<float> all = attend(cache, step);
    const std::vector<float> mine = attend(cache, step, Output::sharded);
    const CacheHeads heads = cache.heads();
    const auto width = static_cast<std::size_t>(heads.query_heads) * head_dim;
    for (std::size_t row = 0; row < 50; ++row) {
        const auto at =
            (row * query_heads + static_cast<std::size_t>(heads.first_query_head)) * head_dim;
        EXPECT_TRUE(std::equal(mine.begin() + static_cast<std::ptrdiff_t>(row * width),
                               mine.begin() + static_cast<std::ptrdiff_t>((row + 1) * width),
                               all.begin() + static_cast<std::ptrdiff_t>(at)));
    }
}

// The working set is 64 sequences x 33 blocks; the device holds a quarter of it.
std::uint64_t digestOfTurns(Process& process, std::int64_t device_blocks, std::int64_t host_blocks,
                            CacheStats& stats) {
    CacheConfig config = smallConfig();
    config.device_blocks = device_blocks;
    config.host_blocks = host_blocks;
    config.max_sequences = 64;
    config.max_step_tokens = 8 * 512;
    Cache cache = Cache::create(process, config).value();
    std::vector<SequenceId> sequences;
    for (int i = 0; i < 64; ++i) {
        sequences.push_back(
            cache.begin(Requests().allocate(528)).value().answers().front().sequence);
    }
    XXH3_state_t* digest = XXH3_createState();
    XXH3_64bits_reset(digest);
    const auto turn = [&](int round, std::int64_t tokens, bool attended) {
        Requests requests;
        for (int i = 0; i < 8; ++i)
            requests.run(sequences[static_cast<std::size_t>((round % 8) * 8 + i)], tokens);
        const Step step = cache.begin(requests).value();
        for (const Answer& answer : step.answers())
            EXPECT_EQ(answer.status, Answer::Status::done) << answer.why;
        const CacheHeads heads = cache.heads();
        const FloatsOnDevice q(process, inputs(step, 0, heads.first_query_head, heads.query_heads));
        const FloatsOnDevice k(process, inputs(step, 1, heads.first_kv_head, heads.kv_heads));
        const FloatsOnDevice v(process, inputs(step, 2, heads.first_kv_head, heads.kv_heads));
        EXPECT_TRUE(cache.append(step, 0, q.data(), k.data(), v.data()));
        if (attended) {
            const FloatsOnDevice out(process, step.rows().size() * query_heads * head_dim);
            EXPECT_TRUE(cache.attend(step, 0, out.data(), Output::gathered));
            const std::vector<float> values = out.download();
            XXH3_64bits_update(digest, values.data(), values.size() * sizeof(float));
        }
        EXPECT_TRUE(cache.advance(step));
    };
    for (int round = 0; round < 8; ++round)
        turn(round, 512, false);
    for (int round = 0; round < 48; ++round)
        turn(round, 1, true);
    stats = cache.stats();
    const std::uint64_t value = XXH3_64bits_digest(digest);
    XXH3_freeState(digest);
    return value;
}

TEST_F(CacheTest, TenThousandEvictionsChangeNoBit) {
    CacheStats roomy, tight;
    const std::uint64_t reference = digestOfTurns(*process, 64 * 33, 0, roomy);
    EXPECT_EQ(digestOfTurns(*process, 64 * 33 / 4, 64 * 33, tight), reference);
    EXPECT_EQ(roomy.offloaded_blocks, 0);
    EXPECT_GE(tight.offloaded_blocks, 10'000);
    EXPECT_GE(tight.restored_blocks, 10'000);
    EXPECT_GE(tight.distinct_offloaded_blocks, 1'000);
    EXPECT_EQ(tight.groups.at(0).device_blocks, 64 * 33 / 4);
}

TEST_F(CacheTest, ThePoolIsTheLeastOverRanks) {
    CacheConfig config = smallConfig();
    config.device_blocks = 40 + 10 * process->rank();
    Cache cache = make(config);
    EXPECT_EQ(cache.config().device_blocks, 40);
    EXPECT_EQ(cache.stats().groups.at(0).device_blocks, 40);
    const SequenceId a = allocate(cache, 640);
    run(cache, Requests().run(a, 640), false);
    const SequenceId b = allocate(cache, 16);
    const Step step = cache.begin(Requests().run(b, 1)).value();
    EXPECT_EQ(step.answers().front().status, Answer::Status::wait);
    EXPECT_THAT(step.answers().front().why, HasSubstr("block"));
    EXPECT_TRUE(step.rows().empty());
}

TEST_F(CacheTest, MisuseIsAnsweredByName) {
    Cache cache = make(smallConfig());
    const SequenceId a = allocate(cache, 20);
    Step step = cache
                    .begin(Requests()
                               .run(SequenceId{999}, 1)
                               .release(SequenceId{998})
                               .run(a, 21)
                               .run(a, -1)
                               .allocate(-5)
                               .allocate(std::int64_t{1} << 40))
                    .value();
    ASSERT_EQ(step.answers().size(), 6U);
    for (const Answer& answer : step.answers()) {
        EXPECT_EQ(answer.status, Answer::Status::never);
        EXPECT_FALSE(answer.why.empty());
    }
    EXPECT_THAT(step.answers()[0].why, HasSubstr("999"));
    EXPECT_THAT(step.answers()[2].why, HasSubstr("20"));

    step = cache.begin(Requests().run(a, 20)).value();
    const std::vector<float> values(20 * query_heads * head_dim);
    EXPECT_THAT(cache.append(step, 0, values.data(), nullptr, values.data()).error().message,
                HasSubstr("k is null"));
    EXPECT_THAT(cache.append(step, 1, values.data(), values.data(), values.data()).error().message,
                HasSubstr("layer 1"));
    EXPECT_THAT(cache.attend(step, 0, nullptr, Output::gathered).error().message,
                HasSubstr("out is null"));
    EXPECT_THAT(cache.advance(step).error().message, HasSubstr("has appended 0"));
    ASSERT_TRUE(append(cache, step));
    ASSERT_TRUE(cache.advance(step));
    EXPECT_THAT(cache.advance(step).error().message, HasSubstr("advanced already"));
    EXPECT_FALSE(append(cache, step));

    const Step full = cache.begin(Requests().run(a, 1).release(a).release(a)).value();
    EXPECT_EQ(full.answers()[0].status, Answer::Status::never);  // append past max_length
    EXPECT_EQ(full.answers()[1].status, Answer::Status::done);
    EXPECT_EQ(full.answers()[2].status, Answer::Status::never);  // double release
    EXPECT_THAT(cache.append(step, 0, nullptr, values.data(), values.data()).error().message,
                HasSubstr("newest"));
    EXPECT_FALSE(cache.length(a));
    // On every rank alike, and nothing is lost: the right call still works.
    const std::int64_t one[] = {1};
    EXPECT_THAT(cache.advance(full, one).error().message, HasSubstr("accepted"));
    EXPECT_TRUE(cache.advance(full, {}));
}

TEST_F(CacheTest, AWindowNoShorterThanTheLongestSequenceCountsAsNone) {
    CacheConfig config = smallConfig();
    config.geometry.groups.front().window = config.max_sequence_length;
    Cache windowed = make(config);
    Cache plain = make(smallConfig());
    const SequenceId a = allocate(windowed, 100);
    ASSERT_EQ(allocate(plain, 100), a);
    EXPECT_EQ(run(windowed, Requests().run(a, 50)), run(plain, Requests().run(a, 50)));
}

TEST_F(CacheTest, ConfigurationsAreRefusedByNameOnEveryRank) {
    const auto refused = [&](auto change, const std::string& name) {
        CacheConfig config = smallConfig();
        change(config);
        const Result<Cache> cache = Cache::create(*process, config);
        ASSERT_FALSE(cache) << name;
        EXPECT_EQ(cache.error().code, ErrorCode::invalid_argument);
        EXPECT_THAT(cache.error().message, HasSubstr(name));
    };
    for (const int size : {0, 3, 512, -1}) {
        refused([size](CacheConfig& config) { config.block_size = size; },
                "block size " + std::to_string(size));
    }
    refused([](CacheConfig& config) { config.geometry = Geometry::uniform(1, 8, 4, 72); },
            "head dim 72");
    refused([](CacheConfig& config) { config.geometry = Geometry::uniform(1, 7, 4, 64); },
            "query heads 7");
    refused([](CacheConfig& config) { config.kv_format = NumberFormat::fp32; }, "KV format fp32");
    refused([](CacheConfig& config) { config.geometry.groups.front().window = -1; }, "window");
    refused([](CacheConfig& config) { config.max_sequences = -1; }, "max sequences");
    refused([](CacheConfig& config) { config.device_blocks = -1; }, "device blocks");
    refused([](CacheConfig& config) { config.grid = {.heads = 1, .context = process->size() + 1}; },
            "grid");
    if (process->size() > 1) {
        refused([](CacheConfig& config) { config.max_step_tokens += process->rank(); },
                "differs between ranks");
        refused([](CacheConfig& config) { config.logit_softcap = 30 + process->rank(); },
                "differs between ranks");
        refused([](CacheConfig& config) { config.attention_sinks = process->rank() == 1; },
                "differs between ranks");
        const double own = 1 + process->rank();
        const bool first = process->rank() == 0;
        for (const RotaryScaling& scaling : std::initializer_list<RotaryScaling>{
                 first ? RotaryScaling{} : LinearScaling{}, LinearScaling{.factor = own},
                 Llama3Scaling{.factor = own}, Llama3Scaling{.low_freq_factor = own / 8},
                 Llama3Scaling{.high_freq_factor = 4 * own},
                 Llama3Scaling{.original_max_position = own}, YarnScaling{.factor = own},
                 YarnScaling{.original_max_position = own}, YarnScaling{.beta_fast = 32 * own},
                 YarnScaling{.beta_slow = own / 8}, YarnScaling{.truncate = first},
                 YarnScaling{.attention_factor = own}}) {
            refused([&](CacheConfig& config) { config.rotary.scaling = scaling; },
                    "differs between ranks");
        }
        refused(
            [](CacheConfig& config) { config.geometry.groups[0].window = 64 + process->rank(); },
            "differs between ranks");
        refused([](CacheConfig& config) { config.block_size = process->rank() == 1 ? 3 : 16; },
                "rank 1");
        refused([](CacheConfig& config) { config.geometry = Geometry::uniform(1, 3, 1, 64); },
                "KV heads");
    }
}

TEST_F(CacheTest, ACacheThatDoesNotFitSaysSoOnEveryRank) {
    CacheConfig config = smallConfig();
    config.device_blocks = std::numeric_limits<std::int32_t>::max() - process->rank();
    const Result<Cache> cache = Cache::create(*process, config);
    ASSERT_FALSE(cache);
    EXPECT_EQ(cache.error().code, ErrorCode::does_not_fit);
    EXPECT_THAT(cache.error().message, HasSubstr("bytes are missing"));
}

TEST_F(CacheTest, AcceptedTokensOfRankZeroCountEverywhere) {
    Cache plain = make(smallConfig());
    Cache speculative = make(smallConfig());
    const SequenceId a = allocate(plain, 100);
    ASSERT_EQ(allocate(speculative, 100), a);
    run(plain, Requests().run(a, 53), false);
    run(speculative, Requests().run(a, 50), false);
    const Step draft = speculative.begin(Requests().run(a, 6)).value();
    ASSERT_TRUE(append(speculative, draft));
    const std::int64_t accepted[] = {process->rank() == 0 ? 3 : 5};
    ASSERT_TRUE(speculative.advance(draft, accepted));
    const std::vector<float> reference = run(plain, Requests().run(a, 1));
    EXPECT_EQ(run(speculative, Requests().run(a, 1)), reference);
    EXPECT_EQ(speculative.length(a), 54);
}

TEST_F(CacheTest, PausedSequencesMakeRoomAndComeBack) {
    CacheConfig config = smallConfig();
    config.device_blocks = 20;
    config.host_blocks = 20;
    Cache cache = make(config);
    Cache roomy = make(smallConfig());
    const SequenceId a = allocate(cache, 200);
    const SequenceId b = allocate(cache, 200);
    ASSERT_EQ(allocate(roomy, 200), a);
    run(cache, Requests().run(a, 160), false);
    run(roomy, Requests().run(a, 160), false);
    run(cache, Requests().pause(a).run(b, 180), false);
    Step step = cache.begin(Requests().run(a, 1)).value();
    EXPECT_EQ(step.answers().front().status, Answer::Status::never);
    EXPECT_THAT(step.answers().front().why, HasSubstr("paused"));
    EXPECT_EQ(run(cache, Requests().resume(a).run(a, 1)), run(roomy, Requests().run(a, 1)));
    EXPECT_GT(cache.stats().restored_blocks, 0);
}

}  // namespace
}  // namespace kvgrid
