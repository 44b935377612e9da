// A shard driven by a coordinator on one rank, without MPI: what is written, read, moved and
// refused. The same suite runs on either device, one for each program.
#include "shard/shard.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/oracle.h"
#include "src/coordinator.h"
#include "tests/shard/late_device.h"

namespace kvgrid {
namespace {

using testing::HasSubstr;

#ifdef KVGRID_TEST_CUDA
using DeviceTraits = test::CudaDeviceTraits;
#else
using DeviceTraits = test::CpuDeviceTraits;
#endif

struct RigShape {
    PoolLayout layout = PoolLayout::block_major;
    NumberFormat format = NumberFormat::bf16;
    std::int64_t block_size = 16;
    int layers = 2;
    int kv_heads = 2;
    int query_heads = 6;
    int head_dim = 64;
    int rotary_dim = 64;
    std::int64_t window = 0;
    int max_sequences = 4;
    std::int64_t max_length = 600;
    std::int64_t device_blocks = 200;
    std::int64_t host_blocks = 0;
    bool q_of_prefill = true;  // steps that are not attended get q too
};

ShardConfig shardConfig(const RigShape& setup) {
    ShardConfig config;
    ShardGroup group;
    group.block = {.layers = setup.layers,
                   .kv_heads = setup.kv_heads,
                   .head_dim = setup.head_dim,
                   .block_size = setup.block_size,
                   .format = setup.format};
    group.window = setup.window;
    group.rotary.dim = setup.rotary_dim;
    group.softmax_scale = 0.125F;
    group.layers.resize(static_cast<std::size_t>(setup.layers));
    std::iota(group.layers.begin(), group.layers.end(), 0);
    config.groups = {group};
    config.query_heads = setup.query_heads;
    config.layout = setup.layout;
    config.input_format = NumberFormat::fp32;
    config.limits = {.max_sequences = setup.max_sequences,
                     .max_sequence_length = setup.max_length,
                     .max_step_tokens = 1024,
                     .groups = {{.blocks_per_sequence =
                                     (setup.max_length + setup.block_size - 1) / setup.block_size,
                                 .device_blocks = setup.device_blocks,
                                 .host_blocks = setup.host_blocks}}};
    return config;
}

// A value that depends on where it belongs alone, in about [-1.7, 1.7].
float valueAt(int what, std::int64_t sequence, int layer, std::int64_t position, int head,
              int element) {
    std::uint64_t x = 0x9E3779B97F4A7C15ULL;
    for (const std::int64_t part : {std::int64_t{what}, sequence, std::int64_t{layer}, position,
                                    std::int64_t{head}, std::int64_t{element}}) {
        x = (x ^ static_cast<std::uint64_t>(part)) * 0xBF58476D1CE4E5B9ULL;
        x ^= x >> 31;
    }
    return static_cast<float>(static_cast<double>(x >> 40) / double{1 << 24} - 0.5) * 3.4F;
}

// 0xFF everywhere is a NaN in bf16 and fp16. The host pool is written by the host.
void poison(Device& device, const Shard& shard) {
    const Pool& pool = shard.devicePool(0);
    device.fill(pool.view().data, 0xFF, static_cast<std::size_t>(pool.bytes()),
                device.defaultStream());
    device.synchronize(device.defaultStream());
    std::fill_n(shard.hostPool(0).view().data, shard.hostPool(0).bytes(), std::byte{0xFF});
}

// One rank's coordinator and shard, with data by (sequence key, position). Inputs have one place
// each for all steps: nothing that a step needs is allocated, which would make a GPU wait.
class Rig {
public:
    explicit Rig(const RigShape& setup, int threads = 1)
        : Rig(setup, DeviceTraits::makeParallel(threads)) {}
    Rig(const RigShape& setup, std::unique_ptr<Device> device)
        : setup_(setup),
          device_(std::move(device)),
          coordinator_({.limits = shardConfig(setup).limits,
                        .block_sizes = {setup.block_size},
                        .windows = {setup.window}}),
          shard_(Shard::create(*device_, shardConfig(setup)).value()),
          q_(*device_, inputSize(setup, setup.query_heads)),
          k_(*device_, inputSize(setup, setup.kv_heads)),
          v_(*device_, inputSize(setup, setup.kv_heads)) {
        poison(*device_, shard_);
    }

