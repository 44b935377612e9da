// A cache driven sequence by sequence: allocate, append layer by layer, advance, read back.
//
// Every rank makes the same calls. Calls without a result throw Error on misuse; Result carries
// what a caller can act on. appendKV is stateless: where it writes follows from the sequence
// length, not from how often or in what layer order it was called.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include <kvgrid/config.h>
#include <kvgrid/error.h>
#include <kvgrid/process.h>
#include <kvgrid/types.h>

namespace kvgrid {

class Cache;

class KVCacheManager {
public:
    // fp16 K and V, no rotary embedding, a paged pool that holds max_batch_size sequences of
    // max_seq_len tokens. num_kv_heads counts all ranks' heads. Uses the living Process, or starts
    // one of its own. Throws Error.
    KVCacheManager(int max_batch_size, int num_layers, int max_seq_len, int num_kv_heads,
                   int head_dim, cudaStream_t stream = nullptr);
    // Any configuration whose K and V inputs are fp16, stored as fp16, fp8 e4m3 or int8; throws
    // Error otherwise.
    KVCacheManager(Process& process, const CacheConfig& config);
    ~KVCacheManager();

    KVCacheManager(KVCacheManager&&) noexcept;
    KVCacheManager& operator=(KVCacheManager&&) noexcept;

    // A sequence slot for at most max_len tokens. does_not_fit: all slots are taken.
    [[nodiscard]] Result<int> allocateSequence(int max_len);
    void releaseSequence(int seq_id);

    // k, v  [num_tokens, KV heads of this rank, head_dim]
    void appendKV(int seq_id, int layer_idx, const half* k, const half* v, int num_tokens,
                  cudaStream_t stream = nullptr);
    // Commits num_tokens that every layer has appended.
    void advanceSeqLen(int seq_id, int num_tokens);

    // K and V of this rank's heads, [getSeqLen(seq_id), KV heads of this rank, head_dim], gathered
    // (Cache::gather) into scratch: valid until the next call. Refused when the context axis is
    // above 1.
    [[nodiscard]] std::pair<half*, half*> getCache(int seq_id, int layer_idx);

    [[nodiscard]] int getSeqLen(int seq_id) const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace kvgrid
