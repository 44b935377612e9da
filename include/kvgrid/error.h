// Errors: what the caller can act on is a value (Result), what ends the job is an exception
// (Error).
//
// Capacity and misuse come back as a Failure that names the argument; only device and transport
// failures, after which the ranks can no longer agree, throw Error.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include <tl/expected.hpp>

namespace kvgrid {

enum class ErrorCode {
    invalid_argument,  // misuse or bad input; the message names the argument
    does_not_fit,      // no capacity, now or ever; the message says how much is missing
    unavailable,       // a device or transport that is not there
    deadline,          // an operation outlasted the timeout, or a rank was lost
    internal,          // an invariant broke: ranks disagree, a device call failed
};

// Process exit code of an error: 2 usage or bad input, 3 does not fit, 4 device or transport
// missing, 5 deadline passed or rank lost. 1 is for wrong values and broken invariants.
[[nodiscard]] int exitCode(ErrorCode code) noexcept;

struct Failure {
    ErrorCode code = ErrorCode::internal;
    std::string message;
};

template <typename T>
using Result = tl::expected<T, Failure>;

// `return failure(ErrorCode::invalid_argument, "block size 3 is not a power of two");`
[[nodiscard]] inline tl::unexpected<Failure> failure(ErrorCode code, std::string message) {
    return tl::unexpected<Failure>(Failure{code, std::move(message)});
}

class Error : public std::runtime_error {
public:
    Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
    explicit Error(const Failure& failure) : Error(failure.code, failure.message) {}

    [[nodiscard]] ErrorCode code() const noexcept { return code_; }

private:
    ErrorCode code_;
};

// The value, or the failure as an Error: for callers that cannot go on without it.
template <typename T>
T orThrow(Result<T> result) {
    if (!result) throw Error(result.error());
    if constexpr (!std::is_void_v<T>) return std::move(*result);
}

}  // namespace kvgrid
