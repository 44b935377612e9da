// One GPU as a device: cudaMalloc and page-locked memory, CUDA streams and events.
//
// Every kernel is loaded when the device is made, so that no operation loads code, and all may be
// captured into CUDA graphs from the first call on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/device.h"

namespace kvgrid::cuda {

class CudaDevice : public Device {
public:
    // The GPU that CUDA counts as `index`. unavailable: no driver, no such GPU, none that this
    // build has code for. attend_blocks: how many blocks of threads attend, 0 for as many as the
    // GPU holds at once; tests use it, the bits do not depend on it.
    explicit CudaDevice(int index, int attend_blocks = 0);
    ~CudaDevice() override;

    [[nodiscard]] DeviceKind kind() const noexcept override { return DeviceKind::cuda; }
    [[nodiscard]] std::string description() const override { return description_; }
    [[nodiscard]] std::string id() const override { return id_; }
    [[nodiscard]] int threads() const noexcept override { return 0; }
    [[nodiscard]] std::int64_t freeMemory() const override;
    [[nodiscard]] const Operations& operations() const noexcept override;

    [[nodiscard]] void* allocate(std::size_t bytes) override;
    void deallocate(void* pointer, std::size_t bytes) noexcept override;
    [[nodiscard]] void* allocateHost(std::size_t bytes) override;
    void deallocateHost(void* pointer, std::size_t bytes) noexcept override;

    [[nodiscard]] StreamView defaultStream() noexcept override { return {*this, stream_}; }
    [[nodiscard]] void* createStream() override;
    void destroyStream(void* handle) noexcept override;
    [[nodiscard]] void* createEvent(bool timed) override;
    void destroyEvent(void* handle) noexcept override;
    void record(void* event, StreamView stream) override;
    void wait(StreamView stream, void* event) override;
    [[nodiscard]] bool finished(void* event) override;
    [[nodiscard]] double secondsBetween(void* from, void* to) override;

    void beginCapture(StreamView stream) override;
    [[nodiscard]] void* endCapture(StreamView stream) override;
    void launchGraph(void* graph, StreamView stream) override;
    void destroyGraph(void* graph) noexcept override;
    [[nodiscard]] bool isCapturing(StreamView stream) override;

    // Asynchronous where the host side, if any, is from allocateHost.
    void copy(void* destination, const void* source, std::size_t bytes, StreamView stream) override;
    void fill(void* destination, std::uint8_t value, std::size_t bytes, StreamView stream) override;
    void synchronize(StreamView stream) override;

    // Makes it the current device of this thread. Every member and operation does so first.
    void use() const;

    [[nodiscard]] int multiprocessors() const noexcept { return multiprocessors_; }
    // Whether a launch may start before the one that it follows has ended: GPU and code both know
    // how.
    [[nodiscard]] bool overlapsLaunches() const noexcept { return overlaps_launches_; }
    // Bytes of shared memory that one block of threads may have.
    [[nodiscard]] int sharedBytes() const noexcept { return shared_bytes_; }
    // Of all blocks of threads that run on one multiprocessor, with what the system keeps of each.
    [[nodiscard]] int sharedBytesOfMultiprocessor() const noexcept {
        return multiprocessor_shared_bytes_;
    }
    // 0: as many as the GPU holds at once.
    [[nodiscard]] int attendBlocks() const noexcept { return attend_blocks_; }

private:
    int index_;
    int multiprocessors_ = 0;
    bool overlaps_launches_ = false;
    int shared_bytes_ = 0;
    int multiprocessor_shared_bytes_ = 0;
    int attend_blocks_ = 0;
    std::size_t total_bytes_ = 0;
    std::string id_;
    std::string description_;
    void* stream_ = nullptr;
};

// The device of a stream that an operation of this folder was given, made current.
inline const CudaDevice& useDevice(StreamView stream) {
    const auto& device = static_cast<const CudaDevice&>(stream.device());
    device.use();
    return device;
}

}  // namespace kvgrid::cuda
