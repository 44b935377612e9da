#include <kvgrid/config.h>

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

namespace kvgrid {
namespace {

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

template <typename Value>
std::string errorOf(const Result<Value>& result) {
    if (result) return "(no error)";
    EXPECT_EQ(result.error().code, ErrorCode::invalid_argument);
    return result.error().message;
}

CacheConfig good() {
    CacheConfig config;
    config.geometry = Geometry::uniform(4, 32, 8, 128);
    config.rotary = {.dim = 128, .theta = 500000.0, .scaling = Llama3Scaling{}};
    config.device_blocks = 100;
    config.max_sequences = 4;
    config.max_sequence_length = 4096;
    config.max_step_tokens = 16;
    return config;
}

// Of the good configuration after `change`.
std::string errorAfter(const std::function<void(CacheConfig&)>& change) {
    CacheConfig config = good();
    change(config);
    return errorOf(validate(config));
}

TEST(Geometry, Uniform) {
    const Geometry geometry = Geometry::uniform(3, 8, 2, 64);
    EXPECT_EQ(geometry.layers, 3);
    EXPECT_EQ(geometry.query_heads, 8);
    ASSERT_EQ(geometry.groups.size(), 1U);
    EXPECT_EQ(geometry.groups.front().layers, (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(geometry.groups.front().kv_heads, 2);
    EXPECT_EQ(geometry.groups.front().head_dim, 64);
    EXPECT_EQ(geometry.groups.front().window, 0);
}

TEST(ChooseGrid, AutoPutsAllRanksOnTheHeadAxis) {
    const Geometry geometry = Geometry::uniform(4, 32, 8, 128);
    for (const int ranks : {1, 2, 4, 8}) {
        EXPECT_EQ(chooseGrid(geometry, ranks), (Grid{.heads = ranks, .context = 1}));
        EXPECT_EQ(chooseGrid(geometry, ranks, {.heads = ranks, .context = 1}),
                  (Grid{.heads = ranks, .context = 1}));
    }
}

TEST(ChooseGrid, ListsTheCountsThatWouldDo) {
    EXPECT_EQ(errorOf(chooseGrid(Geometry::uniform(4, 32, 8, 128), 3)),
              "ranks: 3 does not divide the 8 KV heads; 1, 2, 4 or 8 would do");
    EXPECT_EQ(errorOf(chooseGrid(Geometry::uniform(4, 32, 8, 128), 16)),
              "ranks: 16 does not divide the 8 KV heads; 1, 2, 4 or 8 would do");
    EXPECT_EQ(errorOf(chooseGrid(Geometry::uniform(4, 71, 1, 64), 2)),
              "ranks: 2 does not divide the 1 KV heads; 1 would do");
    Geometry two = Geometry::uniform(2, 24, 12, 128);
    two.groups.front().layers = {0};
    two.groups.push_back({.layers = {1}, .kv_heads = 8, .head_dim = 128, .window = 0});
    EXPECT_EQ(errorOf(chooseGrid(two, 3)),
              "ranks: 3 does not divide the 4 KV heads; 1, 2 or 4 would do");
}

TEST(ChooseGrid, Refuses) {
    const Geometry geometry = Geometry::uniform(4, 32, 8, 128);
    EXPECT_EQ(errorOf(chooseGrid(geometry, 0)), "ranks 0: at least 1");
    EXPECT_EQ(errorOf(chooseGrid(geometry, -4)), "ranks -4: at least 1");
    EXPECT_EQ(errorOf(chooseGrid(geometry, 16, {.heads = 8, .context = 2})),
              "grid 8x2: the context axis is 1 in this version");
    EXPECT_EQ(errorOf(chooseGrid(geometry, 8, {.heads = 4, .context = 1})),
              "grid 4x1 has 4 ranks, not 8");
    EXPECT_EQ(errorOf(chooseGrid(geometry, 3, {.heads = 3, .context = 1})),
              "grid 3x1: 3 does not divide the 8 KV heads; 1, 2, 4 or 8 would do");
    EXPECT_EQ(errorOf(chooseGrid(geometry, 8, {.heads = 8, .context = 0})),
              "grid 8x0: both axes are at least 1");
    EXPECT_EQ(errorOf(chooseGrid(geometry, 8, {.heads = -8, .context = -1})),
              "grid -8x-1: both axes are at least 1");
    EXPECT_EQ(errorOf(chooseGrid(Geometry{}, 1)), "layers 0: 1 to 1048576");
}

TEST(Validate, AcceptsWhatCanBeDecoded) {
    EXPECT_TRUE(validate(good())) << errorOf(validate(good()));
    for (const int head_dim : {64, 80, 96, 128, 256}) {
        CacheConfig config = good();
        config.geometry = Geometry::uniform(4, 32, 8, head_dim);
        config.rotary.dim = 64;
        EXPECT_TRUE(validate(config)) << errorOf(validate(config));
    }
    for (const int group : {1, 71, 128}) {
        CacheConfig config = good();
        config.geometry = Geometry::uniform(4, group, 1, 128);
        EXPECT_TRUE(validate(config)) << errorOf(validate(config));
    }
    for (int block_size = 1; block_size <= 256; block_size *= 2) {
        CacheConfig config = good();
        config.block_size = block_size;
        EXPECT_TRUE(validate(config)) << errorOf(validate(config));
    }
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.rotary = {}; }), "(no error)");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.logit_softcap = 50; }), "(no error)");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.grid = {.heads = 8, .context = 1}; }),
              "(no error)");
    EXPECT_EQ(errorAfter([](CacheConfig& c) {
                  c.layout = PoolLayout::contiguous;
                  c.block_size = 0;
              }),
              "(no error)");
}

