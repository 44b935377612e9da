// What only the CUDA device has: graphs, page-locked memory on the other side of a copy, and
// freedom in how work is cut.
#include <cuda_runtime_api.h>

#include <bit>
#include <numeric>
#include <random>

#include "tests/kernels/paged_world.h"

namespace kvgrid::test {
namespace {

class CudaDeviceTest : public OnDevice<CudaDeviceTraits> {
protected:
    [[nodiscard]] ::cudaStream_t stream() const {
        return static_cast<::cudaStream_t>(device_->defaultStream().handle());
    }
};

TEST_F(CudaDeviceTest, SaysWhatItIs) {
    EXPECT_EQ(device_->kind(), DeviceKind::cuda);
    EXPECT_EQ(device_->description().substr(0, 5), "cuda ");
    EXPECT_NE(device_->description().find("), sm_"), std::string::npos);
    std::printf("%s\n", device_->description().c_str());
}

TEST_F(CudaDeviceTest, ADeviceThatIsNotThereIsUnavailable) {
    for (const int index : {-1, 4096}) {
        try {
            (void)makeCudaDevice(index);
            FAIL() << "device " << index;
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::unavailable);
            EXPECT_NE(std::string(error.what()).find(std::to_string(index)), std::string::npos);
        }
    }
}

TEST_F(CudaDeviceTest, AFailedCallNamesItself) {
    try {
        device_->record(nullptr, device_->defaultStream());
        FAIL() << "an event that is null";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::internal);
        EXPECT_EQ(std::string(error.what()).substr(0, 15), "cudaEventRecord");
    }
    // The device still works.
    const auto array = DeviceArray<float>::of(*device_, {1.0F, 2.0F});
    EXPECT_EQ(array.download()[1], 2.0F);
}

// Host and device round alike, whatever the number.
TEST_F(CudaDeviceTest, ConversionsAreThoseOfTheHost) {
    std::vector<float> numbers;
    for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 0x0FFF)
        numbers.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    for (std::uint32_t bits = 0x33000000U; bits < 0x33800100U; bits += 0x1FU)  // fp16's smallest
        numbers.push_back(std::bit_cast<float>(bits));
    numbers.resize(numbers.size() / 4 * 4);
    const auto source = DeviceArray<float>::of(*device_, numbers);
    for (const NumberFormat format : {NumberFormat::fp16, NumberFormat::bf16}) {
        const auto narrow = DeviceArray<std::uint16_t>::poisoned(*device_, numbers.size());
        device_->operations().output({.rows = static_cast<std::int64_t>(numbers.size()) / 4,
                                      .heads = 1,
                                      .head_dim = 4,
                                      .destination_format = format,
                                      .source = source.data(),
                                      .destination = narrow.data()},
                                     device_->defaultStream());
        const auto bits = narrow.download();
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < numbers.size(); ++i)
            wrong += bits[i] != toBits(format, numbers[i]) ? 1U : 0U;
        EXPECT_EQ(wrong, 0U);
    }
}

// A step whose inputs stay at their addresses.
struct ResidentStep {
    ResidentStep(const PagedWorld& step_world, std::int64_t most_rows, std::int64_t most_runs,
                 std::int64_t last, std::size_t workspace_bytes)
        : world(&step_world),
          rows(most_rows),
          max_position(last),
          q(DeviceArray<float>::poisoned(step_world.device(), numbersOf(step_world, most_rows))),
          runs(DeviceArray<kvgrid::Run>::poisoned(step_world.device(),
                                                  static_cast<std::size_t>(most_runs))),
          out(DeviceArray<float>::poisoned(step_world.device(), numbersOf(step_world, most_rows))),
          lse(DeviceArray<float>::poisoned(
              step_world.device(),
              static_cast<std::size_t>(most_rows * step_world.model().query_heads))),
          workspace(DeviceArray<std::byte>::poisoned(step_world.device(), workspace_bytes)),
          plan(DeviceArray<std::byte>::poisoned(
              step_world.device(), step_world.device().operations().attendPlanBytes(
                                       most_rows, most_runs, step_world.model().query_heads))) {}

    static std::size_t numbersOf(const PagedWorld& world, std::int64_t rows) {
        return static_cast<std::size_t>(rows * world.model().query_heads * world.model().head_dim);
    }

