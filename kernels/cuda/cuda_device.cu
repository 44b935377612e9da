#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime.h>

#include <cstdio>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/operations.h"

namespace kvgrid {
namespace cuda {
namespace {

static_assert(__cplusplus >= 202002L, "CUDA files are C++20");

constexpr int least_major = 8;  // cp.async and bf16 products

constexpr Operations cuda_operations{
    .append = append,
    .gather = gather,
    .planAttend = planAttend,
    .attend = attend,
    .merge = merge,
    .copyBlocks = copyBlocks,
    .output = output,
    .readRuns = readRuns,
    .attendWorkspaceBytes = attendWorkspaceBytes,
    .attendPlanBytes = attendPlanBytes,
};

std::string describe(const char* call, cudaError_t status) {
    return std::string(call) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) +
           ")";
}

cudaStream_t handleOf(StreamView stream) noexcept {
    return static_cast<cudaStream_t>(stream.handle());
}

cudaDeviceProp propertiesOf(int index) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) {
        (void)cudaGetLastError();
        throw Error(ErrorCode::unavailable,
                    "no CUDA device: " + describe("cudaGetDeviceCount", status));
    }
    if (index < 0 || index >= count)
        throw Error(ErrorCode::unavailable,
                    "no CUDA device " + std::to_string(index) + ": there " +
                        (count == 1 ? "is 1" : "are " + std::to_string(count)));
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    if (properties.major < least_major)
        throw Error(ErrorCode::unavailable,
                    std::string(properties.name) + " is sm_" + std::to_string(properties.major) +
                        std::to_string(properties.minor) + "; sm_80 or newer is needed");
    return properties;
}

int attributeOf(int index, cudaDeviceAttr attribute) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, index), "cudaDeviceGetAttribute");
    return value;
}

}  // namespace

void check(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    (void)cudaGetLastError();
    throw Error(ErrorCode::internal, describe(call, status));
}

void checkNoThrow(cudaError_t status, const char* call) noexcept {
    if (status == cudaSuccess) return;
    (void)cudaGetLastError();
    std::fprintf(stderr, "kvgrid: %s: %s\n", call, cudaGetErrorName(status));
}

CudaDevice::CudaDevice(int index, int attend_blocks) : index_(index) {
    const cudaDeviceProp properties = propertiesOf(index);
    use();
    multiprocessors_ = properties.multiProcessorCount;
    shared_bytes_ = attributeOf(index, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    multiprocessor_shared_bytes_ = attributeOf(index, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    attend_blocks_ = attend_blocks;
    total_bytes_ = properties.totalGlobalMem;
    id_ = cudaDeviceId(index);
    description_ = std::string("cuda ") + properties.name + " (" + id_ + "), sm_" +
                   std::to_string(properties.major) + std::to_string(properties.minor);
    prepareAppend();
    prepareGather();
    overlaps_launches_ = prepareAttend(shared_bytes_, multiprocessor_shared_bytes_);
    prepareMerge();
    prepareCopyBlocks();
    prepareOutput();
    prepareReadRuns();
    // Ordered with CUDA's default stream, on which callers without streams of their own work.
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    stream_ = stream;
}

CudaDevice::~CudaDevice() {
    destroyStream(stream_);
}

void CudaDevice::use() const {
    check(cudaSetDevice(index_), "cudaSetDevice");
}

std::int64_t CudaDevice::freeMemory() const {
    use();
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    return static_cast<std::int64_t>(free_bytes);
}

const Operations& CudaDevice::operations() const noexcept {
    return cuda_operations;
}

void* CudaDevice::allocate(std::size_t bytes) {
    if (bytes == 0 || bytes > total_bytes_) return nullptr;
    use();
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, bytes);
    if (status == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return nullptr;
    }
    check(status, "cudaMalloc");
    return data;
}

void CudaDevice::deallocate(void* pointer, std::size_t) noexcept {
    checkNoThrow(cudaSetDevice(index_), "cudaSetDevice");
    checkNoThrow(cudaFree(pointer), "cudaFree");
}

void* CudaDevice::allocateHost(std::size_t bytes) {
    constexpr std::size_t most_bytes = std::size_t{1} << 46;  // more is a mistake
    if (bytes == 0 || bytes > most_bytes) return nullptr;
    use();
    void* data = nullptr;
    const cudaError_t status =
        cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (status == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return nullptr;
    }
    check(status, "cudaHostAlloc");
    return data;
}

void CudaDevice::deallocateHost(void* pointer, std::size_t) noexcept {
    checkNoThrow(cudaSetDevice(index_), "cudaSetDevice");
    checkNoThrow(cudaFreeHost(pointer), "cudaFreeHost");
}

void* CudaDevice::createStream() {
    use();
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return stream;
}

void CudaDevice::destroyStream(void* handle) noexcept {
    if (handle == nullptr) return;
    checkNoThrow(cudaSetDevice(index_), "cudaSetDevice");
    checkNoThrow(cudaStreamDestroy(static_cast<cudaStream_t>(handle)), "cudaStreamDestroy");
}

void* CudaDevice::createEvent(bool timed) {
    use();
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
          "cudaEventCreateWithFlags");
    return event;
}