TEST(Validate, Geometry) {
    const auto geometry = [](int layers, int query_heads, int kv_heads, int head_dim) {
        return errorAfter([=](CacheConfig& c) {
            c.geometry = Geometry::uniform(layers, query_heads, kv_heads, head_dim);
        });
    };
    EXPECT_EQ(geometry(0, 32, 8, 128), "layers 0: 1 to 1048576");
    EXPECT_EQ(geometry(-1, 32, 8, 128), "layers -1: 1 to 1048576");
    EXPECT_EQ(geometry(4, 0, 8, 128), "query heads 0: 1 to 1048576");
    EXPECT_EQ(geometry(4, 32, 0, 128), "KV heads 0: 1 to 1048576");
    EXPECT_EQ(geometry(4, 32, -8, 128), "KV heads -8: 1 to 1048576");
    EXPECT_EQ(geometry(4, 32, 5, 128), "query heads 32 are not a multiple of the 5 KV heads");
    EXPECT_EQ(geometry(4, 129, 1, 128), "query heads a KV head 129: 1 to 128");
    for (const int head_dim : {1, 32, 72, 112, 127, 160, 192, 512}) {
        EXPECT_EQ(geometry(4, 32, 8, head_dim),
                  "head dim " + std::to_string(head_dim) + ": 64, 80, 96, 128 or 256");
    }
}