    // Runs beyond those given have no rows.
    void upload(const Runs& step_runs) {
        const Model& model = world->model();
        std::vector<float> numbers(q.size(), std::numeric_limits<float>::quiet_NaN());
        for (const auto& run : step_runs)
            for (std::int64_t row = 0; row < run.rows; ++row)
                for (int head = 0; head < model.query_heads; ++head)
                    for (int element = 0; element < model.head_dim; ++element)
                        numbers[static_cast<std::size_t>(
                            ((run.first_row + row) * model.query_heads + head) * model.head_dim +
                            element)] =
                            model.value(Kind::q,
                                        world->sequences()[static_cast<std::size_t>(run.slot)].id,
                                        run.first_position + row, head, element);
        q.upload(numbers);
        Runs padded = step_runs;
        padded.resize(runs.size(), {.slot = 0, .rows = 0, .first_row = 0, .first_position = 0});
        runs.upload(padded);
        const std::vector<float> poison(out.size(), std::numeric_limits<float>::quiet_NaN());
        out.upload(poison);
        lse.upload({poison.begin(), poison.begin() + static_cast<std::ptrdiff_t>(lse.size())});
    }

    // Planned as if all runs had `planned` rows, attended as if they had `attended`.
    void attend(std::int64_t planned = 1, std::int64_t attended = 1) const {
        const Model& model = world->model();
        Device& device = world->device();
        AttendParams params{.query_heads = model.query_heads,
                            .kv_heads = model.kv_heads,
                            .head_dim = model.head_dim,
                            .scale = model.softmaxScale(),
                            .q = q.data(),
                            .runs = runs.data(),
                            .run_count = static_cast<std::int64_t>(runs.size()),
                            .max_position = max_position,
                            .run_rows = planned,
                            .tables = world->tables(),
                            .pool = world->pool(),
                            .layer = world->layer(),
                            .out = out.data(),
                            .lse = lse.data(),
                            .workspace = workspace.data(),
                            .workspace_bytes = workspace.size(),
                            .plan = plan.data(),
                            .plan_bytes = plan.size()};
        device.operations().planAttend(params, device.defaultStream());
        params.run_rows = attended;
        device.operations().attend(params, device.defaultStream());
    }

    [[nodiscard]] States states() const { return {out.download(), lse.download()}; }

    const PagedWorld* world;
    std::int64_t rows;
    std::int64_t max_position;
    DeviceArray<float> q;
    DeviceArray<kvgrid::Run> runs;
    DeviceArray<float> out;
    DeviceArray<float> lse;
    DeviceArray<std::byte> workspace;
    DeviceArray<std::byte> plan;
};

