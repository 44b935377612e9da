// Offsets beyond 2^31 and 2^32 elements: faults 1 to 5 of comparable systems were 32-bit products
// here. The memory is sparse, so only what is touched is there.
#include "tests/kernels/paged_world.h"

namespace kvgrid::test {
namespace {

constexpr std::int64_t row_bytes = 128;  // 64 elements of 16 bits
constexpr int head_dim = 64;

template <typename Traits>
class OffsetsTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;
    const Model model_{.query_heads = 2, .kv_heads = 1, .head_dim = head_dim};

    // Appends and attends `tokens` tokens of sequence 0, whose blocks are `ids`, in a pool of these
    // strides, and compares the output with the oracle and the gathered K and V with the inputs.
    void check(const PoolView& pool, const std::vector<std::int32_t>& ids, std::int64_t layer,
               std::int64_t tokens) {
        Device& device = *device_;
        const auto table = DeviceArray<std::int32_t>::of(device, ids);
        const BlockTableView tables{table.data(), static_cast<std::int64_t>(ids.size())};
        const auto runs =
            DeviceArray<kvgrid::Run>::of(device, {{.slot = 0,
                                                   .rows = static_cast<std::int32_t>(tokens),
                                                   .first_row = 0,
                                                   .first_position = 0}});
        const auto k = numbers(Kind::k, tokens);
        const auto v = numbers(Kind::v, tokens);
        const auto device_k = DeviceArray<std::uint16_t>::of(device, k);
        const auto device_v = DeviceArray<std::uint16_t>::of(device, v);
        device.operations().append({.rows = tokens,
                                    .query_heads = 2,
                                    .kv_heads = 1,
                                    .head_dim = head_dim,
                                    .k = device_k.data(),
                                    .v = device_v.data(),
                                    .runs = runs.data(),
                                    .run_count = 1,
                                    .tables = tables,
                                    .pool = pool,
                                    .layer = layer},
                                   device.defaultStream());
        // Where the rows lie, by arithmetic of this test's own: an error that append, gather and
        // attend share would pass unseen otherwise.
        for (std::int64_t token = 0; token < tokens; ++token) {
            const std::byte* const row =
                pool.data + layer * pool.layer_stride +
                ids[static_cast<std::size_t>(token / pool.block_size)] * pool.block_stride +
                token % pool.block_size * pool.token_stride;
            EXPECT_TRUE(sameBits(rowOf(k, token), download(row, token)));
            EXPECT_TRUE(sameBits(rowOf(v, token), download(row + pool.value_offset, token)));
        }
        const auto gathered_k = DeviceArray<std::uint16_t>::poisoned(device, k.size());
        const auto gathered_v = DeviceArray<std::uint16_t>::poisoned(device, v.size());
        device.operations().gather({.slot = 0,
                                    .tokens = tokens,
                                    .kv_heads = 1,
                                    .head_dim = head_dim,
                                    .tables = tables,
                                    .pool = pool,
                                    .layer = layer,
                                    .k = gathered_k.data(),
                                    .v = gathered_v.data()},
                                   device.defaultStream());
        EXPECT_TRUE(sameBits(k, gathered_k.download()));
        EXPECT_TRUE(sameBits(v, gathered_v.download()));
        expectAttention(model_, pool, tables, layer, tokens - 1);
    }

    static std::vector<std::uint16_t> rowOf(const std::vector<std::uint16_t>& numbers,
                                            std::int64_t token) {
        return {numbers.begin() + token * head_dim, numbers.begin() + (token + 1) * head_dim};
    }

    std::vector<std::uint16_t> download(const std::byte* row, std::int64_t position) const {
        std::vector<std::uint16_t> stored(head_dim);
        device_->copy(stored.data(), row, row_bytes, device_->defaultStream());
        device_->synchronize(device_->defaultStream());
        std::vector<std::uint16_t> bits;
        for (int i = 0; i < head_dim; ++i)
            bits.push_back(stored[static_cast<std::size_t>(
                storedElement(*device_, position, i, head_dim, NumberFormat::bf16))]);
        return bits;
    }

    std::vector<std::uint16_t> numbers(Kind kind, std::int64_t tokens) const {
        std::vector<std::uint16_t> result;
        for (std::int64_t position = 0; position < tokens; ++position)
            for (int i = 0; i < head_dim; ++i)
                result.push_back(model_.stored(kind, 0, position, 0, i));
        return result;
    }