    StepPlan begin(const Requests& requests) {
        StepPlan plan =
            StepPlan::decode(coordinator_.plan(requests.all()).encode(), shardConfig(setup_).limits)
                .value();
        EXPECT_TRUE(shard_.apply(plan, stream()));
        poisonFreed(plan);
        return plan;
    }

    SequenceId allocate(std::int64_t max_length) {
        return SequenceId{begin(Requests().allocate(max_length)).answers.front().sequence};
    }

    Result<void> append(int layer, bool with_q = true) {
        uploadInputs(layer, with_q);
        return appendUploaded(layer, with_q);
    }
    void uploadInputs(int layer, bool with_q) {
        if (with_q) q_.upload(rows(0, layer, setup_.query_heads));
        k_.upload(rows(1, layer, setup_.kv_heads));
        v_.upload(rows(2, layer, setup_.kv_heads));
    }
    Result<void> appendUploaded(int layer, bool with_q) {
        return shard_.append(layer, with_q ? q_.data() : nullptr, k_.data(), v_.data(), stream());
    }

    Result<void> advance() {
        std::vector<std::int64_t> tokens;
        for (const Run& run : shard_.runs())
            tokens.push_back(run.rows);
        return advance(tokens);
    }

    Result<void> advance(const std::vector<std::int64_t>& tokens) {
        if (Result<void> appended = shard_.checkAppended(tokens); !appended) return appended;
        EXPECT_TRUE(coordinator_.advance(tokens));
        shard_.commit(tokens);
        return {};
    }

    // Runs a step of all layers; the outputs of all layers, one after the other.
    std::vector<float> step(const Requests& requests, bool attend = true) {
        begin(requests);
        std::vector<float> outputs;
        for (int layer = 0; layer < setup_.layers; ++layer) {
            EXPECT_TRUE(append(layer, attend || setup_.q_of_prefill));
            if (!attend) continue;
            EXPECT_TRUE(shard_.attend(layer, stream()));
            const std::vector<float> states = downloadStates();
            outputs.insert(outputs.end(), states.begin(), states.end());
        }
        EXPECT_TRUE(advance());
        return outputs;
    }

    // The inputs of the step: what 0: q, 1: k, 2: v. [rows, heads, head_dim]
    std::vector<float> rows(int what, int layer, int heads) {
        std::vector<float> values;
        for (const Run& run : shard_.runs()) {
            const auto sequence = static_cast<std::int64_t>(shard_.replica().sequenceOf(run.slot));
            for (std::int64_t row = 0; row < run.rows; ++row) {
                for (int head = 0; head < heads; ++head) {
                    for (int element = 0; element < setup_.head_dim; ++element) {
                        values.push_back(valueAt(what, sequence, layer, run.first_position + row,
                                                 head, element));
                    }
                }
            }
        }
        return values;
    }

    Device& device() { return *device_; }
    StreamView stream() { return device_->defaultStream(); }
    Shard& shard() { return shard_; }
    Coordinator& coordinator() { return coordinator_; }

private:
    static std::size_t inputSize(const RigShape& setup, int heads) {
        return static_cast<std::size_t>(shardConfig(setup).limits.max_step_tokens) *
               static_cast<std::size_t>(heads) * static_cast<std::size_t>(setup.head_dim);
    }
    // Blocks that a window left, unless the plan gave them to somebody. Block-major pools.
    void poisonFreed(const StepPlan& plan) {
        const PoolView& pool = shard_.devicePool(0).view();
        for (const TableRecord& freed : plan.tables) {
            const auto block = freed_.find({freed.slot, freed.logical});
            if (freed.tier == Tier::device) freed_[{freed.slot, freed.logical}] = freed.block;
            if (freed.tier != Tier::none || block == freed_.end()) continue;
            const bool taken =
                std::any_of(plan.tables.begin(), plan.tables.end(), [&](const TableRecord& record) {
                    return record.tier == Tier::device && record.block == block->second;
                });
            if (taken || setup_.layout == PoolLayout::layer_major) continue;
            device_->fill(pool.data + block->second * pool.block_stride, 0xFF,
                          static_cast<std::size_t>(pool.block_stride), stream());
        }
    }
    std::vector<float> downloadStates() {
        std::vector<float> states(static_cast<std::size_t>(shard_.rows()) *
                                  static_cast<std::size_t>(setup_.query_heads) *
                                  static_cast<std::size_t>(setup_.head_dim));
        device_->copy(states.data(), shard_.states(), states.size() * sizeof(float), stream());
        device_->synchronize(stream());
        return states;
    }

