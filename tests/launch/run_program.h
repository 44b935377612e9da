// Runs the built program and catches what it prints.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace kvgrid::test {

// A folder of its own for each test, gone afterwards.
class TempFolder {
public:
    TempFolder() {
        std::string pattern = testing::TempDir() + "kvgrid_test_XXXXXX";
        if (mkdtemp(pattern.data()) == nullptr) std::abort();
        path_ = pattern;
    }
    TempFolder(const TempFolder&) = delete;
    TempFolder& operator=(const TempFolder&) = delete;
    ~TempFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    [[nodiscard]] std::string operator/(const std::string& name) const {
        return (path_ / name).string();
    }
    [[nodiscard]] const std::filesystem::path& path() const { return path_; }

private:
    std::filesystem::path path_;
};

inline std::string readText(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

inline void writeText(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

struct Finished {
    int code = -1;  // 128 + signal when it was killed
    std::string out;
    std::string err;

    [[nodiscard]] std::string lastLine() const {
        std::string text = out;
        while (text.ends_with('\n'))
            text.pop_back();
        return text.substr(text.rfind('\n') + 1);
    }
};

// `command`: program and arguments. No shell.
inline Finished run(const std::vector<std::string>& command) {
    const TempFolder folder;
    std::vector<char*> argv;
    for (const std::string& word : command)
        argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const std::string out = folder / "out";
    const std::string err = folder / "err";
    const pid_t child = fork();
    if (child == 0) {
        const int out_fd = open(out.c_str(), O_WRONLY | O_CREAT, 0600);
        const int err_fd = open(err.c_str(), O_WRONLY | O_CREAT, 0600);
        dup2(out_fd, STDOUT_FILENO);
        dup2(err_fd, STDERR_FILENO);
        execv(argv[0], argv.data());
        _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
            .out = readText(out),
            .err = readText(err)};
}

}  // namespace kvgrid::test
