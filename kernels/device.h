// One interface, two devices: memory, streams, events, graphs, copies, and the table of operations.
//
// Every allocation, stream, event and graph has an owner type (Buffer, Stream, Event, Graph) and is
// made on
// a named device; a StreamView is what functions take. Work on a stream runs in order; nothing here
// synchronises unless it says so. The CPU device runs everything at once, on the calling thread and
// its pool, so its streams are always idle; the contract is the same.
// Failures of the device throw Error (internal); running out of memory is a Result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <kvgrid/error.h>
#include <kvgrid/types.h>

namespace kvgrid {

struct Operations;  // kernels/ops.h
class Device;

// A stream to enqueue on. Does not own. `handle` is a cudaStream_t on CUDA, unused on the CPU.
class StreamView {
public:
    StreamView(Device& device, void* handle) noexcept : device_(&device), handle_(handle) {}

    [[nodiscard]] Device& device() const noexcept { return *device_; }
    [[nodiscard]] void* handle() const noexcept { return handle_; }

private:
    Device* device_;
    void* handle_;
};

class Device {
public:
    Device() = default;
    virtual ~Device() = default;
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    [[nodiscard]] virtual DeviceKind kind() const noexcept = 0;
    [[nodiscard]] virtual std::string description() const = 0;  // "cpu AVX3_ZEN4, 2 threads"
    // Which one it is among those of the host: the PCI address of a GPU, empty on the CPU.
    [[nodiscard]] virtual std::string id() const = 0;
    [[nodiscard]] virtual int threads() const noexcept = 0;  // CPU threads; 0 on CUDA
    [[nodiscard]] virtual std::int64_t freeMemory()
        const = 0;  // bytes that may be allocated now, about
    [[nodiscard]] virtual const Operations& operations() const noexcept = 0;

    // Device memory, 256-byte aligned, not initialised. Null when there is none left. bytes = 0:
    // null.
    [[nodiscard]] virtual void* allocate(std::size_t bytes) = 0;
    virtual void deallocate(void* pointer, std::size_t bytes) noexcept = 0;
    // Host memory that copies may use asynchronously (page-locked on CUDA).
    [[nodiscard]] virtual void* allocateHost(std::size_t bytes) = 0;
    virtual void deallocateHost(void* pointer, std::size_t bytes) noexcept = 0;

    // The stream used where the caller gives none.
    [[nodiscard]] virtual StreamView defaultStream() noexcept = 0;
    [[nodiscard]] virtual void* createStream() = 0;
    virtual void destroyStream(void* handle) noexcept = 0;
    [[nodiscard]] virtual void* createEvent(bool timed) = 0;
    virtual void destroyEvent(void* handle) noexcept = 0;
    virtual void record(void* event, StreamView stream) = 0;
    virtual void wait(StreamView stream, void* event) = 0;  // the stream waits, not the host
    // Never recorded counts as finished. May be called on any thread, while others capture.
    [[nodiscard]] virtual bool finished(void* event) = 0;
    // Seconds from one timed event to another; both are finished.
    [[nodiscard]] virtual double secondsBetween(void* from, void* to) = 0;

    // Graphs. Between begin and end the stream's work is noted instead of run. A timed event that
    // is recorded meanwhile is recorded again by every launch. unavailable on the CPU device.
    virtual void beginCapture(StreamView stream) = 0;
    [[nodiscard]] virtual void* endCapture(StreamView stream) = 0;  // the graph, ready to launch
    virtual void launchGraph(void* graph, StreamView stream) = 0;
    virtual void destroyGraph(void* graph) noexcept = 0;
    [[nodiscard]] virtual bool isCapturing(StreamView stream) = 0;  // for whomever

    // Between any of this device's and host memory; host memory from allocateHost to be
    // asynchronous.
    virtual void copy(void* destination, const void* source, std::size_t bytes,
                      StreamView stream) = 0;
    virtual void fill(void* destination, std::uint8_t value, std::size_t bytes,
                      StreamView stream) = 0;
    virtual void synchronize(StreamView stream) = 0;  // the host waits
};

// Memory with an owner. `on_host`: from allocateHost.
class Buffer {
public:
    Buffer() = default;
    // does_not_fit, naming the bytes.
    [[nodiscard]] static Result<Buffer> onDevice(Device& device, std::size_t bytes);
    [[nodiscard]] static Result<Buffer> onHost(Device& device, std::size_t bytes);
    Buffer(Buffer&& other) noexcept;
    Buffer& operator=(Buffer&& other) noexcept;
    ~Buffer();

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
    template <typename T>
    [[nodiscard]] T* as() const noexcept {
        return reinterpret_cast<T*>(data_);
    }

private:
    Buffer(Device& device, std::byte* data, std::size_t bytes, bool on_host) noexcept;
    Device* device_ = nullptr;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
    bool on_host_ = false;
};

class Stream {
public:
    explicit Stream(Device& device) : device_(&device), handle_(device.createStream()) {}
    Stream(Stream&& other) noexcept;
    Stream& operator=(Stream&& other) noexcept;
    ~Stream();
    [[nodiscard]] StreamView view() const noexcept { return {*device_, handle_}; }

private:
    Device* device_;
    void* handle_;
};

class Event {
public:
    explicit Event(Device& device, bool timed = false)
        : device_(&device),
          handle_(device.createEvent(timed)) {}
    Event(Event&& other) noexcept;
    Event& operator=(Event&& other) noexcept;
    ~Event();
    void record(StreamView stream) { device_->record(handle_, stream); }
    void makeWait(StreamView stream) const { device_->wait(stream, handle_); }
    [[nodiscard]] bool finished() const { return device_->finished(handle_); }
    // Of timed events.
    [[nodiscard]] double secondsSince(const Event& from) const {
        return device_->secondsBetween(from.handle_, handle_);
    }

private:
    Device* device_;
    void* handle_;
};

// Work that was captured, to be launched as often as wanted.
class Graph {
public:
    // Ends the capture that this stream is in. Throws Error when what was called cannot be
    // captured.
    static Graph endCapture(StreamView stream) {
        return {stream.device(), stream.device().endCapture(stream)};
    }
    Graph(Graph&& other) noexcept;
    Graph& operator=(Graph&& other) noexcept;
    ~Graph();
    void launch(StreamView stream) const { device_->launchGraph(handle_, stream); }

private:
    Graph(Device& device, void* handle) noexcept : device_(&device), handle_(handle) {}
    Device* device_;
    void* handle_;
};

// threads >= 1. The calling thread counts as one of them.
[[nodiscard]] std::unique_ptr<Device> makeCpuDevice(int threads);

// The GPU that CUDA counts as `index`, of compute capability 8.0 or newer. Throws Error
// (unavailable) when it is not there, or when this build has no CUDA device.
[[nodiscard]] std::unique_ptr<Device> makeCudaDevice(int index);

// GPUs that CUDA counts in this process; 0 without a driver or without the CUDA device in this
// build. Throws Error (unavailable), naming CUDA's, when there is a driver that cannot count.
[[nodiscard]] int cudaDeviceCount();
// As Device::id, before the device is made.
[[nodiscard]] std::string cudaDeviceId(int index);
// Versions of runtime and driver: "CUDA 13.0 (driver 13.0)". Empty where this build has no CUDA.
[[nodiscard]] std::string cudaLibrary();

}  // namespace kvgrid
