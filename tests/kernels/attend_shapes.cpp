#include "tests/kernels/attend_shapes.h"

#include <algorithm>
#include <array>
#include <regex>

#include "kernels/paging.h"

namespace kvgrid {
namespace {

// Of a shape, so that its bytes are a 64-bit number.
constexpr std::int64_t most_tokens = std::int64_t{1} << 36;

// Digits with K or M behind them; 0 where that is beyond most_tokens.
std::int64_t size(const std::string& text) {
    std::int64_t value = 0;
    for (const char c : text) {
        if (c == 'K' || c == 'M')
            value *= c == 'K' ? 1 << 10 : 1 << 20;
        else
            value = value * 10 + (c - '0');
        if (value > most_tokens) return 0;
    }
    return value;
}

tl::unexpected<Failure> invalid(std::string_view text, const std::string& reason) {
    return failure(ErrorCode::invalid_argument, "'" + std::string(text) + "' " + reason);
}

// Of one token's K or V of one KV head, its scale included.
std::int64_t rowBytes(int head_dim, NumberFormat format) {
    return static_cast<std::int64_t>(static_cast<std::size_t>(head_dim) * bytesPerElement(format)) +
           (hasScales(format) ? 2 : 0);
}

// The lengths that drawLengths (launch/trace.h) draws from the conversation trace of
// launch/traces with seed 0: this program also runs where the trace is not. A test draws them
// again.
constexpr std::array<std::int64_t, 64> conversation_lengths{
    7121,  1178,  38149, 1254,  9480,  79096, 19242, 904,   21901, 4152,  3096,  11531, 4399,
    3216,  7157,  1540,  17588, 1924,  11272, 5514,  8520,  6024,  1560,  11847, 2278,  35252,
    12229, 6301,  900,   13873, 7068,  3480,  24080, 11383, 937,   993,   20661, 16557, 1663,
    1037,  18470, 6531,  20529, 2885,  912,   960,   6072,  68431, 15887, 1706,  7937,  1553,
    19399, 897,   7651,  13526, 12145, 6356,  46237, 1208,  15590, 7581,  6293,  901};

}  // namespace

std::int64_t AttendShape::firstSeen(std::int64_t length) const {
    return kvgrid::firstSeen(length - rows, window);
}

std::int64_t AttendShape::blocks(std::int64_t block_size) const {
    std::int64_t count = 0;
    for (const std::int64_t length : lengths)
        count += (length + block_size - 1) / block_size - firstSeen(length) / block_size;
    return count;
}

std::int64_t AttendShape::bytes(NumberFormat format) const {
    std::int64_t tokens = 0;
    for (const std::int64_t length : lengths)
        tokens += length - firstSeen(length);
    return tokens * kv_heads * 2 * rowBytes(head_dim, format);
}

std::int64_t AttendShape::blockBytes(std::int64_t block_size, NumberFormat format) const {
    const std::int64_t tokens = blocks(block_size) * block_size;
    return kv_heads * 2 *
           (tokens * head_dim * static_cast<std::int64_t>(bytesPerElement(format)) +
            blocks(block_size) * scaleBytes(format, block_size));
}

std::int64_t AttendShape::multiplyAdds() const {
    std::int64_t seen = 0;
    for (const std::int64_t length : lengths) {
        // Each row sees a token more than the one before it, up to the window.
        const std::int64_t first = length - rows + 1;
        const std::int64_t growing =
            window == 0 ? rows : std::clamp<std::int64_t>(window - first, 0, rows);
        seen += growing * first + growing * (growing - 1) / 2 + (rows - growing) * window;
    }
    return seen * query_heads * head_dim * 2;
}

std::vector<std::pair<std::int64_t, std::int64_t>> AttendShape::sequences() const {
    std::vector<std::pair<std::int64_t, std::int64_t>> found;
    for (const std::int64_t length : lengths) {
        if (found.empty() || found.back().second != length) found.emplace_back(0, length);
        ++found.back().first;
    }
    return found;
}

Result<AttendShape> parseAttendShape(std::string_view text) {
    static const std::regex whole(
        R"((\d{1,9}x\d{1,9}[KM]?(?:\+\d{1,9}x\d{1,9}[KM]?)*)x(\d{1,4})/(\d{1,4})(?:x(\d{1,4}))?(?:q(\d{1,9}))?(?:w(\d{1,9}[KM]?))?)");
    static const std::regex term(R"((\d+)x(\d+[KM]?))");
    AttendShape shape{.name = std::string(text), .lengths = {}};
    std::smatch match;
    if (!std::regex_match(shape.name, match, whole))
        return invalid(text,
                       "is no BATCHxCONTEXT[+BATCHxCONTEXT...]xQUERY/KV[xDIM][qROWS][wWINDOW]");
    const std::string terms = match[1];
    std::int64_t total = 0;
    for (std::sregex_iterator i(terms.begin(), terms.end(), term); i != std::sregex_iterator();
         ++i) {
        const std::int64_t batch = size((*i)[1]);
        const std::int64_t tokens = size((*i)[2]);
        if (batch < 1 || batch > 1 << 20 || tokens < 1 || batch > (most_tokens - total) / tokens)
            return invalid(text, "has sequences that are none, or too many");
        total += batch * tokens;
        shape.lengths.insert(shape.lengths.end(), static_cast<std::size_t>(batch), tokens);
    }
    shape.query_heads = static_cast<int>(size(match[2]));
    shape.kv_heads = static_cast<int>(size(match[3]));
    if (shape.kv_heads < 1 || shape.query_heads < 1 || shape.query_heads % shape.kv_heads != 0)
        return invalid(text, "has query heads that are no multiple of its KV heads");
    if (match[4].matched) shape.head_dim = static_cast<int>(size(match[4]));
    if (shape.head_dim < 16 || shape.head_dim > 256 || shape.head_dim % 16 != 0)
        return invalid(text, "has a head dim that is no multiple of 16 up to 256");
    if (match[5].matched) shape.rows = size(match[5]);
    for (const std::int64_t length : shape.lengths)
        if (shape.rows < 1 || shape.rows > length)
            return invalid(text, "has new tokens that are none, or more than a sequence");
    if (match[6].matched) {
        shape.window = size(match[6]);
        if (shape.window < 1) return invalid(text, "has a window that is none, or too large");
    }
    return shape;
}

std::vector<AttendShape> attendShapes(DeviceKind device) {
    const AttendShape conversations{
        .name = "64 conversations x8/1",
        .lengths = {conversation_lengths.begin(), conversation_lengths.end()},
        .query_heads = 8,
        .kv_heads = 1};
    std::vector<AttendShape> shapes;
    const auto add = [&shapes](std::initializer_list<const char*> texts) {
        for (const char* text : texts)
            shapes.push_back(orThrow(parseAttendShape(text)));
    };
    if (device == DeviceKind::cuda) {
        add({"1x128Kx32/8", "1x1Mx8/1", "8x128Kx8/1", "32x32Kx8/1", "64x8Kx32/8", "16x64Kx64/8",
             "64x8Kx32/32", "4x64Kx16/1x256", "128x4Kx8/8x64"});
        shapes.push_back(conversations);
        add({"1x128Kx8/1", "1x32Kx8/1", "16x8Kx8/1"});
        add({"1x1M+63x2Kx8/1", "6x90Kx8/1"});
        // A layer of llama-3.1-70b over eight ranks (8/1) and of llama-3.1-8b (32/8) at 8K, 64K
        // and 128K, one sequence and eight; those at 128K that are not here are above.
        add({"1x8Kx8/1", "1x64Kx8/1", "8x8Kx8/1", "8x64Kx8/1"});
        add({"1x8Kx32/8", "1x64Kx32/8", "8x8Kx32/8", "8x64Kx32/8", "8x128Kx32/8"});
    } else {
        add({"4x16Kx32/8x64", "4x16Kx32/8x80", "4x16Kx32/8x96", "4x16Kx32/8", "4x16Kx32/8x256"});
        add({"4x16Kx8/8", "4x16Kx16/8", "4x16Kx24/8", "4x16Kx64/8", "4x16Kx128/8",
             "4x16Kx71/1x64"});
        add({"1x128Kx32/8", "64x1Kx32/8", "1x128Kx8/1"});
        shapes.push_back(conversations);
    }
    return shapes;
}

}  // namespace kvgrid
