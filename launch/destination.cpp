#include "launch/destination.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

namespace kvgrid::launch {

namespace {

tl::unexpected<Failure> invalid(std::string message) {
    return failure(ErrorCode::invalid_argument, std::move(message));
}

std::atomic<bool> verdict_given{false};
std::atomic<int> verdict_descriptor{STDOUT_FILENO};

// May be called on any thread and from a signal handler.
void failedVerdict(const char* why) noexcept {
    if (verdict_given.exchange(true)) return;
    std::array<char, 640> line{"FAILED: "};  // one write, so that nothing comes between
    const std::size_t begun = std::strlen(line.data());
    const std::size_t told = std::min(std::strlen(why), line.size() - begun - 1);
    std::memcpy(line.data() + begun, why, told);
    line[begun + told] = '\n';
    [[maybe_unused]] const auto written =
        ::write(verdict_descriptor.load(), line.data(), begun + told + 1);
}

void onTermination(int signal) {
    failedVerdict("the launcher ended the job: another rank was lost, or it was told to");
    std::signal(signal, SIG_DFL);
    std::raise(signal);
}

// A file that this program made and nobody had before. Removed again unless kept.
class NewFile {
public:
    static Result<NewFile> create(const std::string& path, std::string_view flag) {
        constexpr mode_t mode = 0644;
        const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (descriptor >= 0) return NewFile(descriptor, path);
        if (errno == EEXIST) {
            return invalid(fmt::format("{}: {} exists and is not overwritten", flag, path));
        }
        return invalid(fmt::format("{}: cannot write {}: {}", flag, path, std::strerror(errno)));
    }

    NewFile(NewFile&& other) noexcept
        : descriptor_(std::exchange(other.descriptor_, -1)),
          path_(std::move(other.path_)) {}
    NewFile& operator=(NewFile&&) = delete;

    ~NewFile() {
        if (descriptor_ < 0) return;
        ::close(descriptor_);
        ::unlink(path_.c_str());
    }

    // Writes all of it and keeps the file, or says why not.
    Result<void> keep(std::string_view text, std::string_view flag) {
        while (!text.empty()) {
            const ssize_t written = ::write(descriptor_, text.data(), text.size());
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) return wrong(flag);
            text.remove_prefix(static_cast<std::size_t>(written));
        }
        if (::close(std::exchange(descriptor_, -1)) != 0) {
            auto failed = wrong(flag);
            ::unlink(path_.c_str());
            return failed;
        }
        return {};
    }

private:
    NewFile(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}

    tl::unexpected<Failure> wrong(std::string_view flag) const {
        return invalid(fmt::format("{}: cannot write {}: {}", flag, path_, std::strerror(errno)));
    }

    int descriptor_;
    std::string path_;
};

Result<void> writeFile(const std::string& path, std::string_view flag, std::string_view text) {
    return NewFile::create(path, flag).and_then([&](NewFile&& file) {
        return file.keep(text, flag);
    });
}

Result<void> writeAll(std::FILE* out, std::string_view text) {
    const bool written = std::fwrite(text.data(), 1, text.size(), out) == text.size();
    if (written && std::fflush(out) == 0) return {};
    return invalid(fmt::format("--json -: cannot write stdout: {}", std::strerror(errno)));
}

// Before the arguments are known to be right.
bool wantsJsonOnStdout(int argc, const char* const* argv) {
    for (int i = 1; i < argc; ++i) {
        const std::string_view argument = argv[i];
        if (argument == "--json=-") return true;
        if (argument == "--json" && i + 1 < argc && std::string_view(argv[i + 1]) == "-")
            return true;
    }
    return false;
}

}  // namespace

Destination::Destination(std::string json, std::string csv)
    : json_(std::move(json)),
      csv_(std::move(csv)) {}

Result<Destination> Destination::check(std::string json, std::string csv) {
    if (csv == "-") return invalid("--csv: '-' is for --json; give a file");
    // Both exist until both are made, so that one file under two names is seen.
    std::optional<NewFile> json_probe;
    if (!json.empty() && json != "-") {
        auto made = NewFile::create(json, "--json");
        if (!made) return tl::unexpected(made.error());
        json_probe.emplace(std::move(*made));
    }
    if (!csv.empty()) {
        const auto made = NewFile::create(csv, "--csv");
        if (!made && json == csv) return invalid("--csv: " + csv + " is what --json writes");
        if (!made) return tl::unexpected(made.error());
    }
    return Destination(std::move(json), std::move(csv));
}

Result<void> Destination::write(const Report& report) const {
    if (!csv_.empty()) {
        const auto written = writeFile(csv_, "--csv", report.csv());
        if (!written) return written;
    }
    if (json_.empty()) return {};
    return jsonOnStdout() ? writeAll(stdout, report.json())
                          : writeFile(json_, "--json", report.json());
}

LastWords armVerdict(bool text_on_stderr) {
    if (launcherRank() != 0) return nullptr;
    verdict_descriptor = text_on_stderr ? STDERR_FILENO : STDOUT_FILENO;
    std::signal(SIGTERM, onTermination);
    return failedVerdict;
}

int verdict(std::FILE* out, int code, std::string_view reason) {
    verdict_given = true;
    std::string line = code == 0 ? "OK" : fmt::format("FAILED: {}", reason);
    std::replace(line.begin(), line.end(), '\n', ' ');
    std::fprintf(out, "%s\n", line.c_str());
    if (std::fflush(out) == 0 && std::ferror(out) == 0) return code;
    std::fprintf(stderr, "kvgrid: the output could not be written\n");
    return code != 0 ? code : exitCode(ErrorCode::invalid_argument);
}

int launcherRank() {
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
        if (const char* rank = std::getenv(name)) return std::atoi(rank);
    }
    return 0;
}

int refuse(int argc, const char* const* argv, const Failure& failure, Speaker speaker) {
    const int code = exitCode(failure.code);
    const int rank = launcherRank();
    if (rank != 0 && speaker == Speaker::first_rank) {
        // The launcher ends all ranks at the first exit code that is not 0: the first rank's
        // verdict must be out by then. When it is, the launcher cuts this short.
        std::this_thread::sleep_for(std::chrono::seconds(1));
        return code;
    }
    std::string line = fmt::format("kvgrid {}: {}\n", argv[0], failure.message);
    if (rank != 0) line = fmt::format("[rank {}] {}", rank, line);
    if (failure.code == ErrorCode::invalid_argument && rank == 0) {
        line += fmt::format("'kvgrid {} --help' lists the flags.\n", argv[0]);
    }
    std::fputs(line.c_str(), stderr);
    if (rank != 0) return code;
    return verdict(wantsJsonOnStdout(argc, argv) ? stderr : stdout, code, failure.message);
}

}  // namespace kvgrid::launch