TEST(Validate, LayerGroups) {
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.geometry.groups.clear(); }),
              "geometry: no layer has KV");
    for (const std::int64_t window : {std::int64_t{1}, std::int64_t{128}, std::int64_t{4096}, most})
        EXPECT_EQ(errorAfter([=](CacheConfig& c) { c.geometry.groups.front().window = window; }),
                  "(no error)");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.geometry.groups.front().window = -1; }),
              "window -1: at least 0");
    EXPECT_EQ(errorAfter([](CacheConfig& c) {
                  c.geometry.groups.front().layers = {0, 2, 1};
              }),
              "geometry: layer 1 is out of order or in two groups");
    EXPECT_EQ(errorAfter([](CacheConfig& c) {
                  c.geometry.groups.front().layers = {0, 4};
              }),
              "layer 4: 0 to 3");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.geometry.groups.front().layers = {-1}; }),
              "layer -1: 0 to 3");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.geometry.groups.front().layers.clear(); }),
              "geometry: a layer group without layers");
    EXPECT_EQ(
        errorAfter([](CacheConfig& c) { c.geometry.groups.push_back(c.geometry.groups.front()); }),
        "geometry: layer 0 is out of order or in two groups");
    // Every group must be one that is decoded.
    const auto second = [](auto change) {
        return errorAfter([=](CacheConfig& c) {
            c.geometry.groups.push_back(c.geometry.groups.front());
            c.geometry.groups[0].layers = {0, 1};
            c.geometry.groups[1].layers = {2, 3};
            change(c.geometry.groups[1]);
        });
    };
    EXPECT_EQ(second([](LayerGroup& group) { group.window = 100; }), "(no error)");
    EXPECT_EQ(second([](LayerGroup& group) { group.head_dim = 72; }),
              "head dim 72: 64, 80, 96, 128 or 256");
    EXPECT_EQ(second([](LayerGroup& group) { group.kv_heads = 3; }),
              "query heads 32 are not a multiple of the 3 KV heads");
    EXPECT_EQ(second([](LayerGroup& group) { group.head_dim = 64; }), "rotary dim 128: 0 to 64");
    EXPECT_EQ(second([](LayerGroup& group) {
                  group.head_dim = 64;
                  group.rotary = RotaryEmbedding{.dim = 64, .scaling = {}};
              }),
              "(no error)");
    EXPECT_EQ(
        second([](LayerGroup& group) { group.rotary = RotaryEmbedding{.dim = 3, .scaling = {}}; }),
        "rotary dim 3 is odd");
    // Layers without KV are in no group: counted, not decoded yet.
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.geometry.groups.front().layers = {3}; }),
              "geometry: every layer must be in a layer group");
}

TEST(Validate, Grid) {
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.grid = {.heads = 3, .context = 1}; }),
              "grid 3x1: 3 does not divide the 8 KV heads; 1, 2, 4 or 8 would do");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.grid = {.heads = 4, .context = 2}; }),
              "grid 4x2: the context axis is 1 in this version");
}

TEST(Validate, Formats) {
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.kv_format = NumberFormat::fp32; }),
              "KV format fp32: fp16, bf16, fp8-e4m3 or int8");
    for (const NumberFormat format :
         {NumberFormat::fp16, NumberFormat::bf16, NumberFormat::fp8_e4m3, NumberFormat::int8})
        EXPECT_EQ(errorAfter([format](CacheConfig& c) { c.kv_format = format; }), "(no error)");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.input_format = NumberFormat::int8; }),
              "input format int8: fp32, fp16 or bf16");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.output_format = NumberFormat::int8; }),
              "output format int8: fp32, fp16 or bf16");
}

