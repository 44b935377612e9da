// Steps as CUDA graphs, and calls on streams of the caller's own: the bits are those of plain
// calls.
//
// To prove: in Shard::extent, rows() in place of the rows that a capture may have fails
// AGraphMayHaveMoreRowsThanTheStep; runs of 0 rows that StepRuns does not upload fail the steps
// with fewer rows; a captured append that counts fails ACaptureAppendsNothing;
// Cache::State::enqueue without either arrange fails CallsOnSeveralStreams.
#include <kvgrid/cache.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/src/cache_fixture.h"
#ifdef KVGRID_TEST_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvgrid {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int layers = 2;

// Two layer groups: the second layer sees 50 tokens.
CacheConfig layeredConfig() {
    CacheConfig config = smallConfig();
    config.geometry = Geometry::uniform(layers, query_heads, kv_heads, head_dim);
    config.geometry.groups.push_back(config.geometry.groups.front());
    config.geometry.groups[0].layers = {0};
    config.geometry.groups[1].layers = {1};
    config.geometry.groups[1].window = 50;
    return config;
}

#ifndef KVGRID_TEST_CUDA

TEST_F(CacheTest, TheCpuDeviceCapturesNothing) {
    Cache cache = make(layeredConfig());
    const SequenceId a = allocate(cache, 20);
    const Step step = cache.begin(Requests().run(a, 1)).value();
    const Result<StepGraph> graph =
        cache.capture(step, 0, [](cudaStream_t) { ADD_FAILURE() << "the body was called"; });
    ASSERT_FALSE(graph);
    EXPECT_EQ(graph.error().code, ErrorCode::unavailable);
}

#else

// The buffers of a decoding program, at fixed addresses, and its pass over all layers.
class Decoder {
public:
    Decoder(Process& process, Cache& cache, std::size_t most_rows, Output output = Output::gathered)
        : process_(&process),
          cache_(&cache),
          output_(output) {
        const CacheHeads heads = cache.heads();
        out_row_ = head_dim * static_cast<std::size_t>(
                                  output == Output::gathered ? query_heads : heads.query_heads);
        for (int layer = 0; layer < layers; ++layer) {
            q_.emplace_back(process, most_rows * head_dim * std::size_t(heads.query_heads));
            k_.emplace_back(process, most_rows * head_dim * std::size_t(heads.kv_heads));
            v_.emplace_back(process, most_rows * head_dim * std::size_t(heads.kv_heads));
            out_.emplace_back(process, most_rows * out_row_);
        }
    }

    // The inputs of the step; NaN behind them, and in the outputs. Over when it returns.
    void upload(const Step& step) {
        const CacheHeads heads = cache_->heads();
        for (int layer = 0; layer < layers; ++layer) {
            const auto i = static_cast<std::size_t>(layer);
            for (auto* memory : {&q_[i], &k_[i], &v_[i], &out_[i]})
                memory->poison();
            q_[i].upload(inputs(step, 3 * layer, heads.first_query_head, heads.query_heads));
            k_[i].upload(inputs(step, 3 * layer + 1, heads.first_kv_head, heads.kv_heads));
            v_[i].upload(inputs(step, 3 * layer + 2, heads.first_kv_head, heads.kv_heads));
        }
        process_->synchronize();
    }

    Result<void> append(const Step& step, int layer, cudaStream_t stream) {
        const auto i = static_cast<std::size_t>(layer);
        return cache_->append(step, layer, q_[i].data(), k_[i].data(), v_[i].data(), stream);
    }
    Result<void> attend(const Step& step, int layer, cudaStream_t stream) {
        return cache_->attend(step, layer, out_[static_cast<std::size_t>(layer)].data(), output_,
                              stream);
    }
    Result<void> enqueue(const Step& step, cudaStream_t stream = nullptr) {
        for (int layer = 0; layer < layers; ++layer) {
            if (Result<void> appended = append(step, layer, stream); !appended) return appended;
            if (Result<void> attended = attend(step, layer, stream); !attended) return attended;
        }
        return {};
    }

    // Of the step's rows, layer by layer. The step's stream is the default one, or idle.
    std::vector<float> outputs(const Step& step) {
        std::vector<float> all;
        for (const FloatsOnDevice& out : out_) {
            const std::vector<float> layer = out.download(step.rows().size() * out_row_);
            all.insert(all.end(), layer.begin(), layer.end());
        }
        return all;
    }