    RigShape setup_;
    std::unique_ptr<Device> device_;
    Coordinator coordinator_;
    Shard shard_;
    test::DeviceArray<float> q_, k_, v_;
    std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> freed_;  // last block there
};

class ShardTest : public testing::Test {
protected:
    void SetUp() override {
        if (DeviceTraits::make() == nullptr) GTEST_SKIP() << DeviceTraits::missing();
    }
};

// The oracle's output of one query head at `position`, which sees itself and, within the window,
// all before it.
std::vector<double> expected(const RigShape& setup, SequenceId id, int layer, std::int64_t position,
                             int head) {
    const auto sequence = static_cast<std::int64_t>(id);
    const oracle::Rotary rotary{.dim = setup.rotary_dim};
    const auto head_of = [&](int what, std::int64_t at, int which) {
        std::vector<float> values;
        for (int element = 0; element < setup.head_dim; ++element) {
            values.push_back(valueAt(what, sequence, layer, at, which, element));
        }
        if (what < 2) oracle::rotate(values, at, rotary);
        return values;
    };
    const int kv_head = head / (setup.query_heads / setup.kv_heads);
    std::vector<double> k, v;
    const std::int64_t window = setup.window == 0 ? position + 1 : setup.window;
    for (std::int64_t at = std::max<std::int64_t>(0, position - window + 1); at <= position; ++at) {
        for (const float x : head_of(1, at, kv_head))
            k.push_back(oracle::rounded(x, oracle::Format::bf16));
        for (const float x : head_of(2, at, kv_head))
            v.push_back(oracle::rounded(x, oracle::Format::bf16));
    }
    const std::vector<float> q = head_of(0, position, head);
    return oracle::attention(std::vector<double>(q.begin(), q.end()), k, v, 0.125).out;
}

struct Variant {
    PoolLayout layout;
    std::int64_t block_size;
};

const std::vector<Variant> variants{
    {PoolLayout::block_major, 1}, {PoolLayout::block_major, 16}, {PoolLayout::block_major, 256},
    {PoolLayout::layer_major, 8}, {PoolLayout::layer_major, 64}, {PoolLayout::contiguous, 768},
};

RigShape with(const Variant& variant) {
    RigShape setup;
    setup.layout = variant.layout;
    setup.block_size = variant.block_size;
    setup.device_blocks = variant.block_size == 768 ? 4 : 2400 / variant.block_size + 4;
    return setup;
}

TEST_F(ShardTest, DecodesWithinTheBoundsOfTheOracleAmidPoison) {
    for (const Variant& variant : variants) {
        for (const std::int64_t window : {0, 2, 100, 300}) {
            RigShape setup = with(variant);
            setup.window = window;
            Rig rig(setup);
            const SequenceId a = rig.allocate(600);
            const SequenceId b = rig.allocate(40);
            rig.step(Requests().run(a, 530).run(b, 3), false);
            const std::vector<float> out = rig.step(Requests().run(b, 2).run(a, 1));
            for (int layer = 0; layer < setup.layers; ++layer) {
                for (int row = 0; row < 3; ++row) {
                    for (int head = 0; head < setup.query_heads; ++head) {
                        const int state = (layer * 3 + row) * setup.query_heads + head;
                        const auto at = static_cast<std::size_t>(state) *
                                        static_cast<std::size_t>(setup.head_dim);
                        const std::vector<double> reference =
                            row < 2 ? expected(setup, b, layer, 3 + row, head)
                                    : expected(setup, a, layer, 530, head);
                        EXPECT_LE(oracle::relativeError(std::span(out).subspan(at, 64), reference),
                                  test::errorBound(rig.device(), NumberFormat::bf16))
                            << "block size " << variant.block_size << " row " << row << " window "
                            << window;
                    }
                }
            }
        }
    }
}

TEST_F(ShardTest, BitsDoNotDependOnLayoutBlockSizeChunksThreadsOrCompany) {
    std::vector<float> first;
    for (const Variant& variant : variants) {
        for (const int threads : {1, 3}) {
            Rig rig(with(variant), threads);
            const SequenceId a = rig.allocate(600);
            // Alone on the first rig, among others and in chunks on the rest.
            if (first.empty()) {
                rig.step(Requests().run(a, 599), false);
                first = rig.step(Requests().run(a, 1));
                continue;
            }
            const SequenceId b = rig.allocate(300);
            rig.step(Requests().run(a, 255).run(b, 100), false);
            rig.step(Requests().run(b, 1).run(a, 344), false);
            const std::vector<float> both = rig.step(Requests().run(a, 1).run(b, 1));
            const std::size_t row = 6 * 64;
            const std::vector<float> layer0(both.begin(), both.begin() + row);
            const std::vector<float> layer1(both.begin() + 2 * row, both.begin() + 3 * row);
            EXPECT_EQ(layer0, std::vector<float>(first.begin(), first.begin() + row))
                << variant.block_size;
            EXPECT_EQ(layer1, std::vector<float>(first.begin() + row, first.end()))
                << variant.block_size;
        }
    }
}

// Each turn runs one of three sequences with room for little more than one on the device.
std::vector<std::vector<float>> inTurns(const RigShape& setup) {
    Rig rig(setup);
    std::vector<SequenceId> ids;
    for (int i = 0; i < 3; ++i) {
        ids.push_back(rig.allocate(200));
        rig.step(Requests().run(ids.back(), 150), false);
    }
    std::vector<std::vector<float>> outputs;
    for (int turn = 0; turn < 12; ++turn) {
        outputs.push_back(
            rig.step(Requests().run(ids[static_cast<std::size_t>(turn % 3)], 1 + turn % 2)));
        EXPECT_TRUE(rig.coordinator().checkInvariants());
    }
    if (setup.host_blocks > 0) {
        EXPECT_GT(rig.coordinator().restoredBlocks(), 50);
    }
    return outputs;
}

TEST_F(ShardTest, OffloadedAndRestoredBlocksGiveTheSameBits) {
    for (const NumberFormat format : test::kv_formats)
        for (const PoolLayout layout : {PoolLayout::block_major, PoolLayout::layer_major}) {
            RigShape roomy;
            roomy.format = format;
            roomy.layout = layout;
            const std::vector<std::vector<float>> reference = inTurns(roomy);
            RigShape tight = roomy;
            tight.device_blocks = 13;
            tight.host_blocks = 21;  // barely: copies must take turns within a step
            EXPECT_EQ(inTurns(tight), reference);
        }
}

TEST_F(ShardTest, ScalesThatAreMissingAreRefused) {
    RigShape setup;
    setup.format = NumberFormat::int8;
    const auto device = DeviceTraits::make();
    ShardConfig config = shardConfig(setup);
    // [2 layers][K, V][2 KV heads]
    for (const std::size_t count : {1, 4, 7, 9}) {
        config.groups[0].fixed_scales.assign(count, 0x3C00);
        const Result<Shard> shard = Shard::create(*device, config);
        ASSERT_FALSE(shard);
        EXPECT_EQ(shard.error().code, ErrorCode::internal);
        EXPECT_THAT(shard.error().message, HasSubstr("fixed scales"));
    }
    config.groups[0].fixed_scales.assign(8, 0x3C00);
    EXPECT_TRUE(Shard::create(*device, config));
}

// In a pool that holds the windows of three sequences and little more, not all of their tokens.
std::vector<std::vector<float>> inTurnsWithinWindows(const RigShape& setup) {
    Rig rig(setup);
    std::vector<SequenceId> ids;
    for (int i = 0; i < 3; ++i)
        ids.push_back(rig.allocate(600));
    std::vector<std::vector<float>> outputs;
    for (int turn = 0; turn < 60; ++turn) {
        const SequenceId id = ids[static_cast<std::size_t>(turn % 3)];
        outputs.push_back(rig.step(Requests().run(id, 1 + 7 * (turn % 5))));
        EXPECT_TRUE(rig.coordinator().checkInvariants());
    }
    for (const SequenceId id : ids)
        EXPECT_GT(rig.coordinator().length(id).value(), 250);
    if (setup.host_blocks > 0) {
        EXPECT_GT(rig.coordinator().restoredBlocks(), 50);
    }
    return outputs;
}

TEST_F(ShardTest, WindowsFreeBlocksAndOffloadedOnesGiveTheSameBits) {
    std::vector<std::pair<NumberFormat, std::int64_t>> cases;
    for (const std::int64_t window : {1, 20, 50})
        cases.emplace_back(NumberFormat::bf16, window);
    for (const NumberFormat format : test::kv_formats)
        cases.emplace_back(format, 33);
    for (const auto& [format, window] : cases) {
        SCOPED_TRACE(name(format));
        RigShape whole;
        whole.format = format;
        whole.window = window;
        const std::vector<std::vector<float>> reference = inTurnsWithinWindows(whole);
        RigShape windows = whole;
        windows.device_blocks = 3 * mostBlocksOfWindow(window, 29, 16, 1);
        EXPECT_EQ(inTurnsWithinWindows(windows), reference) << window;
        if (window == 1) continue;  // leaves nothing to offload
        RigShape tight = whole;
        tight.device_blocks = mostBlocksOfWindow(window, 29, 16, 1);
        tight.host_blocks = 2 * tight.device_blocks;
        EXPECT_EQ(inTurnsWithinWindows(tight), reference) << window;
        RigShape contiguous = whole;
        contiguous.layout = PoolLayout::contiguous;
        contiguous.block_size = 768;
        contiguous.device_blocks = 3;
        EXPECT_EQ(inTurnsWithinWindows(contiguous), reference) << window;
    }
}

// Numbers that have scales are given in the input format, fp32.
TEST_F(ShardTest, GathersZerosForWhatAWindowHasLeft) {
    std::vector<std::pair<NumberFormat, std::int64_t>> cases;
    for (const NumberFormat format : test::kv_formats)
        for (const std::int64_t window : {1, 20, 150})
            cases.emplace_back(format, window);
    for (const auto& [format, window] : cases) {
        SCOPED_TRACE(name(format));
        const std::size_t element = hasScales(format) ? sizeof(float) : sizeof(std::uint16_t);
        RigShape setup;
        setup.format = format;
        setup.window = window;
        Rig rig(setup);
        const SequenceId a = rig.allocate(200);
        for (int step = 0; step < 10; ++step)
            rig.step(Requests().run(a, 15), false);
        rig.begin({});
        RigShape plain;
        plain.format = format;
        Rig other(plain);
        ASSERT_EQ(other.allocate(200), a);
        other.step(Requests().run(a, 150), false);
        const auto gather = [&](Rig& from) {
            const auto bytes = 150 * 2 * 64 * element;
            const auto k = test::DeviceArray<std::byte>::poisoned(from.device(), bytes);
            const auto v = test::DeviceArray<std::byte>::poisoned(from.device(), bytes);
            EXPECT_TRUE(from.shard().gather(a, 1, k.data(), v.data(), from.stream()));
            k.expectGuardIntact();
            v.expectGuardIntact();
            return std::pair(k.download(), v.download());
        };
        auto [k, v] = gather(other);
        // The next token, at 150, sees its window less itself.
        const std::int64_t left = 150 - (window - 1);
        const std::size_t cleared = static_cast<std::size_t>(left) * 2 * 64 * element;
        std::fill_n(k.begin(), cleared, std::byte{0});
        std::fill_n(v.begin(), cleared, std::byte{0});
        EXPECT_EQ(gather(rig), std::pair(k, v)) << window;
    }
}

TEST_F(ShardTest, GathersWhatWasAppendedAndRefusesBlocksInHostMemory) {
    RigShape setup;
    setup.device_blocks = 13;
    setup.host_blocks = 30;
    setup.rotary_dim = 0;
    Rig rig(setup);
    const SequenceId a = rig.allocate(200);
    rig.step(Requests().run(a, 150), false);
    const auto k = test::DeviceArray<std::uint16_t>::poisoned(rig.device(), 150 * 2 * 64);
    const auto v = test::DeviceArray<std::uint16_t>::poisoned(rig.device(), 150 * 2 * 64);
    ASSERT_TRUE(rig.shard().gather(a, 1, k.data(), v.data(), rig.stream()));
    const std::vector<std::uint16_t> k_bits = k.download();
    const std::vector<std::uint16_t> v_bits = v.download();
    k.expectGuardIntact();
    v.expectGuardIntact();
    for (std::int64_t at = 0; at < 150; ++at) {
        for (int head = 0; head < 2; ++head) {
            for (int element = 0; element < 64; ++element) {
                const auto index = static_cast<std::size_t>((at * 2 + head) * 64 + element);
                const auto stored = [&](const std::vector<std::uint16_t>& bits) {
                    return std::bit_cast<float>(static_cast<std::uint32_t>(bits[index]) << 16);
                };
                const auto given = [&](int what) {
                    return oracle::rounded(
                        valueAt(what, static_cast<std::int64_t>(a), 1, at, head, element),
                        oracle::Format::bf16);
                };
                EXPECT_EQ(stored(k_bits), given(1));
                EXPECT_EQ(stored(v_bits), given(2));
            }
        }
    }
    const SequenceId b = rig.allocate(200);
    rig.step(Requests().run(b, 150), false);
    const Result<void> gathered = rig.shard().gather(a, 1, k.data(), v.data(), rig.stream());
    ASSERT_FALSE(gathered);
    EXPECT_EQ(gathered.error().code, ErrorCode::does_not_fit);
}

TEST_F(ShardTest, NamesWhatIsMisused) {
    RigShape setup;
    Rig rig(setup);
    const SequenceId a = rig.allocate(100);
    rig.begin(Requests().run(a, 2));
    std::vector<float> values(2 * 6 * 64);

    Result<void> result = rig.shard().attend(0, rig.stream());
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("before its q was appended"));
    result = rig.shard().append(0, values.data(), nullptr, values.data(), rig.stream());
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("k is null"));
    result = rig.shard().append(0, values.data(), values.data(), nullptr, rig.stream());
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("v is null"));
    for (const int layer : {-1, 2}) {
        result =
            rig.shard().append(layer, values.data(), values.data(), values.data(), rig.stream());
        ASSERT_FALSE(result);
        EXPECT_THAT(result.error().message, HasSubstr("layer " + std::to_string(layer)));
    }
    ASSERT_TRUE(rig.append(0, false));  // no q
    EXPECT_FALSE(rig.shard().attend(0, rig.stream()));
    result = rig.advance();
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("layer 1 has appended 0"));
    ASSERT_TRUE(rig.append(1));
    EXPECT_TRUE(rig.advance());
    result = rig.shard().gather(SequenceId{77}, 0, values.data(), values.data(), rig.stream());
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("sequence 77 is unknown"));
}

