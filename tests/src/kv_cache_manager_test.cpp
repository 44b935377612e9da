// The per-sequence calls, with the usage snippets of the interface's description as they stand; a
// Result's .value() is the only addition.
#include <kvgrid/kv_cache_manager.h>

#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/number_formats.h"
#include "tests/device_process.h"

namespace kvgrid {
namespace {

using testing::HasSubstr;

constexpr int layers = 2;
constexpr int head_dim = 64;

// fp16 bits that depend on where they belong; never NaN or infinity.
std::uint16_t bitsAt(int what, int seq_id, int layer, int position, int element) {
    std::uint32_t x =
        static_cast<std::uint32_t>(what) * 0x9E3779B9U ^ static_cast<std::uint32_t>(seq_id);
    for (const int part : {layer, position, element})
        x = (x ^ static_cast<std::uint32_t>(part)) * 0x85EBCA6BU + 1;
    return static_cast<std::uint16_t>((x >> 12) & 0xBFFF);
}

struct TokenBits {
    std::vector<std::uint16_t> k, v;
};

TokenBits bitsOf(int seq_id, int layer, int first, int count, int heads) {
    TokenBits bits;
    for (int position = first; position < first + count; ++position) {
        for (int element = 0; element < heads * head_dim; ++element) {
            bits.k.push_back(bitsAt(1, seq_id, layer, position, element));
            bits.v.push_back(bitsAt(2, seq_id, layer, position, element));
        }
    }
    return bits;
}

// In device memory.
class Tokens {
public:
    explicit Tokens(const TokenBits& bits)
        : k_(*Process::current(), bits.k),
          v_(*Process::current(), bits.v) {}
    [[nodiscard]] const half* k() const { return reinterpret_cast<const half*>(k_.data()); }
    [[nodiscard]] const half* v() const { return reinterpret_cast<const half*>(v_.data()); }

private:
    test::DeviceVector<std::uint16_t> k_, v_;
};

Tokens tokensOf(int seq_id, int layer, int first, int count, int heads) {
    return Tokens(bitsOf(seq_id, layer, first, count, heads));
}

class KVCacheManagerTest : public test::OnDeviceProcess {
protected:
    static int kvHeads() { return 4; }
    static int localHeads() { return kvHeads() / process->size(); }

    static void append(KVCacheManager& cache, int seq_id, int layer, int count) {
        const Tokens tokens = tokensOf(seq_id, layer, cache.getSeqLen(seq_id), count, localHeads());
        cache.appendKV(seq_id, layer, tokens.k(), tokens.v(), count);
    }

    static void expectHolds(KVCacheManager& cache, int seq_id, int length) {
        ASSERT_EQ(cache.getSeqLen(seq_id), length);
        for (int layer = 0; layer < layers; ++layer) {
            const auto [k, v] = cache.getCache(seq_id, layer);
            const TokenBits bits = bitsOf(seq_id, layer, 0, length, localHeads());
            EXPECT_EQ(test::downloaded<std::uint16_t>(*process, k, bits.k.size()), bits.k)
                << "layer " << layer;
            EXPECT_EQ(test::downloaded<std::uint16_t>(*process, v, bits.v.size()), bits.v)
                << "layer " << layer;
        }
    }
};

// An engine as the snippets have it: prefill, then token by token, all layers before each advance.
struct Engine {
    KVCacheManager& cache;
    int heads;

    void generate(int prompt_tokens, int new_tokens, int seq_id) {
        step(seq_id, prompt_tokens);
        for (int i = 0; i < new_tokens; ++i)
            step(seq_id, 1);
    }

