#include "shard/pool_layout.h"

namespace kvgrid {

Result<std::int64_t> blockBytes(const BlockShape& shape) {
    // K and V of one layer and KV head, then all of them.
    std::int64_t bytes = static_cast<std::int64_t>(bytesPerElement(shape.format)) * shape.head_dim;
    bool fits = !__builtin_mul_overflow(bytes, shape.block_size, &bytes) &&
                !__builtin_add_overflow(bytes, scaleBytes(shape.format, shape.block_size), &bytes);
    for (const int factor : {2, shape.kv_heads, shape.layers})
        fits = fits && !__builtin_mul_overflow(bytes, factor, &bytes);
    if (!fits) return failure(ErrorCode::does_not_fit, "the bytes of a block exceed 64 bits");
    return bytes;
}

PoolView poolView(PoolLayout layout, const BlockShape& shape, std::int64_t blocks,
                  std::byte* data) {
    const auto row_bytes =
        static_cast<std::int64_t>(bytesPerElement(shape.format)) * shape.head_dim;
    const std::int64_t scale_bytes = scaleBytes(shape.format, shape.block_size);
    PoolView view;
    view.data = data;
    view.max_num_blocks = blocks;
    view.block_size = shape.block_size;
    view.format = shape.format;
    if (layout == PoolLayout::layer_major) {
        view.head_stride = row_bytes;
        view.token_stride = shape.kv_heads * row_bytes;
        view.scale_offset = shape.block_size * view.token_stride;
        view.scale_head_stride = scale_bytes;
        view.block_stride = view.scale_offset + shape.kv_heads * scale_bytes;
        view.layer_stride = blocks * view.block_stride;
        view.value_offset = shape.layers * view.layer_stride;
    } else {
        view.token_stride = row_bytes;
        view.scale_offset = shape.block_size * row_bytes;
        view.value_offset = view.scale_offset + scale_bytes;
        view.head_stride = 2 * view.value_offset;
        view.scale_head_stride = view.head_stride;
        view.layer_stride = shape.kv_heads * view.head_stride;
        view.block_stride = shape.layers * view.layer_stride;
    }
    return view;
}

BlockRuns blockRuns(PoolLayout layout, const BlockShape& shape, std::int64_t blocks,
                    std::byte* data) {
    const PoolView view = poolView(layout, shape, blocks, data);
    BlockRuns runs;
    runs.data = data;
    runs.block_stride = view.block_stride;
    if (layout == PoolLayout::layer_major) {
        runs.outer = 2;
        runs.outer_stride = view.value_offset;
        runs.inner = shape.layers;
        runs.inner_stride = view.layer_stride;
    }
    runs.run_bytes = view.block_stride;
    return runs;
}

}  // namespace kvgrid