    std::vector<float> runEagerly(const Requests& requests) {
        const Step step = cache_->begin(requests).value();
        upload(step);
        EXPECT_TRUE(enqueue(step));
        std::vector<float> all = outputs(step);
        EXPECT_TRUE(cache_->advance(step));
        return all;
    }

    std::vector<float> replay(const Requests& requests, const StepGraph& graph) {
        const Step step = cache_->begin(requests).value();
        for (const Answer& answer : step.answers())
            EXPECT_EQ(answer.status, Answer::Status::done) << answer.why;
        upload(step);
        EXPECT_TRUE(cache_->replay(step, graph));
        std::vector<float> all = outputs(step);
        EXPECT_TRUE(cache_->advance(step));
        return all;
    }

    // Of a step with these rows or more, into which nothing has been uploaded yet.
    StepGraph capture(const Step& step, std::int64_t rows = 0) {
        return cache_
            ->capture(step, rows, [&](cudaStream_t stream) { EXPECT_TRUE(enqueue(step, stream)); })
            .value();
    }

private:
    Process* process_;
    Cache* cache_;
    Output output_;
    std::size_t out_row_ = 0;
    std::vector<FloatsOnDevice> q_, k_, v_, out_;
};

bool joinsAreCaptured(Process& process) {
    return process.size() == 1 || process.state().transport().isCapturable();
}

Device& deviceOf(Process& process) {
    return *process.state().device;
}

cudaStream_t handleOf(const Stream& stream) {
    return static_cast<cudaStream_t>(stream.view().handle());
}

// Sequences of these lengths, with room to grow, the same in any cache of this configuration.
std::vector<SequenceId> prefilled(Process& process, Cache& cache,
                                  const std::vector<std::int64_t>& lengths) {
    std::vector<SequenceId> sequences;
    for (const std::int64_t length : lengths) {
        const SequenceId sequence =
            cache.begin(Requests().allocate(length + 170)).value().answers().front().sequence;
        Decoder(process, cache, static_cast<std::size_t>(length), Output::sharded)
            .runEagerly(Requests().run(sequence, length));
        sequences.push_back(sequence);
    }
    return sequences;
}

class CacheGraphTest : public CacheTest {
protected:
    void SetUp() override {
        CacheTest::SetUp();
        if (IsSkipped()) return;
        if (!joinsAreCaptured(*process))
            GTEST_SKIP() << "transport mpi is eager, so the join of several ranks has no graph";
    }
};

// Lengths grow over the ends of blocks and of stripes; the batch shrinks and changes its order.
// With a tight pool blocks come and go, and lie elsewhere, between two launches.
TEST_F(CacheGraphTest, AReplayedGraphGivesTheBitsOfEagerCalls) {
    for (const bool tight : {false, true}) {
        CacheConfig config = layeredConfig();
        Cache plain = make(config);
        if (tight) {
            config.device_blocks = 20;
            config.host_blocks = 40;
        }
        Cache graphed = make(config);
        const std::vector<std::int64_t> lengths{37, 130, 5, 100};
        const auto ids = prefilled(*process, plain, lengths);
        ASSERT_EQ(prefilled(*process, graphed, lengths), ids);
        Decoder reference(*process, plain, 3);
        Decoder decoder(*process, graphed, 3);

        const std::array<Requests, 4> turns{
            Requests().run(ids[0]).run(ids[1]).run(ids[2]), Requests().run(ids[3]).run(ids[0]),
            Requests().run(ids[2]).run(ids[1]), Requests().run(ids[2], 2).run(ids[3])};
        const StepGraph graph = decoder.capture(graphed.begin(turns[0]).value());
        EXPECT_EQ(graph.rows(), 3);
        for (std::size_t turn = 0; turn < 40; ++turn) {
            const Requests& requests = turns[turn % turns.size()];
            EXPECT_EQ(decoder.replay(requests, graph), reference.runEagerly(requests))
                << "turn " << turn << (tight ? ", tight" : ", roomy");
        }
        EXPECT_EQ(graphed.length(ids[0]), 57);
        if (tight) {
            EXPECT_GT(graphed.stats().restored_blocks, 20);
        }
    }
}

