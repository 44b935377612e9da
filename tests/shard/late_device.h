// Streams that are late, so that a wait that is missing shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tests/kernels/devices.h"
#ifndef KVGRID_TEST_CUDA
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/operations.h"
#endif

namespace kvgrid::test {

// Of the streams of a shard: the one that its steps run on, the device's default, or the one that
// it made for copies between tiers.
enum class Streams { none, of_steps, of_copies };

[[nodiscard]] inline Streams kindOf(StreamView stream) {
    return stream.handle() == stream.device().defaultStream().handle() ? Streams::of_steps
                                                                       : Streams::of_copies;
}

#ifdef KVGRID_TEST_CUDA

using LateBase = cuda::CudaDevice;

// Work of some milliseconds, to be enqueued before what shall be late.
class SlowWork {
public:
    explicit SlowWork(Device& device) : memory_(Buffer::onDevice(device, bytes).value()) {}
    void enqueue(StreamView stream) const {
        for (int i = 0; i < 32; ++i)
            stream.device().fill(memory_.data(), 0, bytes, stream);
    }

private:
    static constexpr std::size_t bytes = std::size_t{1} << 30;
    Buffer memory_;
};

#else

// The CPU with streams that are as late as they may be: their work runs when the host, or work of
// another stream, waits for it. What nobody waits for never runs.
class LateDevice : public cpu::CpuDevice {
public:
    // Work on the other streams runs at once.
    explicit LateDevice(Streams late) : CpuDevice(1), late_(late) {}

    [[nodiscard]] const Operations& operations() const noexcept override { return late_operations; }

    [[nodiscard]] StreamView defaultStream() noexcept override { return {*this, &default_}; }
    [[nodiscard]] void* createStream() override { return new Queue(); }
    void destroyStream(void* handle) noexcept override { delete static_cast<Queue*>(handle); }

    [[nodiscard]] void* createEvent(bool) override { return new Mark(); }
    void destroyEvent(void* handle) noexcept override { delete static_cast<Mark*>(handle); }
    void record(void* event, StreamView stream) override {
        Queue& queue = queueOf(stream);
        *static_cast<Mark*>(event) = {&queue, queue.enqueued};
    }
    void wait(StreamView stream, void* event) override {
        enqueue(stream, [mark = *static_cast<Mark*>(event)] { runTo(mark); });
    }
    [[nodiscard]] bool finished(void* event) override {
        runTo(*static_cast<Mark*>(event));
        return true;
    }
    [[nodiscard]] double secondsBetween(void*, void*) override {
        throw std::logic_error("events of a LateDevice tell no time");
    }

    void copy(void* destination, const void* source, std::size_t bytes,
              StreamView stream) override {
        enqueue(stream, [=, this] { CpuDevice::copy(destination, source, bytes, stream); });
    }
    void fill(void* destination, std::uint8_t value, std::size_t bytes,
              StreamView stream) override {
        enqueue(stream, [=, this] { CpuDevice::fill(destination, value, bytes, stream); });
    }
    void synchronize(StreamView stream) override {
        Queue& queue = queueOf(stream);
        runTo({&queue, queue.enqueued});
    }

private:
    struct Queue {
        std::deque<std::function<void()>> waiting;
        std::size_t enqueued = 0;
        std::size_t begun = 0;
    };
    struct Mark {  // of an event: the work that was enqueued when it was recorded
        Queue* queue = nullptr;
        std::size_t enqueued = 0;
    };

    [[nodiscard]] static Queue& queueOf(StreamView stream) {
        return *static_cast<Queue*>(stream.handle());
    }
    static void runTo(const Mark& mark) {
        while (mark.queue != nullptr && mark.queue->begun < mark.enqueued) {
            const std::function<void()> work = std::move(mark.queue->waiting.front());
            mark.queue->waiting.pop_front();
            ++mark.queue->begun;
            work();
        }
    }
    void enqueue(StreamView stream, std::function<void()> work) {
        Queue& queue = queueOf(stream);
        queue.waiting.push_back(std::move(work));
        ++queue.enqueued;
        if (kindOf(stream) != late_) synchronize(stream);
    }

    template <auto operation, typename Params>
    static void later(const Params& params, StreamView stream) {
        static_cast<LateDevice&>(stream.device()).enqueue(stream, [=] {
            operation(params, stream);
        });
    }
    static void copyBlocksLater(const CopyBlocksParams& params, StreamView stream) {
        const std::vector<BlockPair> pairs(params.pairs, params.pairs + params.count);
        static_cast<LateDevice&>(stream.device()).enqueue(stream, [=]() mutable {
            CopyBlocksParams with_pairs = params;
            with_pairs.pairs = pairs.data();
            cpu::copyBlocks(with_pairs, stream);
        });
    }
    static constexpr Operations late_operations{
        .append = later<cpu::append, AppendParams>,
        .gather = later<cpu::gather, GatherParams>,
        .planAttend = later<cpu::planAttend, AttendParams>,
        .attend = later<cpu::attend, AttendParams>,
        .merge = later<cpu::merge, MergeParams>,
        .copyBlocks = copyBlocksLater,
        .output = later<cpu::output, OutputParams>,
        .readRuns = later<cpu::readRuns, ReadRunsParams>,
        .attendWorkspaceBytes = cpu::attendWorkspaceBytes,
        .attendPlanBytes = cpu::attendPlanBytes,
    };

    Streams late_;
    Queue default_;
};

using LateBase = LateDevice;

class SlowWork {
public:
    explicit SlowWork(Device&) {}
    void enqueue(StreamView) const {}
};

#endif

// A device on which streams of one kind do not wait for events.
class DeafDevice : public LateBase {
public:
    template <typename... Arguments>
    explicit DeafDevice(Streams deaf, Arguments... arguments)
        : LateBase(arguments...),
          deaf_(deaf) {}
    void wait(StreamView stream, void* event) override {
        if (kindOf(stream) != deaf_) LateBase::wait(stream, event);
    }

private:
    Streams deaf_;
};

// Of which the streams of one kind are late (on the GPU those that SlowWork is enqueued on), and
// those of one kind, if any, do not wait.
[[nodiscard]] inline std::unique_ptr<Device> makeLate(Streams late, Streams deaf = Streams::none) {
#ifdef KVGRID_TEST_CUDA
    static_cast<void>(late);
    return std::make_unique<DeafDevice>(deaf, 0);
#else
    return std::make_unique<DeafDevice>(deaf, late);
#endif
}

}  // namespace kvgrid::test