    void expectAttention(const Model& model, const PoolView& pool, const BlockTableView& tables,
                         std::int64_t layer, std::int64_t position) {
        Device& device = *device_;
        std::vector<float> q;
        for (int i = 0; i < 2 * head_dim; ++i)
            q.push_back(model.value(Kind::q, 0, position, i / head_dim, i % head_dim));
        const auto device_q = DeviceArray<float>::of(device, q);
        const auto runs = DeviceArray<kvgrid::Run>::of(
            device, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = position}});
        const auto out = DeviceArray<float>::poisoned(device, 2 * head_dim);
        const auto lse = DeviceArray<float>::poisoned(device, 2);
        const auto workspace = DeviceArray<std::byte>::poisoned(
            device, device.operations().attendWorkspaceBytes(1, 2, head_dim));
        planAndAttend(device,
                      {.query_heads = 2,
                       .kv_heads = 1,
                       .head_dim = head_dim,
                       .scale = model.softmaxScale(),
                       .q = device_q.data(),
                       .runs = runs.data(),
                       .run_count = 1,
                       .max_position = position,
                       .tables = tables,
                       .pool = pool,
                       .layer = layer,
                       .out = out.data(),
                       .lse = lse.data(),
                       .workspace = workspace.data(),
                       .workspace_bytes = workspace.size()},
                      1);
        const PagedWorld world(device, model, {}, {{.id = 0, .length = position + 1}});
        expectOracle(world, {out.download(), lse.download()}, 0, 0, position);
    }
};
TYPED_TEST_SUITE(OffsetsTest, Devices, DeviceNames);

// vllm#1486, flashinfer#3130: live data only in the last block, and around each power of two.
TYPED_TEST(OffsetsTest, PoolBeyond32BitsOfElements) {
    constexpr std::int64_t block_size = 64;
    const Placement placement{.layers = 2};
    constexpr std::int64_t block_elements = 2 * 2 * block_size * head_dim;
    const std::int64_t blocks = (std::int64_t{1} << 32) / block_elements + 5;
    PoolView pool = strides(this->model_, placement, block_size, blocks);
    const auto memory = TestFixture::Make::makeSparse(
        *this->device_, static_cast<std::size_t>(blocks * pool.block_stride));
    if (memory->data() == nullptr) GTEST_SKIP() << "no room for a pool of 2^32 elements";
    pool.data = memory->data();
    for (const std::int64_t elements :
         {std::int64_t{1} << 30, std::int64_t{1} << 31, std::int64_t{1} << 32}) {
        const auto id = static_cast<std::int32_t>(elements / block_elements);
        this->check(pool, {id - 1, id, id + 1}, 1, 3 * block_size - 5);
    }
    const auto last = static_cast<std::int32_t>(blocks - 1);
    this->check(pool, {last}, 1, 50);
}

// vllm#50427: K and V in one buffer halve the bound. Layer-major, the last layer.
TYPED_TEST(OffsetsTest, LayerMajorPoolBeyond32BitsOfElements) {
    constexpr std::int64_t block_size = 16;
    const Placement placement{.layout = Layout::layer_major, .layers = 4};
    const std::int64_t blocks = (std::int64_t{1} << 29) / (block_size * head_dim) + 3;
    PoolView pool = strides(this->model_, placement, block_size, blocks);
    const auto memory = TestFixture::Make::makeSparse(
        *this->device_, static_cast<std::size_t>(2 * 4 * pool.layer_stride));
    if (memory->data() == nullptr) GTEST_SKIP() << "no room for a pool of 2^32 elements";
    pool.data = memory->data();
    const auto last = static_cast<std::int32_t>(blocks - 1);
    for (const std::int64_t layer : {0, 3})
        this->check(pool, {last, 0, last - 1}, layer, 40);
}