// They lie at fixed addresses: what is set after a capture counts from the next launch on.
TEST_F(CacheGraphTest, SinksAreReadAnewByEachLaunch) {
    CacheConfig config = layeredConfig();
    config.attention_sinks = true;
    Cache plain = make(config);
    Cache graphed = make(config);
    const auto setSinks = [&](float first) {
        for (Cache* cache : {&plain, &graphed}) {
            for (int layer = 0; layer < layers; ++layer) {
                const std::vector<float> logits(
                    static_cast<std::size_t>(cache->heads().query_heads),
                    first + static_cast<float>(layer));
                EXPECT_TRUE(cache->setSinks(layer, logits));
            }
        }
    };
    setSinks(1.0F);
    const auto ids = prefilled(*process, plain, {20, 300});
    ASSERT_EQ(prefilled(*process, graphed, {20, 300}), ids);
    for (const Output output : {Output::gathered, Output::sharded}) {
        Decoder reference(*process, plain, 2, output);
        Decoder decoder(*process, graphed, 2, output);
        const Requests both = Requests().run(ids[0]).run(ids[1]);
        const StepGraph graph = decoder.capture(graphed.begin(both).value());
        for (const float first : {1.0F, 6.0F, -HUGE_VALF}) {
            setSinks(first);
            EXPECT_EQ(decoder.replay(both, graph), reference.runEagerly(both)) << first;
        }
    }
}

TEST_F(CacheGraphTest, FixedScalesAreThoseOfEagerCalls) {
    CacheConfig config = layeredConfig();
    config.kv_format = NumberFormat::fp8_e4m3;
    for (const float scale : {1e-3F, 50.0F}) {
        config.kv_scales.push_back({.k = std::vector<float>(kv_heads, scale),
                                    .v = std::vector<float>(kv_heads, scale / 2)});
    }
    Cache plain = make(config);
    Cache graphed = make(config);
    const auto ids = prefilled(*process, plain, {20, 300});
    ASSERT_EQ(prefilled(*process, graphed, {20, 300}), ids);
    Decoder reference(*process, plain, 2);
    Decoder decoder(*process, graphed, 2);
    const Requests both = Requests().run(ids[0]).run(ids[1]);
    const StepGraph graph = decoder.capture(graphed.begin(both).value());
    for (int step = 0; step < 3; ++step)
        EXPECT_EQ(decoder.replay(both, graph), reference.runEagerly(both));
}

TEST_F(CacheGraphTest, AGraphMayHaveMoreRowsThanTheStep) {
    Cache plain = make(layeredConfig());
    Cache graphed = make(layeredConfig());
    const auto ids = prefilled(*process, plain, {20, 300, 1, 64, 2});
    ASSERT_EQ(prefilled(*process, graphed, {20, 300, 1, 64, 2}), ids);
    Decoder reference(*process, plain, 8);
    Decoder decoder(*process, graphed, 8);
    const StepGraph graph = decoder.capture(graphed.begin(Requests().run(ids[1])).value(), 8);
    EXPECT_EQ(graph.rows(), 8);
    Requests all;
    for (const SequenceId id : ids)
        all.run(id);
    Requests most = all;
    most.run(allocate(graphed, 10), 3);
    static_cast<void>(allocate(plain, 10));
    for (const Requests& requests : {Requests().run(ids[4]), all, most, Requests().run(ids[0], 8)})
        EXPECT_EQ(decoder.replay(requests, graph), reference.runEagerly(requests));
    EXPECT_TRUE(decoder.replay(Requests(), graph).empty());
}

TEST_F(CacheGraphTest, StepsThatDoNotFitTheGraphAreRefusedByName) {
    Cache plain = make(layeredConfig());
    Cache graphed = make(layeredConfig());
    const auto ids = prefilled(*process, plain, {20, 30});
    ASSERT_EQ(prefilled(*process, graphed, {20, 30}), ids);
    Decoder reference(*process, plain, 3);
    Decoder decoder(*process, graphed, 3);
    const Requests three = Requests().run(ids[1], 2).run(ids[0]);
    const Step first = graphed.begin(Requests().run(ids[0]).run(ids[1])).value();
    const StepGraph graph = decoder.capture(first);

    const Step step = graphed.begin(three).value();
    decoder.upload(step);
    for (const Result<void>& refused : {graphed.replay(step, graph), graphed.replayed(step, 2)}) {
        ASSERT_FALSE(refused);
        EXPECT_EQ(refused.error().code, ErrorCode::invalid_argument);
        EXPECT_THAT(refused.error().message,
                    AllOf(HasSubstr("3 rows"), HasSubstr("captured for 2")));
    }
    EXPECT_THAT(graphed.advance(step).error().message, HasSubstr("has appended"));
    EXPECT_THAT(graphed.replay(first, graph).error().message, HasSubstr("newest"));
    for (const std::int64_t rows : {std::int64_t{2}, std::int64_t{-1}, std::int64_t{1025}}) {
        const auto refused = graphed.capture(
            step, rows, [](cudaStream_t) { ADD_FAILURE() << "the body was called"; });
        ASSERT_FALSE(refused);
        EXPECT_EQ(refused.error().code, ErrorCode::invalid_argument);
        EXPECT_THAT(refused.error().message, HasSubstr("rows: " + std::to_string(rows)));
    }
    // Nothing is lost: the same step runs without a graph.
    EXPECT_TRUE(decoder.enqueue(step));
    const std::vector<float> out = decoder.outputs(step);
    EXPECT_TRUE(graphed.advance(step));
    EXPECT_EQ(out, reference.runEagerly(three));
}