TEST_F(ShardTest, ARepeatedAppendInAnyLayerOrderChangesNothing) {
    RigShape setup;
    Rig once(setup), often(setup);
    const SequenceId a = once.allocate(100);
    ASSERT_EQ(often.allocate(100), a);
    once.step(Requests().run(a, 70), false);
    often.begin(Requests().run(a, 70));
    for (const int layer : {1, 0, 1, 1, 0})
        EXPECT_TRUE(often.append(layer));
    often.begin(Requests().run(a, 70));  // the step is dropped and begun again
    EXPECT_TRUE(often.append(0));
    EXPECT_TRUE(often.advance());
    EXPECT_EQ(once.step(Requests().run(a, 1)), often.step(Requests().run(a, 1)));
}

TEST_F(ShardTest, RejectedTokensAreForgotten) {
    RigShape setup;
    Rig plain(setup), speculative(setup);
    const SequenceId a = plain.allocate(100);
    ASSERT_EQ(speculative.allocate(100), a);
    plain.step(Requests().run(a, 40), false);
    speculative.step(Requests().run(a, 37), false);
    speculative.begin(Requests().run(a, 8));
    EXPECT_TRUE(speculative.append(0));
    EXPECT_TRUE(speculative.append(1));
    EXPECT_TRUE(speculative.advance({3}));

    // What was appended beyond the accepted tokens does not count for the next step.
    speculative.begin(Requests().run(a, 2));
    EXPECT_FALSE(speculative.advance());
    EXPECT_EQ(speculative.step(Requests().run(a, 1)), plain.step(Requests().run(a, 1)));
}

