#include "launch/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <limits>
#include <span>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvgrid/error.h>
#include <kvgrid/types.h>

#include "launch/json_fields.h"
#include "launch/reference.h"

namespace kvgrid::launch {

namespace {

static_assert(std::endian::native == std::endian::little,
              "values are read as they lie in the file");

constexpr std::int64_t length_bytes = 8;
constexpr std::int64_t most_header_bytes = 100'000'000;  // as the format's own library has it

std::vector<std::int64_t> wholeNumbers(const JsonFields& fields, std::string_view key,
                                       std::int64_t most) {
    const JsonFields::Found found = fields.find({key});
    if (!found || !found.value->is_array()) fields.fail(key, "is no list");
    std::vector<std::int64_t> numbers;
    for (const nlohmann::json& item : *found.value)
        numbers.push_back(wholeNumber(fields, key, item, 0, most));
    return numbers;
}

Safetensors::Tensor tensorOf(const JsonFields& fields, std::int64_t data_bytes) {
    Safetensors::Tensor tensor;
    const auto dtype = fields.text({"dtype"});
    if (!dtype) fields.fail("dtype", "is missing");
    tensor.dtype = *dtype;
    tensor.shape = wholeNumbers(fields, "shape", std::numeric_limits<std::int64_t>::max());
    const auto offsets = wholeNumbers(fields, "data_offsets", data_bytes);
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
        fields.fail("data_offsets", "is not where something begins and ends");
    }
    tensor.begin = offsets[0];
    tensor.end = offsets[1];
    return tensor;
}

}  // namespace

Safetensors::Safetensors(std::string path) : path_(std::move(path)) {
    readHeader();
}

void Safetensors::fail(const std::string& why) const {
    throw Error(ErrorCode::invalid_argument, path_ + ": " + why);
}

void Safetensors::readHeader() {
    std::error_code error;
    const auto status = std::filesystem::status(path_, error);
    if (status.type() == std::filesystem::file_type::not_found) fail("no such file");
    if (error) fail(error.message());
    if (!std::filesystem::is_regular_file(status)) fail("is not a regular file");
    const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path_, error));
    if (error) fail(error.message());
    errno = 0;
    file_.open(path_, std::ios::binary);
    std::array<unsigned char, length_bytes> length{};
    if (!file_) fail(errno != 0 ? std::strerror(errno) : "cannot be read");
    if (!file_.read(reinterpret_cast<char*>(length.data()), length_bytes)) {
        fail("is no safetensors file: shorter than 8 bytes");
    }
    const auto header_bytes = std::bit_cast<std::uint64_t>(length);
    const std::int64_t most = std::min(most_header_bytes, size - length_bytes);
    if (header_bytes > static_cast<std::uint64_t>(most)) {
        fail(fmt::format("is no safetensors file, or cut off: a header of {} bytes in {}",
                         header_bytes, size));
    }
    std::string text(header_bytes, '\0');
    if (!file_.read(text.data(), static_cast<std::streamsize>(text.size()))) fail("cannot be read");
    data_ = length_bytes + static_cast<std::int64_t>(header_bytes);

    // Before it is parsed: what it cannot be may be large.
    if (text.empty() || text.front() != '{') fail("the header is no object");
    const nlohmann::json header = parseJson(text, path_ + ": the header ");
    for (const auto& [name, value] : header.items()) {
        if (name == "__metadata__") continue;
        const JsonFields fields(value, path_ + ": " + name + ": ");
        tensors_.emplace(name, tensorOf(fields, size - data_));
    }
    std::vector<const std::pair<const std::string, Tensor>*> in_order;
    for (const auto& tensor : tensors_)
        in_order.push_back(&tensor);
    std::sort(in_order.begin(), in_order.end(), [](const auto* a, const auto* b) {
        return std::pair(a->second.begin, a->second.end) <
               std::pair(b->second.begin, b->second.end);
    });
    std::int64_t end = 0;
    for (const auto* entry : in_order) {
        if (entry->second.begin < end) fail(entry->first + ": overlaps the tensor before it");
        if (entry->second.begin > end) fail(entry->first + ": bytes before it are of no tensor");
        end = entry->second.end;
    }
    if (end != size - data_) fail("bytes behind the last tensor are of none");
}

std::vector<float> Safetensors::read(const std::string& name, std::int64_t most) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail(name + ": is not there");
    const Tensor& tensor = found->second;
    const bool wide = tensor.dtype == "F32";
    if (!wide && tensor.dtype != "F16" && tensor.dtype != "BF16") {
        fail(fmt::format("{}: dtype {}, not F32, F16 or BF16", name, tensor.dtype));
    }
    const NumberFormat format = wide                    ? NumberFormat::fp32
                                : tensor.dtype == "F16" ? NumberFormat::fp16
                                                        : NumberFormat::bf16;
    std::int64_t count = 1;
    for (const std::int64_t dimension : tensor.shape) {
        if (__builtin_mul_overflow(count, dimension, &count) || count > most) {
            fail(fmt::format("{}: more than {} values", name, most));
        }
    }
    if (tensor.end - tensor.begin != count * static_cast<std::int64_t>(bytesPerElement(format))) {
        fail(fmt::format("{}: {} bytes for {} values of {}", name, tensor.end - tensor.begin, count,
                         tensor.dtype));
    }
    std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.end - tensor.begin));
    file_.seekg(data_ + tensor.begin);
    if (!file_.read(reinterpret_cast<char*>(bytes.data()),
                    static_cast<std::streamsize>(bytes.size())))
        fail(name + ": cannot be read");
    return widened(format, bytes);
}

}  // namespace kvgrid::launch
