// Reads single tensors of a .safetensors file, the format of Hugging Face checkpoints: 8 bytes, the
// little-endian length of the header; the header, a JSON object that gives each tensor its dtype,
// shape and place; the data.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace kvgrid::launch {

class Safetensors {
public:
    struct Tensor {
        std::string dtype;  // "F32"
        std::vector<std::int64_t> shape;
        std::int64_t begin = 0;  // bytes [begin, end) of the data
        std::int64_t end = 0;
    };

    // Reads the header. Throws Error (invalid_argument) as "file: what is wrong": it cannot be
    // read, its header is none, or its tensors are not the data from end to end: one is cut off,
    // two overlap, bytes between them are of none.
    explicit Safetensors(std::string path);

    [[nodiscard]] const std::map<std::string, Tensor>& tensors() const noexcept { return tensors_; }

    // The values of a tensor of F32, F16 or BF16, as fp32; infinities of 16 bits become NaN. Throws
    // Error (invalid_argument) as "file: name: what is wrong": it is not there, another dtype,
    // bytes that are not those of its shape, or more than `most` values.
    [[nodiscard]] std::vector<float> read(const std::string& name, std::int64_t most);

private:
    void readHeader();
    [[noreturn]] void fail(const std::string& why) const;

    std::string path_;
    std::ifstream file_;
    std::int64_t data_ = 0;  // where the data begin
    std::map<std::string, Tensor> tensors_;
};

}  // namespace kvgrid::launch