// Rows and scales of one-byte numbers, where 32 bits would not do for either's block.
TYPED_TEST(OffsetsTest, ScalesBeyond32Bits) {
    Device& device = *this->device_;
    const Model model{
        .format = NumberFormat::int8, .query_heads = 2, .kv_heads = 1, .head_dim = head_dim};
    constexpr std::int64_t block_size = 16;
    constexpr std::int64_t tokens = 40;
    for (const Layout layout : {Layout::block_major, Layout::layer_major}) {
        const Placement placement{.layout = layout, .layers = 2};
        const std::int64_t blocks = (std::int64_t{5} << 30) / (4 * block_size * head_dim);
        PoolView pool = strides(model, placement, block_size, blocks);
        const std::int64_t bytes =
            layout == Layout::layer_major ? 2 * pool.value_offset : blocks * pool.block_stride;
        const auto memory = TestFixture::Make::makeSparse(device, static_cast<std::size_t>(bytes));
        if (memory->data() == nullptr) GTEST_SKIP() << "no room for 5 GB";
        pool.data = memory->data();
        const auto last = static_cast<std::int32_t>(blocks - 1);
        const std::vector<std::int32_t> ids{last, 0, last - 1};
        const auto table = DeviceArray<std::int32_t>::of(device, ids);
        const BlockTableView tables{table.data(), 3};
        const auto runs = DeviceArray<kvgrid::Run>::of(
            device, {{.slot = 0, .rows = tokens, .first_row = 0, .first_position = 0}});
        std::vector<float> numbers[2];
        for (const Kind kind : {Kind::k, Kind::v})
            for (int i = 0; i < tokens * head_dim; ++i)
                numbers[kind == Kind::v].push_back(
                    model.value(kind, 0, i / head_dim, 0, i % head_dim));
        const auto k = DeviceArray<float>::of(device, numbers[0]);
        const auto v = DeviceArray<float>::of(device, numbers[1]);
        device.operations().append({.rows = tokens,
                                    .query_heads = 2,
                                    .kv_heads = 1,
                                    .head_dim = head_dim,
                                    .input_format = NumberFormat::fp32,
                                    .k = k.data(),
                                    .v = v.data(),
                                    .runs = runs.data(),
                                    .run_count = 1,
                                    .tables = tables,
                                    .pool = pool,
                                    .layer = 1},
                                   device.defaultStream());
        // By arithmetic of this test's own.
        for (const Kind kind : {Kind::k, Kind::v})
            for (std::int64_t token = 0; token < tokens; ++token) {
                const std::int64_t block = ids[static_cast<std::size_t>(token / block_size)];
                std::uint16_t scale = 0;
                device.copy(&scale,
                            pool.data + pool.layer_stride + block * pool.block_stride +
                                pool.scale_offset + token % block_size * 2 +
                                (kind == Kind::v ? pool.value_offset : 0),
                            2, device.defaultStream());
                device.synchronize(device.defaultStream());
                EXPECT_EQ(scale, model.row(kind, 0, token, 0).scale);
            }
        for (const NumberFormat format : kv_formats)
            if (format == model.format) this->expectAttention(model, pool, tables, 1, tokens - 1);
    }
}

// ROCm/aiter#2608: block size 1, more than 4 GB of K a layer.
TYPED_TEST(OffsetsTest, BlockSizeOne) {
    const Placement placement{.layout = Layout::layer_major, .layers = 2};
    const std::int64_t blocks = (std::int64_t{5} << 30) / row_bytes;
    PoolView pool = strides(this->model_, placement, 1, blocks);
    const auto memory = TestFixture::Make::makeSparse(
        *this->device_, static_cast<std::size_t>(4 * pool.layer_stride));
    if (memory->data() == nullptr) GTEST_SKIP() << "no room for 20 GB";
    pool.data = memory->data();
    std::vector<std::int32_t> ids;
    for (std::int32_t i = 0; i < 300; ++i)
        ids.push_back(i % 2 == 0 ? static_cast<std::int32_t>(blocks - 1 - i) : 7 * i);
    this->check(pool, ids, 1, 300);
}

// sglang#20389: token times query stride. The last of so many rows that q and out pass 2^32
// elements.
template <typename Traits>
class LongQueryTest : public OnDevice<Traits> {
protected:
    using OnDevice<Traits>::device_;
    static constexpr std::int64_t query_heads = 128;
    static constexpr std::int64_t width = query_heads * head_dim;
    static constexpr std::int64_t rows = (std::int64_t{1} << 32) / width + 3;
    static constexpr std::int64_t row = rows - 1;
    // Of a plan whose two halves have more than 2^31 bytes each, on CUDA.
    static constexpr std::int64_t plan_rows = 3 * rows;
    static constexpr std::int64_t position = 19;

    LongQueryTest() {
        // What the oracle and the pool hold is rounded to bf16, as the inputs of append are.
        model_.number = [exact = Model{}](Kind kind, int id, std::int64_t at, int head, int i) {
            return fromBits(NumberFormat::bf16, exact.stored(kind, id, at, head, i));
        };
    }

    // bf16 of the row's heads, at its place in an input tensor of `rows` rows.
    auto input(Kind kind, int heads) {
        auto memory = Traits::makeSparse(*device_, rows * heads * head_dim * 2);
        if (memory->data() == nullptr) return memory;
        std::vector<std::uint16_t> bits;
        for (int i = 0; i < heads * head_dim; ++i)
            bits.push_back(model_.stored(kind, 0, position, i / head_dim, i % head_dim));
        device_->copy(memory->data() + row * heads * head_dim * 2, bits.data(), bits.size() * 2,
                      device_->defaultStream());
        return memory;
    }

    std::vector<float> download(const auto& memory, std::int64_t row_numbers) {
        std::vector<float> numbers(static_cast<std::size_t>(row_numbers));
        device_->copy(numbers.data(), memory.data() + row * row_numbers * 4, numbers.size() * 4,
                      device_->defaultStream());
        device_->synchronize(device_->defaultStream());
        return numbers;
    }

