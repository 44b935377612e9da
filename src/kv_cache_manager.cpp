#include <kvgrid/kv_cache_manager.h>

#include <optional>
#include <string>
#include <utility>

#include <kvgrid/cache.h>

#include "comm/process.h"
#include "kernels/device.h"

namespace kvgrid {

namespace {

std::optional<Process> startUnlessLiving() {
    if (Process::current() != nullptr) return std::nullopt;
    return orThrow(Process::start());
}

CacheConfig managerConfig(int max_batch_size, int num_layers, int max_seq_len, int num_kv_heads,
                          int head_dim) {
    CacheConfig config;
    config.geometry = Geometry::uniform(num_layers, num_kv_heads, num_kv_heads, head_dim);
    config.kv_format = NumberFormat::fp16;
    config.input_format = NumberFormat::fp16;
    config.max_sequences = max_batch_size;
    config.max_sequence_length = max_seq_len;
    config.max_step_tokens = max_seq_len;
    const std::int64_t blocks =
        (static_cast<std::int64_t>(max_seq_len) + config.block_size - 1) / config.block_size;
    config.device_blocks = blocks * max_batch_size;
    return config;
}

}  // namespace

struct KVCacheManager::State {
    std::optional<Process> own_process;
    Process* process;
    cudaStream_t stream;
    Cache cache;
    std::optional<Step> step;  // the newest, when it was not advanced
    SequenceId running{};      // the sequence of that step
    std::int64_t tokens = 0;   // its new tokens
    Buffer k_scratch;
    Buffer v_scratch;

    Answer ask(const Requests& requests) {
        step.reset();
        return orThrow(cache.begin(requests)).answers().front();
    }

    // The step in which `sequence` gets `count` new tokens: the open one, or a new one.
    const Step& stepOf(SequenceId sequence, std::int64_t count) {
        if (step && running == sequence && tokens == count) return *step;
        step.reset();
        Step begun = orThrow(cache.begin(Requests().run(sequence, count)));
        const Answer& answer = begun.answers().front();
        if (answer.status != Answer::Status::done) {
            throw Error(answer.status == Answer::Status::wait ? ErrorCode::does_not_fit
                                                              : ErrorCode::invalid_argument,
                        answer.why);
        }
        running = sequence;
        tokens = count;
        return step.emplace(std::move(begun));
    }

    half* scratch(Buffer& buffer, std::size_t bytes) {
        if (buffer.bytes() < bytes)
            buffer = orThrow(Buffer::onDevice(*process->state().device, bytes));
        return buffer.as<half>();
    }
};

KVCacheManager::KVCacheManager(int max_batch_size, int num_layers, int max_seq_len,
                               int num_kv_heads, int head_dim, cudaStream_t stream) {
    std::optional<Process> own = startUnlessLiving();
    Process* process = own ? &*own : Process::current();
    Cache cache = orThrow(Cache::create(
        *process, managerConfig(max_batch_size, num_layers, max_seq_len, num_kv_heads, head_dim)));
    state_ = std::make_unique<State>(State{.own_process = std::move(own),
                                           .process = process,
                                           .stream = stream,
                                           .cache = std::move(cache),
                                           .step = std::nullopt,
                                           .k_scratch = {},
                                           .v_scratch = {}});
    if (state_->own_process) state_->process = &*state_->own_process;
}

KVCacheManager::KVCacheManager(Process& process, const CacheConfig& config) {
    const bool gives_fp16 = config.kv_format == NumberFormat::fp16 || hasScales(config.kv_format);
    if (config.input_format != NumberFormat::fp16 || !gives_fp16) {
        throw Error(ErrorCode::invalid_argument,
                    "KVCacheManager takes fp16 inputs and stores fp16, fp8-e4m3 or int8");
    }
    state_ = std::make_unique<State>(State{.own_process = std::nullopt,
                                           .process = &process,
                                           .stream = nullptr,
                                           .cache = orThrow(Cache::create(process, config)),
                                           .step = std::nullopt,
                                           .k_scratch = {},
                                           .v_scratch = {}});
}

KVCacheManager::~KVCacheManager() = default;
KVCacheManager::KVCacheManager(KVCacheManager&&) noexcept = default;
KVCacheManager& KVCacheManager::operator=(KVCacheManager&&) noexcept = default;

Result<int> KVCacheManager::allocateSequence(int max_len) {
    const Answer answer = state_->ask(Requests().allocate(max_len));
    if (answer.status == Answer::Status::done) return static_cast<int>(answer.sequence);
    return failure(answer.status == Answer::Status::wait ? ErrorCode::does_not_fit
                                                         : ErrorCode::invalid_argument,
                   answer.why);
}

void KVCacheManager::releaseSequence(int seq_id) {
    const Answer answer = state_->ask(Requests().release(SequenceId{seq_id}));
    if (answer.status != Answer::Status::done) throw Error(ErrorCode::invalid_argument, answer.why);
}

void KVCacheManager::appendKV(int seq_id, int layer_idx, const half* k, const half* v,
                              int num_tokens, cudaStream_t stream) {
    const Step& step = state_->stepOf(SequenceId{seq_id}, num_tokens);
    orThrow(state_->cache.append(step, layer_idx, nullptr, k, v,
                                 stream != nullptr ? stream : state_->stream));
}

void KVCacheManager::advanceSeqLen(int seq_id, int num_tokens) {
    if (num_tokens == 0) {
        static_cast<void>(orThrow(state_->cache.length(SequenceId{seq_id})));
        return;
    }
    // Every rank passes the same count, so fewer tokens than appended are a step of that many.
    orThrow(state_->cache.advance(state_->stepOf(SequenceId{seq_id}, num_tokens)));
    state_->step.reset();
}

std::pair<half*, half*> KVCacheManager::getCache(int seq_id, int layer_idx) {
    Cache& cache = state_->cache;
    if (cache.config().grid.context > 1) {
        throw Error(ErrorCode::invalid_argument,
                    "getCache needs all positions on one rank; the context axis is " +
                        std::to_string(cache.config().grid.context));
    }
    const std::int64_t length = orThrow(cache.length(SequenceId{seq_id}));
    const CacheHeads heads = cache.heads(layer_idx);
    const auto elements = static_cast<std::size_t>(length) *
                          static_cast<std::size_t>(heads.kv_heads) *
                          static_cast<std::size_t>(heads.head_dim);
    half* k = state_->scratch(state_->k_scratch, elements * bytesPerElement(NumberFormat::fp16));
    half* v = state_->scratch(state_->v_scratch, elements * bytesPerElement(NumberFormat::fp16));
    orThrow(cache.gather(SequenceId{seq_id}, layer_idx, k, v, state_->stream));
    return {k, v};
}

int KVCacheManager::getSeqLen(int seq_id) const {
    return static_cast<int>(orThrow(state_->cache.length(SequenceId{seq_id})));
}

}  // namespace kvgrid
