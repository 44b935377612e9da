// The shapes over which attention is timed: one list, for kvgrid and for those that
// launch/compare_attention compares it with, which take the shapes from kvgrid's report.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvgrid/error.h>
#include <kvgrid/types.h>

namespace kvgrid {

// One layer's attention of one step.
struct AttendShape {
    std::string name;
    std::vector<std::int64_t> lengths;  // of each sequence, its new tokens included
    int query_heads = 0;
    int kv_heads = 0;
    int head_dim = 128;
    std::int64_t rows = 1;    // new tokens of each sequence
    std::int64_t window = 0;  // tokens that a row sees, its own included; 0: all

    // Of a sequence of so many tokens, the first that some row sees; blocks before it are not
    // there.
    [[nodiscard]] std::int64_t firstSeen(std::int64_t length) const;
    [[nodiscard]] std::int64_t blocks(std::int64_t block_size) const;
    // K and V of the tokens that some row sees, and of the blocks that hold them.
    [[nodiscard]] std::int64_t bytes(NumberFormat format) const;
    [[nodiscard]] std::int64_t blockBytes(std::int64_t block_size, NumberFormat format) const;
    // Of q.k and of weights and V, over the tokens that each row sees.
    [[nodiscard]] std::int64_t multiplyAdds() const;
    // The lengths in order, as (how many, tokens).
    [[nodiscard]] std::vector<std::pair<std::int64_t, std::int64_t>> sequences() const;
};

// BATCHxCONTEXT[+BATCHxCONTEXT...]xQUERY/KV[xDIM][qROWS][wWINDOW], sizes with K or M:
//   1x128Kx32/8           one sequence of 131,072 tokens, 32 query heads, 8 KV heads of 128
//   4x64Kx16/1x256        heads of 256
//   1x1M+63x2Kx8/1        a million tokens beside 63 short sequences
//   1x4Kx32/8q256         256 new tokens
//   8x32Kx32/8w4K         rows see 4,096 tokens
// invalid_argument: the text and what is wrong with it.
[[nodiscard]] Result<AttendShape> parseAttendShape(std::string_view text);

// What is timed where no shape is asked for. CUDA: large batches; one rank of eight; ragged
// batches; the layers of models at short, middle and long contexts. CPU: head dims and group sizes.
[[nodiscard]] std::vector<AttendShape> attendShapes(DeviceKind device);

}  // namespace kvgrid