    void appendAndAttend() {
        Device& device = *device_;
        const PagedWorld world(device, model_, {}, {{.id = 0, .length = position + 1}});
        const auto q = input(Kind::q, query_heads);
        const auto k = input(Kind::k, 1);
        const auto v = input(Kind::v, 1);
        const auto rotated = Traits::makeSparse(device, rows * width * 4);
        const auto out = Traits::makeSparse(device, rows * width * 4);
        const auto lse = Traits::makeSparse(device, rows * query_heads * 4);
        for (const auto* memory : {&q, &k, &v, &rotated, &out, &lse})
            if ((*memory)->data() == nullptr) GTEST_SKIP() << "no room for 2^32 elements of q";
        const std::size_t plan_bytes =
            device.operations().attendPlanBytes(plan_rows, 1, query_heads);
        if (device.freeMemory() < static_cast<std::int64_t>(plan_bytes) + (std::int64_t{1} << 30))
            GTEST_SKIP() << "no room for a plan of " << plan_bytes << " bytes";
        const auto runs = DeviceArray<kvgrid::Run>::of(
            device, {{.slot = 0, .rows = 1, .first_row = row, .first_position = position}});
        device.operations().append({.rows = rows,
                                    .query_heads = query_heads,
                                    .kv_heads = 1,
                                    .head_dim = head_dim,
                                    .q = q->data(),
                                    .k = k->data(),
                                    .v = v->data(),
                                    .q_rotated = reinterpret_cast<float*>(rotated->data()),
                                    .runs = runs.data(),
                                    .run_count = 1,
                                    .tables = world.tables(),
                                    .pool = world.pool(),
                                    .layer = world.layer()},
                                   device.defaultStream());
        // The pool held these K and V already.
        EXPECT_TRUE(sameBits(world.image(), world.downloadPool()));
        const auto workspace = DeviceArray<std::byte>::poisoned(
            device, device.operations().attendWorkspaceBytes(1, query_heads, head_dim));
        planAndAttend(device,
                      {.query_heads = query_heads,
                       .kv_heads = 1,
                       .head_dim = head_dim,
                       .scale = model_.softmaxScale(),
                       .q = reinterpret_cast<const float*>(rotated->data()),
                       .runs = runs.data(),
                       .run_count = 1,
                       .max_position = position,
                       .tables = world.tables(),
                       .pool = world.pool(),
                       .layer = world.layer(),
                       .out = reinterpret_cast<float*>(out->data()),
                       .lse = reinterpret_cast<float*>(lse->data()),
                       .workspace = workspace.data(),
                       .workspace_bytes = workspace.size()},
                      plan_rows);
        expectOracle(world, {download(*out, width), download(*lse, query_heads)}, 0, 0, position);
    }

    Model model_{.query_heads = query_heads, .kv_heads = 1, .head_dim = head_dim};
};
TYPED_TEST_SUITE(LongQueryTest, Devices, DeviceNames);

// One thread writes the states where they belong.
TYPED_TEST(LongQueryTest, OneThread) {
    this->device_ = TypeParam::makeParallel(1);
    this->appendAndAttend();
}

// Several threads fold them from the workspace.
TYPED_TEST(LongQueryTest, SeveralThreads) {
    this->device_ = TypeParam::makeParallel(4);
    this->appendAndAttend();
}

// Blocks copied between tiers at offsets past 2^32 bytes.
TYPED_TEST(OffsetsTest, CopyBlocksBeyond32Bits) {
    Device& device = *this->device_;
    constexpr std::int64_t block_bytes = 65536;
    constexpr std::int64_t blocks = (std::int64_t{9} << 30) / block_bytes;
    const auto memory = TestFixture::Make::makeSparse(device, blocks * block_bytes);
    if (memory->data() == nullptr) GTEST_SKIP() << "no room for 9 GB";
    const std::vector<std::uint16_t> image(block_bytes / 2, 0x1234);
    constexpr auto last = static_cast<std::int32_t>(blocks - 1);
    device.copy(memory->data() + last * block_bytes, image.data(), block_bytes,
                device.defaultStream());
    const BlockRuns runs{memory->data(), block_bytes, 1, 0, 1, 0, block_bytes};
    const std::vector<BlockPair> pairs{{.source = last, .destination = last - 1}};
    device.operations().copyBlocks({runs, runs, pairs.data(), 1}, device.defaultStream());
    std::vector<std::uint16_t> copied(image.size());
    device.copy(copied.data(), memory->data() + (last - 1) * block_bytes, block_bytes,
                device.defaultStream());
    device.synchronize(device.defaultStream());
    EXPECT_TRUE(sameBits(image, copied));
}

}  // namespace
}  // namespace kvgrid::test