// TensorRT-LLM#16916: a scale that is not there must not become one that is.
TEST(Validate, KvScales) {
    const KvScales whole{.k = std::vector<float>(8, 0.02F), .v = std::vector<float>(8, 0.01F)};
    const auto error_with = [&](const std::function<void(CacheConfig&)>& change) {
        return errorAfter([&](CacheConfig& c) {
            c.kv_format = NumberFormat::int8;
            c.kv_scales.assign(4, whole);
            change(c);
        });
    };
    EXPECT_EQ(error_with([](CacheConfig&) {}), "(no error)");
    EXPECT_EQ(error_with([](CacheConfig& c) { c.kv_format = NumberFormat::bf16; }),
              "KV scales: bf16 has none, fp8-e4m3 and int8 have");
    EXPECT_EQ(error_with([](CacheConfig& c) { c.kv_scales.pop_back(); }),
              "KV scales: of 3 layers, there are 4");
    EXPECT_EQ(error_with([](CacheConfig& c) { c.kv_scales[1] = {}; }),
              "K scales of layer 1: 0 scales for 8 KV heads");
    EXPECT_EQ(error_with([](CacheConfig& c) { c.kv_scales[3].v.resize(1); }),
              "V scales of layer 3: 1 scales for 8 KV heads");
    const auto nan = std::numeric_limits<float>::quiet_NaN();
    const auto inf = std::numeric_limits<float>::infinity();
    for (const float wrong : {0.0F, -0.02F, nan, inf, 6e-5F, 1000.1F}) {
        const std::string k = error_with([wrong](CacheConfig& c) { c.kv_scales[2].k[5] = wrong; });
        EXPECT_EQ(k.find("K scales of layer 2, KV head 5: "), 0U) << k;
        EXPECT_NE(k.find(" is not in [2^-14, 1000]"), std::string::npos) << k;
        const std::string v = error_with([wrong](CacheConfig& c) { c.kv_scales[0].v[7] = wrong; });
        EXPECT_EQ(v.find("V scales of layer 0, KV head 7: "), 0U) << v;
    }
    for (const float right : {KvScales::least, KvScales::most})
        EXPECT_EQ(error_with([right](CacheConfig& c) { c.kv_scales[2].k[5] = right; }),
                  "(no error)");
}

TEST(Validate, Rotary) {
    const auto nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.rotary.dim = 129; }), "rotary dim 129: 0 to 128");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.rotary.dim = -2; }), "rotary dim -2: 0 to 128");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.rotary.dim = 33; }), "rotary dim 33 is odd");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.rotary.theta = 0; }),
              "rotary theta 0.000000: above 0");
    EXPECT_EQ(errorAfter([=](CacheConfig& c) { c.rotary.theta = nan; }),
              "rotary theta nan: above 0");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.softmax_scale = -1; }),
              "softmax scale -1.000000: above 0, or 0 for 1 / sqrt(head dim)");
    EXPECT_EQ(errorAfter([=](CacheConfig& c) { c.softmax_scale = nan; }),
              "softmax scale nan: above 0, or 0 for 1 / sqrt(head dim)");
}

TEST(Validate, RotaryScaling) {
    const auto nan = std::numeric_limits<double>::quiet_NaN();
    const auto infinity = std::numeric_limits<double>::infinity();
    const auto message = [](const RotaryScaling& scaling, double theta = 1e4) {
        return errorAfter([&](CacheConfig& c) {
            c.rotary.scaling = scaling;
            c.rotary.theta = theta;
        });
    };
    EXPECT_EQ(message({}), "(no error)");
    EXPECT_EQ(message(LinearScaling{.factor = 8}), "(no error)");
    EXPECT_EQ(message(YarnScaling{.factor = 32, .attention_factor = 1}), "(no error)");
    for (const double wrong : {0.0, -2.0, nan, infinity}) {
        EXPECT_EQ(message(LinearScaling{.factor = wrong}),
                  "rotary linear scaling: every factor is above 0");
        for (const Llama3Scaling& scaling :
             {Llama3Scaling{.factor = wrong}, Llama3Scaling{.low_freq_factor = wrong},
              Llama3Scaling{.high_freq_factor = wrong},
              Llama3Scaling{.original_max_position = wrong}}) {
            EXPECT_EQ(message(scaling), "rotary llama3 scaling: every factor is above 0");
        }
        for (const YarnScaling& scaling :
             {YarnScaling{.factor = wrong}, YarnScaling{.original_max_position = wrong},
              YarnScaling{.beta_fast = wrong}, YarnScaling{.beta_slow = wrong},
              YarnScaling{.attention_factor = wrong == 0 ? -1 : wrong}}) {
            EXPECT_EQ(message(scaling), "rotary yarn scaling: every factor is above 0");
        }
    }
    EXPECT_EQ(message(Llama3Scaling{.low_freq_factor = 4}),
              "rotary llama3 scaling: high_freq_factor is above low_freq_factor");
    EXPECT_EQ(message(YarnScaling{.beta_fast = 1}),
              "rotary yarn scaling: beta_fast is above beta_slow");
    EXPECT_EQ(message(YarnScaling{}, 1), "rotary theta 1.000000: above 1 in yarn scaling");
}