// A workspace of any size gives the same bits: none at all, a few slots, all. With few query heads
// and with many, for whose tiles a small one has no room.
TEST_F(CudaDeviceTest, WorkspaceChangesNoBit) {
    for (const int query_heads : {8, 96}) {
        const Model model{.query_heads = query_heads, .kv_heads = 2, .head_dim = 128};
        const PagedWorld world(
            *device_, model, {.block_size = 256},
            {{.id = 0, .length = 70'001}, {.id = 1, .length = 300}, {.id = 2, .length = 9000}});
        const Runs runs{{.slot = 0, .rows = 3, .first_row = 0, .first_position = 69'998},
                        {.slot = 2, .rows = 1, .first_row = 4, .first_position = 8999},
                        {.slot = 1, .rows = 1, .first_row = 3, .first_position = 299}};
        std::vector<States> results;
        for (const std::size_t bytes :
             {std::size_t{0}, std::size_t{20'000}, std::size_t{1'000'000},
              device_->operations().attendWorkspaceBytes(5, query_heads, 128)}) {
            ResidentStep step(world, 5, 3, 70'000, bytes);
            step.upload(runs);
            step.attend();
            results.push_back(step.states());
            EXPECT_TRUE(sameBits(results[0], results.back())) << bytes << " bytes";
        }
        expectOracle(world, results[0], 4, 2, 8999);
        if (query_heads > 8) continue;  // the oracle is slow
        expectOracle(world, results[0], 0, 0, 69'998);
        expectOracle(world, results[0], 2, 0, 70'000);
    }
}

// A step with long runs may be attended by a launch for short ones, as captured launches are.
TEST_F(CudaDeviceTest, APlanForLongRunsServesShortOnes) {
    const Model model{.query_heads = 8, .kv_heads = 2, .head_dim = 64};
    const PagedWorld world(*device_, model, {},
                           {{.id = 0, .length = 3000}, {.id = 1, .length = 20'000}});
    const Runs runs{{.slot = 0, .rows = 200, .first_row = 1, .first_position = 2800},
                    {.slot = 1, .rows = 1, .first_row = 0, .first_position = 19'999}};
    std::vector<States> results;
    for (const std::int64_t attended : {200, 1}) {
        ResidentStep step(world, 201, 2, 19'999,
                          device_->operations().attendWorkspaceBytes(201, 8, 64));
        step.upload(runs);
        step.attend(200, attended);
        results.push_back(step.states());
    }
    EXPECT_TRUE(sameBits(results[0], results[1]));
    for (const std::int64_t row : {0, 63, 199})
        expectOracle(world, results[0], 1 + row, 0, 2800 + row);
    expectOracle(world, results[0], 0, 1, 19'999);
}

// One launch, captured once for 6 runs and 40 rows, follows what lies at its addresses.
TEST_F(CudaDeviceTest, AGraphFollowsTheRuns) {
    const Model model{
        .format = NumberFormat::fp16, .query_heads = 8, .kv_heads = 2, .head_dim = 64};
    const PagedWorld world(*device_, model, {.block_size = 16},
                           {{.id = 0, .length = 20'000},
                            {.id = 1, .length = 300},
                            {.id = 2, .length = 5000},
                            {.id = 3, .length = 1}});
    ResidentStep step(world, 40, 6, 19'999, device_->operations().attendWorkspaceBytes(40, 8, 64));
    step.upload({});
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
    step.attend();
    ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    const std::vector<Runs> steps{
        {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 19'999}},
        {{.slot = 1, .rows = 30, .first_row = 10, .first_position = 200},
         {.slot = 0, .rows = 2, .first_row = 0, .first_position = 15'000},
         {.slot = 3, .rows = 1, .first_row = 9, .first_position = 0}},
        {},
        {{.slot = 2, .rows = 1, .first_row = 39, .first_position = 4999},
         {.slot = 0, .rows = 1, .first_row = 38, .first_position = 12'345},
         {.slot = 1, .rows = 1, .first_row = 37, .first_position = 256}}};
    for (const Runs& runs : steps) {
        step.upload(runs);
        ASSERT_EQ(cudaGraphLaunch(executable, stream()), cudaSuccess);
        const States replayed = step.states();
        step.upload(runs);
        step.attend();
        EXPECT_TRUE(sameBits(replayed, step.states()));
        for (const auto& run : runs) {
            const States alone = attend(world, {{.slot = run.slot,
                                                 .rows = run.rows,
                                                 .first_row = 0,
                                                 .first_position = run.first_position}});
            EXPECT_TRUE(sameBits(alone, rowsOf(replayed, model, run.first_row, run.rows)));
        }
    }
    EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// Append, gather, merge, output and copies can be captured too: nothing in them waits or allocates.
TEST_F(CudaDeviceTest, EveryOperationCanBeCaptured) {
    const Model model{.query_heads = 4, .kv_heads = 2, .head_dim = 64};
    const PagedWorld world(*device_, model, {}, {{.id = 0, .length = 200}});
    const auto input =
        DeviceArray<std::uint16_t>::of(*device_, std::vector<std::uint16_t>(4 * 64, 0x3F80));
    const auto runs = DeviceArray<kvgrid::Run>::of(
        *device_, {{.slot = 0, .rows = 1, .first_row = 0, .first_position = 199}});
    const auto floats = DeviceArray<float>::of(*device_, std::vector<float>(8 * 64, 1.0F));
    const auto others = DeviceArray<float>::poisoned(*device_, 8 * 64);
    const auto gathered =
        DeviceArray<std::uint16_t>::poisoned(*device_, std::size_t{2} * 200 * 2 * 64);
    const auto sink = DeviceArray<std::uint64_t>::poisoned(*device_, 1);
    const auto order = DeviceArray<std::int32_t>::of(*device_, {0});
    const Buffer host = Buffer::onHost(*device_, 2048).value();
    const Operations& operations = device_->operations();
    const StreamView view = device_->defaultStream();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
    operations.append({.rows = 1,
                       .query_heads = 4,
                       .kv_heads = 2,
                       .head_dim = 64,
                       .q = input.data(),
                       .k = input.data(),
                       .v = input.data(),
                       .q_rotated = others.data(),
                       .runs = runs.data(),
                       .run_count = 1,
                       .tables = world.tables(),
                       .pool = world.pool(),
                       .layer = world.layer()},
                      view);
    operations.gather({.tokens = 200,
                       .kv_heads = 2,
                       .head_dim = 64,
                       .tables = world.tables(),
                       .pool = world.pool(),
                       .layer = world.layer(),
                       .format = model.format,
                       .k = gathered.data(),
                       .v = gathered.data() + 200 * 2 * 64},
                      view);
    operations.merge({.rows = 2,
                      .parts = 2,
                      .head_dim = 64,
                      .out_parts = floats.data(),
                      .lse_parts = floats.data(),
                      .out = others.data(),
                      .lse = others.data() + 256},
                     view);
    operations.output({.rows = 1,
                       .heads = 4,
                       .head_dim = 64,
                       .source = floats.data(),
                       .destination = others.data()},
                      view);
    {
        const BlockPair pair{.source = 0, .destination = 0};
        operations.copyBlocks(
            {{reinterpret_cast<std::byte*>(floats.data()), 2048, 1, 0, 1, 0, 2048},
             {host.data(), 2048, 1, 0, 1, 0, 2048},
             &pair,
             1},
            view);
    }
    operations.readRuns(
        {reinterpret_cast<const std::byte*>(floats.data()), order.data(), 1, 2048, sink.data()},
        view);
    device_->fill(others.data(), 1, 4, view);
    device_->copy(others.data(), floats.data(), 4, view);
    ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (int i = 0; i < 2; ++i) {
        ASSERT_EQ(cudaGraphLaunch(executable, stream()), cudaSuccess);
        device_->synchronize(view);
        EXPECT_EQ(host.as<float>()[511], 1.0F);
    }
    const auto bits = gathered.download();
    EXPECT_EQ(bits[(199 * 2) * 64], 0x3F80);
    EXPECT_EQ(bits[(198 * 2) * 64], model.stored(Kind::k, 0, 198, 0, 0));
    EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// A long sequence is cut over all multiprocessors and folded twice.
TEST_F(CudaDeviceTest, LongContextOnAnyNumberOfBlocks) {
    constexpr std::int64_t length = 300'003;
    Model model{.query_heads = 8, .kv_heads = 1, .head_dim = 64};
    // A short period, so that making the numbers takes no time.
    model.number = [](Kind kind, int, std::int64_t position, int head, int element) {
        return hashed(2, kind, 0, static_cast<std::uint64_t>(position % 1009),
                      static_cast<std::uint64_t>(head), static_cast<std::uint64_t>(element));
    };
    std::vector<States> results;
    for (const int blocks : {0, 1, 7, 131, 133, 1000}) {
        const auto device = CudaDeviceTraits::makeParallel(blocks);
        const PagedWorld world(*device, model, {.block_size = 64, .layers = 1, .layer = 0},
                               {{.id = 0, .length = length}, {.id = 1, .length = 10}});
        const Runs runs{{.slot = 0, .rows = 1, .first_row = 0, .first_position = length - 1},
                        {.slot = 1, .rows = 1, .first_row = 1, .first_position = 9}};
        results.push_back(attend(world, runs));
        EXPECT_TRUE(sameBits(results[0], results.back())) << blocks << " blocks of threads";
        if (results.size() == 1) {
            expectOracle(world, results[0], 0, 0, length - 1);
            expectOracle(world, results[0], 1, 1, 9);
        }
    }
}

// Far more runs than lanes of a warp, of all lengths, some without rows.
TEST_F(CudaDeviceTest, ManyRuns) {
    const Model model{.query_heads = 2, .kv_heads = 1, .head_dim = 64};
    std::vector<Sequence> sequences;
    Runs runs;
    std::int64_t row = 0;
    for (int i = 0; i < 300; ++i) {
        const std::int64_t length = i % 37 == 5 ? 3000 + i : 1 + i * 7 % 600;
        sequences.push_back({.id = i, .length = length});
        const std::int32_t rows =
            i % 11 == 0 ? 0 : static_cast<std::int32_t>(std::min<std::int64_t>(length, 1 + i % 3));
        runs.push_back({.slot = i,
                        .rows = rows,
                        .first_row = row,
                        .first_position = length - std::max(rows, 1)});
        row += rows;
    }
    std::shuffle(runs.begin(), runs.end(), std::mt19937(5));
    const PagedWorld world(*device_, model, {.block_size = 16}, sequences);
    const States states = attend(world, runs);
    for (const auto& run : runs)
        for (std::int64_t i = 0; i < run.rows; ++i)
            expectOracle(world, states, run.first_row + i, run.slot, run.first_position + i);
}

// Offload and restore: a pool of scattered runs on the GPU, whole blocks in page-locked memory.
TEST_F(CudaDeviceTest, BlocksToTheHostAndBack) {
    constexpr std::int64_t blocks = 700;
    for (const std::int64_t run_bytes : {512, 4096, 40'000}) {
        const std::int64_t block_bytes = 6 * run_bytes;
        std::vector<std::uint16_t> image(static_cast<std::size_t>(blocks * block_bytes / 2));
        for (std::size_t i = 0; i < image.size(); ++i)
            image[i] = static_cast<std::uint16_t>((i * 2654435761U) >> 15);
        const auto pool = DeviceArray<std::uint16_t>::of(*device_, image);
        const Buffer host =
            Buffer::onHost(*device_, static_cast<std::size_t>(blocks * block_bytes)).value();
        const BlockRuns layered{reinterpret_cast<std::byte*>(pool.data()),
                                run_bytes,
                                2,
                                3 * blocks * run_bytes,
                                3,
                                blocks * run_bytes,
                                run_bytes};
        const BlockRuns whole{host.data(), block_bytes, 1, 0, 1, 0, block_bytes};
        std::vector<std::int32_t> places(blocks);
        std::iota(places.begin(), places.end(), 0);
        std::shuffle(places.begin(), places.end(), std::mt19937(7));
        std::vector<BlockPair> pairs;
        for (std::int32_t i = 0; i < blocks; ++i)
            pairs.push_back({.source = i, .destination = places[static_cast<std::size_t>(i)]});
        device_->operations().copyBlocks({layered, whole, pairs.data(), blocks},
                                         device_->defaultStream());
        for (BlockPair& pair : pairs)
            pair = {.source = pair.destination, .destination = pair.source};
        auto back = pairs;
        std::fill(pairs.begin(), pairs.end(),
                  BlockPair{-1, -1});  // the list was the caller's again at once
        device_->fill(pool.data(), 0xFF, image.size() * 2, device_->defaultStream());
        device_->operations().copyBlocks({whole, layered, back.data(), blocks},
                                         device_->defaultStream());
        std::fill(back.begin(), back.end(), BlockPair{-1, -1});
        EXPECT_TRUE(sameBits(image, pool.download())) << run_bytes << " bytes a run";
    }
}

// Runs that are no power of two, and longer than a stage of the probe.
TEST_F(CudaDeviceTest, ReadRunsOfAnySize) {
    for (const std::int64_t run_bytes : {768, 33'024, 98'304}) {
        constexpr std::int64_t runs = 301;
        std::vector<std::uint64_t> numbers(static_cast<std::size_t>(runs * run_bytes / 8));
        std::uint64_t expected = 0;
        for (std::size_t i = 0; i < numbers.size(); ++i)
            expected += numbers[i] = i * 0x9E3779B97F4A7C15U;
        std::vector<std::int32_t> order(runs);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(3));
        const auto data = DeviceArray<std::uint64_t>::of(*device_, numbers);
        const auto device_order = DeviceArray<std::int32_t>::of(*device_, order);
        const auto sink = DeviceArray<std::uint64_t>::poisoned(*device_, 1);
        for (int i = 0; i < 3; ++i) {
            device_->operations().readRuns({reinterpret_cast<const std::byte*>(data.data()),
                                            device_order.data(), runs, run_bytes, sink.data()},
                                           device_->defaultStream());
            EXPECT_EQ(sink.download()[0], expected) << run_bytes << " bytes a run";
        }
    }
}

// A fill that takes a while, an event, and a copy on another stream that must come after it.
TEST_F(CudaDeviceTest, EventsOrderStreams) {
    constexpr std::size_t bytes = std::size_t{1} << 30;
    const Buffer source = Buffer::onDevice(*device_, bytes).value();
    const Buffer host = Buffer::onHost(*device_, 4096).value();
    Stream first(*device_);
    Stream second(*device_);
    Event event(*device_);
    for (std::uint8_t value = 1; value < 10; ++value) {
        for (int i = 0; i < 4; ++i)
            device_->fill(source.data(), static_cast<std::uint8_t>(i == 3 ? value : 0xEE), bytes,
                          first.view());
        event.record(first.view());
        event.makeWait(second.view());
        device_->copy(host.data(), source.data() + bytes - 4096, 4096, second.view());
        device_->synchronize(second.view());
        EXPECT_TRUE(event.finished());
        EXPECT_EQ(host.data()[4095], std::byte{value});
    }
}

}  // namespace
}  // namespace kvgrid::test
