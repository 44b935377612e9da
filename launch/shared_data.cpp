#include "launch/shared_data.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

namespace kvgrid::launch {

std::filesystem::path sharedFolder() {
    std::error_code ignored;
    const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
    return program.parent_path().parent_path() / "share" / "kvgrid";
}

Result<std::string> readFile(const std::string& path) {
    constexpr std::uintmax_t most_bytes = 1 << 30;
    const auto wrong = [&](const std::string& why) {
        return failure(ErrorCode::invalid_argument, path + ": " + why);
    };
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (status.type() == std::filesystem::file_type::not_found) return wrong("no such file");
    if (error) return wrong(error.message());
    if (!std::filesystem::is_regular_file(status)) return wrong("is not a regular file");
    const auto size = std::filesystem::file_size(path, error);
    if (error) return wrong(error.message());
    if (size > most_bytes) return wrong("is larger than 1 GiB");

    errno = 0;
    std::ifstream file(path, std::ios::binary);
    std::string text(size, '\0');
    if (!file || !file.read(text.data(), static_cast<std::streamsize>(size))) {
        return wrong(errno != 0 ? std::strerror(errno) : "cannot be read");
    }
    return text;
}

}  // namespace kvgrid::launch
