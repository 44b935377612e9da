// Files that come with the program: models and traces.
#pragma once

#include <filesystem>
#include <string>

#include <kvgrid/error.h>

namespace kvgrid::launch {

// ../share/kvgrid beside the folder of the running program.
[[nodiscard]] std::filesystem::path sharedFolder();

// The whole text of a regular file of at most 1 GiB. invalid_argument: it is missing, no regular
// file, larger, or cannot be read; the message names it.
[[nodiscard]] Result<std::string> readFile(const std::string& path);

}  // namespace kvgrid::launch