// As fp32, in the kernels, 1e-60 would be none and 1e60 infinite.
TEST(Validate, Softcap) {
    const auto message = [](double softcap) {
        return errorAfter([=](CacheConfig& c) { c.logit_softcap = softcap; });
    };
    EXPECT_EQ(message(-50), "logit softcap -50.000000: above 0, or 0 for none");
    for (const double wrong : {std::numeric_limits<double>::quiet_NaN(),
                               std::numeric_limits<double>::infinity(), 1e-60, 1e60, -1e60}) {
        EXPECT_NE(message(wrong).find("logit softcap "), std::string::npos) << wrong;
    }
}

TEST(Validate, BlockSize) {
    for (const int block_size : {0, -1, 3, 65, 512, std::numeric_limits<int>::min()}) {
        EXPECT_EQ(errorAfter([=](CacheConfig& c) { c.block_size = block_size; }),
                  "block size " + std::to_string(block_size) + ": a power of two from 1 to 256");
    }
}

TEST(Validate, Counts) {
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.device_blocks = 0; }),
              "device blocks 0: 1 to 2147483647");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.device_blocks = 1LL << 31; }),
              "device blocks 2147483648: 1 to 2147483647");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.host_blocks = -1; }),
              "host blocks -1: 0 to 2147483647");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.max_sequences = 0; }),
              "max sequences 0: 1 to 2147483647");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.max_sequence_length = -7; }),
              "max sequence length -7: at least 1");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.max_step_tokens = 0; }),
              "max step tokens 0: 1 to 2147483647");
    EXPECT_EQ(errorAfter([](CacheConfig& c) { c.max_sequence_length = most; }),
              "max sequence length 9223372036854775807: more than 2147483647 blocks of 64 tokens");
}

TEST(Validate, SixtyFourBitsAreTheLimit) {
    EXPECT_EQ(errorAfter([](CacheConfig& c) {
                  c.layout = PoolLayout::contiguous;
                  c.max_sequence_length = most;
              }),
              "device blocks and host blocks: the bytes of the pools are beyond 64 bits");
    EXPECT_EQ(errorAfter([](CacheConfig& c) {
                  c.geometry = Geometry::uniform(1 << 20, 1 << 20, 1 << 20, 128);
                  c.device_blocks = (1LL << 31) - 1;
              }),
              "device blocks and host blocks: the bytes of the pools are beyond 64 bits");
}

TEST(Names, AreWhatTheCommandLineTakes) {
    EXPECT_EQ(name(NumberFormat::fp32), "fp32");
    EXPECT_EQ(name(NumberFormat::fp16), "fp16");
    EXPECT_EQ(name(NumberFormat::bf16), "bf16");
    EXPECT_EQ(name(PoolLayout::block_major), "block-major");
    EXPECT_EQ(name(PoolLayout::layer_major), "layer-major");
    EXPECT_EQ(name(PoolLayout::contiguous), "contiguous");
    EXPECT_EQ(name(DeviceKind::cpu), "cpu");
    EXPECT_EQ(name(DeviceKind::cuda), "cuda");
    EXPECT_EQ(name(TransportKind::mpi), "mpi");
    EXPECT_EQ(name(TransportKind::nccl), "nccl");
}

TEST(ExitCode, OfEveryError) {
    EXPECT_EQ(exitCode(ErrorCode::invalid_argument), 2);
    EXPECT_EQ(exitCode(ErrorCode::does_not_fit), 3);
    EXPECT_EQ(exitCode(ErrorCode::unavailable), 4);
    EXPECT_EQ(exitCode(ErrorCode::deadline), 5);
    EXPECT_EQ(exitCode(ErrorCode::internal), 1);
}

}  // namespace
}  // namespace kvgrid