TEST_F(CacheGraphTest, WhatEndsOrBeginsAStepIsNotCaptured) {
    Cache plain = make(layeredConfig());
    Cache graphed = make(layeredConfig());
    const auto ids = prefilled(*process, plain, {20});
    ASSERT_EQ(prefilled(*process, graphed, {20}), ids);
    Decoder reference(*process, plain, 1);
    Decoder decoder(*process, graphed, 1);
    const Requests one = Requests().run(ids[0]);
    const StepGraph earlier = decoder.capture(graphed.begin(one).value());
    const Step step = graphed.begin(one).value();
    const std::array<std::int64_t, 1> accepted{1};
    const auto refused = [](const auto& result, const std::string& call) {
        ASSERT_FALSE(result) << call;
        EXPECT_EQ(result.error().code, ErrorCode::invalid_argument) << call;
        EXPECT_THAT(result.error().message, HasSubstr(call));
    };
    const Result<StepGraph> graph = graphed.capture(step, 0, [&](cudaStream_t stream) {
        refused(graphed.begin(Requests()), "begin");
        EXPECT_TRUE(decoder.enqueue(step, stream));
        refused(graphed.advance(step), "advance");
        refused(graphed.advance(step, accepted), "advance");
        refused(graphed.replay(step, earlier), "replay");
        refused(graphed.setSinks(0, {}), "setSinks");
    });
    ASSERT_TRUE(graph);  // what was refused left the capture whole
    EXPECT_EQ(decoder.replay(one, *graph), reference.runEagerly(one));
}

TEST_F(CacheGraphTest, ACaptureAppendsNothing) {
    Cache cache = make(layeredConfig());
    const auto ids = prefilled(*process, cache, {20});
    Decoder decoder(*process, cache, 1);
    const Step step = cache.begin(Requests().run(ids[0])).value();
    const StepGraph graph = decoder.capture(step);
    const Result<void> advanced = cache.advance(step);
    ASSERT_FALSE(advanced);
    EXPECT_THAT(advanced.error().message, HasSubstr("layer 0 has appended 20"));
    const Result<void> attended = decoder.attend(step, layers - 1, nullptr);  // q is not there
    ASSERT_FALSE(attended);
    EXPECT_THAT(attended.error().message, HasSubstr("before its q was appended"));
    decoder.upload(step);
    EXPECT_TRUE(cache.replay(step, graph));
    EXPECT_TRUE(cache.advance(step));
    EXPECT_EQ(cache.length(ids[0]), 21);
}

TEST_F(CacheGraphTest, ABodyThatThrowsLeavesTheCacheAsItWas) {
    Cache plain = make(layeredConfig());
    Cache graphed = make(layeredConfig());
    const auto ids = prefilled(*process, plain, {20});
    ASSERT_EQ(prefilled(*process, graphed, {20}), ids);
    Decoder reference(*process, plain, 1);
    Decoder decoder(*process, graphed, 1);
    const Requests one = Requests().run(ids[0]);
    const Step step = graphed.begin(one).value();
    EXPECT_THROW(static_cast<void>(graphed.capture(step, 0,
                                                   [&](cudaStream_t stream) {
                                                       EXPECT_TRUE(decoder.append(step, 0, stream));
                                                       throw std::runtime_error("of the caller");
                                                   })),
                 std::runtime_error);
    decoder.upload(step);
    EXPECT_TRUE(decoder.enqueue(step));
    const std::vector<float> out = decoder.outputs(step);
    EXPECT_TRUE(graphed.advance(step));
    EXPECT_EQ(out, reference.runEagerly(one));
    const StepGraph graph = decoder.capture(graphed.begin(one).value());
    EXPECT_EQ(decoder.replay(one, graph), reference.runEagerly(one));
}