void CudaDevice::destroyEvent(void* handle) noexcept {
    if (handle == nullptr) return;
    checkNoThrow(cudaSetDevice(index_), "cudaSetDevice");
    checkNoThrow(cudaEventDestroy(static_cast<cudaEvent_t>(handle)), "cudaEventDestroy");
}

// In a capture a plain record would be a mark of order alone, which no launch records.
void CudaDevice::record(void* event, StreamView stream) {
    use();
    check(cudaEventRecordWithFlags(
              static_cast<cudaEvent_t>(event), handleOf(stream),
              isCapturing(stream) ? cudaEventRecordExternal : cudaEventRecordDefault),
          "cudaEventRecordWithFlags");
}

void CudaDevice::wait(StreamView stream, void* event) {
    use();
    check(cudaStreamWaitEvent(handleOf(stream), static_cast<cudaEvent_t>(event), 0),
          "cudaStreamWaitEvent");
}

bool CudaDevice::finished(void* event) {
    use();
    // Else a query would break a capture that a caller made in the global mode.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    if (status == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return false;
    }
    check(status, "cudaEventQuery");
    return true;
}

double CudaDevice::secondsBetween(void* from, void* to) {
    use();
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(from),
                               static_cast<cudaEvent_t>(to)),
          "cudaEventElapsedTime");
    return milliseconds * 1e-3;
}

void CudaDevice::beginCapture(StreamView stream) {
    use();
    check(cudaStreamBeginCapture(handleOf(stream), cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
}

void* CudaDevice::endCapture(StreamView stream) {
    use();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(handleOf(stream), &graph), "cudaStreamEndCapture");
    cudaGraphExec_t executable = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
    checkNoThrow(cudaGraphDestroy(graph), "cudaGraphDestroy");
    check(status, "cudaGraphInstantiate");
    return executable;
}

void CudaDevice::launchGraph(void* graph, StreamView stream) {
    use();
    check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), handleOf(stream)),
          "cudaGraphLaunch");
}

void CudaDevice::destroyGraph(void* graph) noexcept {
    if (graph == nullptr) return;
    checkNoThrow(cudaSetDevice(index_), "cudaSetDevice");
    checkNoThrow(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)), "cudaGraphExecDestroy");
}

bool CudaDevice::isCapturing(StreamView stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(handleOf(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

void CudaDevice::copy(void* destination, const void* source, std::size_t bytes, StreamView stream) {
    if (bytes == 0) return;
    use();
    check(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, handleOf(stream)),
          "cudaMemcpyAsync");
}

void CudaDevice::fill(void* destination, std::uint8_t value, std::size_t bytes, StreamView stream) {
    if (bytes == 0) return;
    use();
    check(cudaMemsetAsync(destination, value, bytes, handleOf(stream)), "cudaMemsetAsync");
}

void CudaDevice::synchronize(StreamView stream) {
    use();
    check(cudaStreamSynchronize(handleOf(stream)), "cudaStreamSynchronize");
}

}  // namespace cuda

std::unique_ptr<Device> makeCudaDevice(int index) {
    return std::make_unique<cuda::CudaDevice>(index);
}

int cudaDeviceCount() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess) return count;
    (void)cudaGetLastError();
    if (status == cudaErrorNoDevice) return 0;
    int driver = 0;  // stays 0 without one; else it is too old
    cuda::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    if (status == cudaErrorInsufficientDriver && driver == 0) return 0;
    throw Error(ErrorCode::unavailable, cuda::describe("cudaGetDeviceCount", status));
}

std::string cudaDeviceId(int index) {
    std::array<char, 32> bus_id{};
    cuda::check(cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), index),
                "cudaDeviceGetPCIBusId");
    return bus_id.data();
}

std::string cudaLibrary() {
    const auto text = [](int version) {
        return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    };
    int runtime = 0;
    int driver = 0;
    cuda::check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    cuda::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    return "CUDA " + text(runtime) +
           (driver == 0 ? " (no driver)" : " (driver " + text(driver) + ")");
}

}  // namespace kvgrid