TEST_F(ShardTest, AReleasedSlotStartsAnew) {
    RigShape setup;
    Rig rig(setup);
    const SequenceId a = rig.allocate(100);
    rig.step(Requests().run(a, 64), false);
    rig.begin(Requests().release(a));
    const SequenceId b = rig.allocate(100);
    EXPECT_NE(a, b);
    rig.begin(Requests().run(b, 1));
    EXPECT_FALSE(rig.advance());  // the slot's last owner had appended
    std::uint16_t nothing = 0;
    EXPECT_FALSE(rig.shard().gather(a, 0, &nothing, &nothing, rig.stream()));
    EXPECT_TRUE(rig.shard().gather(b, 0, nullptr, nullptr, rig.stream()));  // no tokens yet
}

TEST_F(ShardTest, APoolThatCannotBeHadIsNamedInBytes) {
    RigShape setup;
    setup.device_blocks = std::int64_t{1} << 40;
    const std::unique_ptr<Device> device = DeviceTraits::make();
    const Result<Shard> shard = Shard::create(*device, shardConfig(setup));
    ASSERT_FALSE(shard);
    EXPECT_EQ(shard.error().code, ErrorCode::does_not_fit);
    EXPECT_THAT(shard.error().message, HasSubstr("bytes"));
}

// A device whose new memory can be told from what was written.
class MarkedDevice : public test::LateBase {
public:
#ifdef KVGRID_TEST_CUDA
    MarkedDevice() : CudaDevice(0) {}
#else
    MarkedDevice() : LateDevice(test::Streams::none) {}
#endif
    [[nodiscard]] void* allocate(std::size_t bytes) override {
        void* const memory = test::LateBase::allocate(bytes);
        if (memory != nullptr) {
            fill(memory, mark, bytes, defaultStream());
            synchronize(defaultStream());
        }
        return memory;
    }
    [[nodiscard]] void* allocateHost(std::size_t bytes) override {
        void* const memory = test::LateBase::allocateHost(bytes);
        return memory == nullptr ? nullptr : std::memset(memory, mark, bytes);
    }
    static constexpr std::uint8_t mark = 0x5A;
};