TEST_F(CacheGraphTest, PartsInsideAGraphAreTimedAtEachLaunch) {
    Cache cache = make(layeredConfig());
    const auto ids = prefilled(*process, cache, {300});
    Decoder decoder(*process, cache, 1);
    cache.setTiming(true);
    const StepGraph graph = decoder.capture(cache.begin(Requests().run(ids[0])).value());
    static_cast<void>(cache.takeTiming());
    for (int launch = 0; launch < 2; ++launch) {
        decoder.replay(Requests().run(ids[0]), graph);
        const CacheTiming timing = cache.takeTiming();
        EXPECT_GT(timing.append_s, 0.0);
        EXPECT_GT(timing.attend_s, 0.0);
        EXPECT_LT(timing.append_s + timing.attend_s + timing.join_s, 10.0);
    }
}

// A graph that the caller captures, in the mode that forbids most, and launches on its own stream.
void checkOwnGraph(Process& process, Output output) {
    const Stream own(deviceOf(process));  // the caches end first
    const cudaStream_t stream = handleOf(own);
    Cache plain = Cache::create(process, layeredConfig()).value();
    Cache graphed = Cache::create(process, layeredConfig()).value();
    const auto ids = prefilled(process, plain, {37, 130});
    ASSERT_EQ(prefilled(process, graphed, {37, 130}), ids);
    Decoder reference(process, plain, 2, output);
    Decoder decoder(process, graphed, 2, output);
    const std::array<Requests, 3> turns{Requests().run(ids[0]).run(ids[1]), Requests().run(ids[1]),
                                        Requests().run(ids[1]).run(ids[0])};

    Step step = graphed.begin(turns[0], stream).value();
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_TRUE(decoder.enqueue(step, stream));
    cudaGraph_t captured = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &captured), cudaSuccess);
    cudaGraphExec_t graph = nullptr;
    ASSERT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
    EXPECT_FALSE(graphed.advance(step));  // captured is not appended
    for (std::size_t turn = 0; turn < 12; ++turn) {
        if (turn > 0) step = graphed.begin(turns[turn % turns.size()], stream).value();
        decoder.upload(step);
        ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
        EXPECT_TRUE(graphed.replayed(step, 2));
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        const std::vector<float> out = decoder.outputs(step);
        EXPECT_TRUE(graphed.advance(step));
        EXPECT_EQ(out, reference.runEagerly(turns[turn % turns.size()])) << "turn " << turn;
    }
    EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

TEST_F(CacheGraphTest, AGraphOfTheCallersOwnGivesTheSameBits) {
    checkOwnGraph(*process, Output::gathered);
}

TEST_F(CacheTest, AGraphWithoutAJoinNeedsNoCapturableTransport) {
    checkOwnGraph(*process, Output::sharded);
}

TEST_F(CacheTest, AnEagerJoinIsNotCaptured) {
    if (joinsAreCaptured(*process)) GTEST_SKIP() << "runs over MPI on several ranks";
    const Stream own(deviceOf(*process));
    Cache cache = make(layeredConfig());
    const auto ids = prefilled(*process, cache, {20});
    Decoder decoder(*process, cache, 1);
    const Step step = cache.begin(Requests().run(ids[0])).value();
    const auto graph =
        cache.capture(step, 0, [](cudaStream_t) { ADD_FAILURE() << "the body was called"; });
    ASSERT_FALSE(graph);
    EXPECT_EQ(graph.error().code, ErrorCode::invalid_argument);
    EXPECT_THAT(graph.error().message, HasSubstr("transport mpi is eager"));

    const cudaStream_t stream = handleOf(own);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_TRUE(decoder.append(step, 0, stream));
    const Result<void> attended = decoder.attend(step, 0, stream);
    cudaGraph_t captured = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &captured), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
    ASSERT_FALSE(attended);
    EXPECT_EQ(attended.error().code, ErrorCode::invalid_argument);
    EXPECT_THAT(attended.error().message, HasSubstr("transport mpi is eager"));
}

