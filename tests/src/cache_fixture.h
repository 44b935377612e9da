// A small cache on the ranks of the test, with inputs that follow from where they belong.
#pragma once

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>
#include <xxhash.h>

#include <kvgrid/cache.h>

#include "tests/device_process.h"

namespace kvgrid {

inline constexpr int query_heads = 8;
inline constexpr int kv_heads = 4;
inline constexpr int head_dim = 64;

inline CacheConfig smallConfig() {
    CacheConfig config;
    config.geometry = Geometry::uniform(1, query_heads, kv_heads, head_dim);
    config.input_format = NumberFormat::fp32;
    config.rotary.dim = head_dim;
    config.block_size = 16;
    config.device_blocks = 256;
    config.max_sequences = 8;
    config.max_sequence_length = 1024;
    config.max_step_tokens = 1024;
    return config;
}

inline float valueAt(int what, SequenceId sequence, std::int64_t position, int head, int element) {
    const std::int64_t key[] = {what, static_cast<std::int64_t>(sequence), position, head, element};
    return static_cast<float>(
               static_cast<double>(XXH3_64bits(key, sizeof(key)) >> 40) / double{1 << 24} - 0.5) *
           3.4F;
}

// Inputs of a rank's heads [first, first + heads) for the rows of a step; what 0: q, 1: k, 2: v,
// and 3 more for each layer further.
inline std::vector<float> inputs(const Step& step, int what, int first, int heads) {
    std::vector<float> values;
    values.reserve(step.rows().size() * static_cast<std::size_t>(heads) * head_dim);
    for (const TokenRow& row : step.rows()) {
        for (int head = first; head < first + heads; ++head) {
            for (int element = 0; element < head_dim; ++element) {
                values.push_back(valueAt(what, row.sequence, row.position, head, element));
            }
        }
    }
    return values;
}

using FloatsOnDevice = test::DeviceVector<float>;

class CacheTest : public test::OnDeviceProcess {
protected:
    static Cache make(const CacheConfig& config) { return Cache::create(*process, config).value(); }

    static SequenceId allocate(Cache& cache, std::int64_t max_length, int priority = 0) {
        const Step step = cache.begin(Requests().allocate(max_length, priority)).value();
        EXPECT_EQ(step.answers().front().status, Answer::Status::done)
            << step.answers().front().why;
        return step.answers().front().sequence;
    }

    static Result<void> append(Cache& cache, const Step& step, int layer = 0) {
        const CacheHeads heads = cache.heads();
        const FloatsOnDevice q(*process,
                               inputs(step, 3 * layer, heads.first_query_head, heads.query_heads));
        const FloatsOnDevice k(*process,
                               inputs(step, 3 * layer + 1, heads.first_kv_head, heads.kv_heads));
        const FloatsOnDevice v(*process,
                               inputs(step, 3 * layer + 2, heads.first_kv_head, heads.kv_heads));
        return cache.append(step, layer, q.data(), k.data(), v.data());
    }

    static std::vector<float> attend(Cache& cache, const Step& step,
                                     Output output = Output::gathered) {
        const int heads = output == Output::gathered ? query_heads : cache.heads().query_heads;
        const FloatsOnDevice out(*process,
                                 step.rows().size() * static_cast<std::size_t>(heads) * head_dim);
        EXPECT_TRUE(cache.attend(step, 0, out.data(), output));
        return out.download();
    }

    // One step of requests that are all answered done.
    static std::vector<float> run(Cache& cache, const Requests& requests, bool attended = true) {
        const Step step = cache.begin(requests).value();
        for (const Answer& answer : step.answers())
            EXPECT_EQ(answer.status, Answer::Status::done) << answer.why;
        EXPECT_TRUE(append(cache, step));
        std::vector<float> out = attended ? attend(cache, step) : std::vector<float>();
        EXPECT_TRUE(cache.advance(step));
        return out;
    }
};

}  // namespace kvgrid