std::vector<std::byte> bytesOf(Device& device, const Pool& pool) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(pool.bytes()));
    device.copy(bytes.data(), pool.view().data, bytes.size(), device.defaultStream());
    device.synchronize(device.defaultStream());
    return bytes;
}

TEST_F(ShardTest, PoolsAndStatesOfATestBuildBeginAsNaN) {
#ifndef KVGRID_FAULT_INJECTION
    GTEST_SKIP() << "built without KVGRID_FAULT_INJECTION";
#endif
    const char* const before = std::getenv("KVGRID_POISON");
    const std::string kept = before == nullptr ? "" : before;
    for (const bool poisoned : {true, false}) {
        ::setenv("KVGRID_POISON", poisoned ? "" : "0", 1);
        RigShape setup;
        setup.host_blocks = 3;
        MarkedDevice device;
        const Shard shard = Shard::create(device, shardConfig(setup)).value();
        const auto all = std::byte{poisoned ? std::uint8_t{0xFF} : MarkedDevice::mark};
        for (const Pool* pool : {&shard.devicePool(0), &shard.hostPool(0)}) {
            const std::vector<std::byte> bytes = bytesOf(device, *pool);
            EXPECT_GT(bytes.size(), 0U);
            EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(),
                                    [all](std::byte byte) { return byte == all; }));
        }
        for (const float* numbers : {shard.states(), shard.lse()}) {
            std::array<std::byte, sizeof(float)> number{};
            device.copy(number.data(), numbers, number.size(), device.defaultStream());
            device.synchronize(device.defaultStream());
            EXPECT_THAT(number, testing::Each(all));
        }
    }
    if (before == nullptr)
        ::unsetenv("KVGRID_POISON");
    else
        ::setenv("KVGRID_POISON", kept.c_str(), 1);
}