TEST_F(CacheTest, NoStepBeginsOnAStreamThatIsCaptured) {
    const Stream own(deviceOf(*process));
    const cudaStream_t stream = handleOf(own);
    Cache cache = make(layeredConfig());
    const SequenceId a = allocate(cache, 20);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_NO_THROW({
        const Result<Step> begun = cache.begin(Requests().run(a, 1), stream);
        ASSERT_FALSE(begun);
        EXPECT_EQ(begun.error().code, ErrorCode::invalid_argument);
        EXPECT_THAT(begun.error().message, HasSubstr("begin"));
    });
    cudaGraph_t captured = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &captured), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
    Decoder decoder(*process, cache, 1, Output::sharded);
    decoder.runEagerly(Requests().run(a));  // the cache is as it was
    EXPECT_EQ(cache.length(a), 1);
}

// Every call comes late on its stream, so that one that did not wait would overtake it. Between
// them the host does nothing that takes long: inputs are there before, and memory too.
TEST_F(CacheTest, CallsOnSeveralStreamsTakeEffectInCallOrder) {
    Device& device = deviceOf(*process);
    const Stream first(device);
    const Stream second(device);
    const std::array<StreamView, 3> streams{first.view(), second.view(), device.defaultStream()};
    const FloatsOnDevice large(*process, std::size_t{64} << 20);
    std::size_t calls = 0;
    const auto next = [&] {
        const StreamView stream = streams[calls++ % streams.size()];
        for (int i = 0; i < 16; ++i)
            device.fill(large.data(), 0, large.size() * sizeof(float), stream);
        return static_cast<cudaStream_t>(stream.handle());
    };
    const auto wait_for_all = [&] {
        for (const StreamView stream : streams)
            device.synchronize(stream);
    };
    Cache plain = make(layeredConfig());
    Cache cache = make(layeredConfig());
    const auto ids = prefilled(*process, plain, {37, 130});
    ASSERT_EQ(prefilled(*process, cache, {37, 130}), ids);
    Decoder reference(*process, plain, 64);
    Decoder decoder(*process, cache, 64);
    // Dropped, and with the rows of the step that comes next.
    const auto prepare = [&](const Requests& requests) {
        decoder.upload(cache.begin(requests).value());
        wait_for_all();
    };
    const Requests wide = Requests().run(ids[0], 3).run(ids[1], 40);
    const Requests narrow = Requests().run(ids[1], 2).run(ids[0]);
    for (int turn = 0; turn < 8; ++turn) {
        const Requests& requests = turn % 2 == 0 ? wide : narrow;
        prepare(requests);
        // What a step uploads comes after what the one before it did.
        static_cast<void>(cache.begin(turn % 2 == 0 ? narrow : wide, next()).value());
        const Step step = cache.begin(requests, next()).value();
        for (int layer = 0; layer < layers; ++layer) {
            EXPECT_TRUE(decoder.append(step, layer, next()));
            EXPECT_TRUE(decoder.attend(step, layer, next()));
        }
        next();  // else every second turn would have the same streams
        EXPECT_TRUE(cache.advance(step));
        wait_for_all();
        EXPECT_EQ(decoder.outputs(step), reference.runEagerly(requests)) << "turn " << turn;
    }

    // What is gathered is what the append before it wrote.
    const Requests one = Requests().run(ids[0]);
    reference.runEagerly(one);
    const auto size = static_cast<std::size_t>(plain.length(ids[0]).value()) * head_dim *
                      static_cast<std::size_t>(cache.heads().kv_heads);
    using BitsOnDevice = test::DeviceVector<std::uint16_t>;
    const BitsOnDevice k(*process, size), v(*process, size);
    const BitsOnDevice k_plain(*process, size), v_plain(*process, size);
    prepare(one);
    const Step step = cache.begin(one, next()).value();
    EXPECT_TRUE(decoder.append(step, 1, next()));
    EXPECT_TRUE(decoder.append(step, 0, next()));
    EXPECT_TRUE(cache.advance(step));
    EXPECT_TRUE(cache.gather(ids[0], 0, k.data(), v.data(), next()));
    wait_for_all();
    EXPECT_TRUE(plain.gather(ids[0], 0, k_plain.data(), v_plain.data()));
    EXPECT_EQ(k.download(), k_plain.download());
    EXPECT_EQ(v.download(), v_plain.download());
}

#endif

}  // namespace
}  // namespace kvgrid