    void step(int seq_id, int num_tokens) {
        for (int layer_idx = 0; layer_idx < layers; ++layer_idx) {
            const Tokens tokens =
                tokensOf(seq_id, layer_idx, cache.getSeqLen(seq_id), num_tokens, heads);
            const half* k = tokens.k();
            const half* v = tokens.v();
            cache.appendKV(seq_id, layer_idx, k, v, num_tokens);
        }
        cache.advanceSeqLen(seq_id, num_tokens);
    }
};

TEST_F(KVCacheManagerTest, TheSnippetsRun) {
    KVCacheManager cache(4, layers, 4096, kvHeads(), head_dim);
    Engine engine{cache, localHeads()};
    const int prompt1 = 100, prompt2 = 7, prompt3 = 300;
    const int config = 5;

    // Allocate multiple sequences
    int seq1 = cache.allocateSequence(2048).value();
    int seq2 = cache.allocateSequence(2048).value();
    int seq3 = cache.allocateSequence(4096).value();

    // Independent generation
    engine.generate(prompt1, config, seq1);
    engine.generate(prompt2, config, seq2);
    engine.generate(prompt3, config, seq3);

    expectHolds(cache, seq1, 105);
    expectHolds(cache, seq2, 12);
    expectHolds(cache, seq3, 305);

    // Release when done
    cache.releaseSequence(seq1);
    EXPECT_THROW((void)cache.getSeqLen(seq1), Error);
    expectHolds(cache, seq3, 305);
}

TEST_F(KVCacheManagerTest, WhereAppendWritesFollowsFromTheLengthAlone) {
    KVCacheManager cache(2, layers, 256, kvHeads(), head_dim);
    const int a = cache.allocateSequence(256).value();
    const int b = cache.allocateSequence(256).value();
    append(cache, a, 1, 10);  // layers out of order, repeated, and between another sequence's
    append(cache, b, 0, 3);
    append(cache, a, 0, 10);
    append(cache, a, 1, 10);
    EXPECT_EQ(cache.getSeqLen(a), 0);
    append(cache, b, 1, 3);
    cache.advanceSeqLen(a, 10);
    cache.advanceSeqLen(b, 3);
    expectHolds(cache, a, 10);
    expectHolds(cache, b, 3);
}

TEST_F(KVCacheManagerTest, AdvancingByLessDropsTheRest) {
    KVCacheManager cache(1, layers, 256, kvHeads(), head_dim);
    const int a = cache.allocateSequence(256).value();
    append(cache, a, 0, 8);
    append(cache, a, 1, 8);
    cache.advanceSeqLen(a, 5);
    expectHolds(cache, a, 5);
    EXPECT_THROW(cache.advanceSeqLen(a, 1), Error);  // the other three were dropped
    cache.advanceSeqLen(a, 0);
    expectHolds(cache, a, 5);
    append(cache, a, 0, 2);
    append(cache, a, 1, 2);
    cache.advanceSeqLen(a, 2);
    expectHolds(cache, a, 7);
}

// A row of multiples of 1/8 up to 127/8 is what int8 holds exactly.
TEST_F(KVCacheManagerTest, LowBitTokensComeBackInFp16) {
    CacheConfig config;
    config.geometry = Geometry::uniform(layers, kvHeads(), kvHeads(), head_dim);
    config.kv_format = NumberFormat::int8;
    config.input_format = NumberFormat::fp16;
    config.max_sequences = 1;
    config.max_sequence_length = 64;
    config.max_step_tokens = 64;
    config.device_blocks = 1;
    KVCacheManager cache(*process, config);
    const int a = cache.allocateSequence(64).value();
    TokenBits bits;
    for (int i = 0; i < 3 * localHeads() * head_dim; ++i) {
        const int eighths = i % head_dim == 0 ? -127 : i * 37 % 255 - 127;
        bits.k.push_back(fp16FromFloat(static_cast<float>(eighths) / 8));
        bits.v.push_back(fp16FromFloat(static_cast<float>(-eighths) / 8));
    }
    const Tokens tokens(bits);
    for (int layer = 0; layer < layers; ++layer)
        cache.appendKV(a, layer, tokens.k(), tokens.v(), 3);
    cache.advanceSeqLen(a, 3);
    const auto [k, v] = cache.getCache(a, 1);
    EXPECT_EQ(test::downloaded<std::uint16_t>(*process, k, bits.k.size()), bits.k);
    EXPECT_EQ(test::downloaded<std::uint16_t>(*process, v, bits.v.size()), bits.v);

    config.kv_format = NumberFormat::bf16;
    EXPECT_THROW(KVCacheManager(*process, config), Error);
}

TEST_F(KVCacheManagerTest, MisuseThrowsAndNamesIt) {
    KVCacheManager cache(1, layers, 64, kvHeads(), head_dim);
    const int a = cache.allocateSequence(16).value();
    EXPECT_EQ(cache.allocateSequence(16).error().code, ErrorCode::does_not_fit);
    EXPECT_EQ(cache.allocateSequence(65).error().code, ErrorCode::invalid_argument);

    const Tokens tokens = tokensOf(a, 0, 0, 17, localHeads());
    const auto thrown = [](auto call) {
        try {
            call();
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string("nothing was thrown");
    };
    EXPECT_THAT(thrown([&] { cache.appendKV(a, 0, tokens.k(), tokens.v(), 17); }), HasSubstr("16"));
    EXPECT_THAT(thrown([&] { cache.appendKV(a, 0, nullptr, tokens.v(), 1); }),
                HasSubstr("k is null"));
    EXPECT_THAT(thrown([&] { cache.appendKV(a, layers, tokens.k(), tokens.v(), 1); }),
                HasSubstr("layer 2"));
    EXPECT_THAT(thrown([&] { cache.appendKV(12345, 0, tokens.k(), tokens.v(), 1); }),
                HasSubstr("12345"));
    append(cache, a, 0, 4);
    EXPECT_THAT(thrown([&] { cache.advanceSeqLen(a, 4); }), HasSubstr("layer 1"));
    EXPECT_THAT(thrown([&] { cache.advanceSeqLen(a, -1); }), HasSubstr("-1"));
    append(cache, a, 1, 4);
    EXPECT_THAT(thrown([&] { cache.advanceSeqLen(a, 5); }), HasSubstr("has appended 4"));
    cache.advanceSeqLen(a, 4);
    expectHolds(cache, a, 4);
    cache.releaseSequence(a);
    EXPECT_THAT(thrown([&] { cache.releaseSequence(a); }), HasSubstr(std::to_string(a)));
    EXPECT_THROW((KVCacheManager(1, layers, 64, kvHeads(), 72)), Error);
}

}  // namespace
}  // namespace kvgrid