// Two sequences, of which one fits: every turn all blocks of one leave and all of the other come.
// Of the GPU's, of 68 MiB each, that takes milliseconds, where what reads them is enqueued within a
// fraction of one.
#ifdef KVGRID_TEST_CUDA
constexpr int prompt = 4100, block_size_of_turns = 256, heads_of_turns = 8;
#else
constexpr int prompt = 515, block_size_of_turns = 32, heads_of_turns = 1;
#endif
constexpr int blocks_of_turns = 17, turns = 8;

std::vector<std::vector<float>> inTurns(bool tight, std::unique_ptr<Device> device) {
    RigShape setup{.block_size = block_size_of_turns,
                   .layers = 4,
                   .kv_heads = heads_of_turns,
                   .query_heads = heads_of_turns,
                   .head_dim = 128,
                   .rotary_dim = 0,
                   .max_sequences = 2,
                   .max_length = std::int64_t{blocks_of_turns} * block_size_of_turns,
                   .device_blocks = tight ? blocks_of_turns : 2 * blocks_of_turns,
                   .host_blocks = tight ? 2 * blocks_of_turns : 0,
                   .q_of_prefill = false};
    Rig rig(setup, std::move(device));
    std::vector<SequenceId> ids;
    for (int i = 0; i < 2; ++i) {
        ids.push_back(rig.allocate(setup.max_length));
        for (int part = 0; part < 5; ++part)
            rig.step(Requests().run(ids.back(), prompt / 5), false);
    }
    const test::SlowWork slow(rig.device());
    std::vector<std::vector<float>> outputs;
    for (int turn = 0; turn < turns; ++turn) {
        const SequenceId id = ids[static_cast<std::size_t>(turn % 2)];
        outputs.push_back(rig.step(Requests().run(id, 3)));
        // What the last append of a turn writes is late, and its block leaves next.
        rig.begin(Requests().run(id, 3));
        for (int layer = 0; layer < setup.layers; ++layer) {
            rig.uploadInputs(layer, false);
            if (layer == setup.layers - 1) slow.enqueue(rig.stream());
            EXPECT_TRUE(rig.appendUploaded(layer, false));
        }
        EXPECT_TRUE(rig.advance());
    }
    if (tight) {
        EXPECT_EQ(rig.coordinator().restoredBlocks(), turns * blocks_of_turns);
    }
    return outputs;
}

int turnsThatDiffer(const std::vector<std::vector<float>>& a,
                    const std::vector<std::vector<float>>& b) {
    int count = 0;
    for (std::size_t turn = 0; turn < a.size(); ++turn)
        count += test::sameBits(a[turn], b.at(turn)) ? 0 : 1;
    return count;
}

// Blocks that leave hold what was appended, blocks that came are there when they are read; and that
// is no luck: when the streams of either kind do not wait for the other, the bits are wrong.
TEST_F(ShardTest, TheStreamsWaitForEachOther) {
    using test::Streams;
    const auto reference = inTurns(false, DeviceTraits::make());
    for (const auto& [late, deaf] : {std::pair{Streams::of_steps, Streams::of_copies},
                                     std::pair{Streams::of_copies, Streams::of_steps}}) {
        EXPECT_EQ(turnsThatDiffer(inTurns(true, test::makeLate(late)), reference), 0);
        EXPECT_GT(turnsThatDiffer(inTurns(true, test::makeLate(late, deaf)), reference), 0)
            << "without the waits of the streams of "
            << (deaf == Streams::of_copies ? "copies" : "steps");
    }
}

}  // namespace
}  // namespace kvgrid
