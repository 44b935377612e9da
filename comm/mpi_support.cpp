#include "comm/mpi_support.h"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>

#include <kvgrid/error.h>

namespace kvgrid::comm {
namespace {

bool isMisuse(int error_class) {
    switch (error_class) {
    case MPI_ERR_BUFFER:
    case MPI_ERR_COUNT:
    case MPI_ERR_TYPE:
    case MPI_ERR_TAG:
    case MPI_ERR_COMM:
    case MPI_ERR_RANK:
    case MPI_ERR_ROOT:
    case MPI_ERR_OP:
    case MPI_ERR_ARG:
    case MPI_ERR_REQUEST:
    case MPI_ERR_TRUNCATE:
        return true;
    default:
        return false;
    }
}

}  // namespace

void checkMpi(int mpi_result, const char* operation) {
    if (mpi_result == MPI_SUCCESS) return;
    int error_class = MPI_ERR_UNKNOWN;
    MPI_Error_class(mpi_result, &error_class);
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    MPI_Error_string(mpi_result, text.data(), &length);
    throw Error(isMisuse(error_class) ? ErrorCode::internal : ErrorCode::deadline,
                fmt::format("{} failed: {}", operation,
                            std::string_view(text.data(), static_cast<std::size_t>(length))));
}

// Open MPI says "Open MPI v4.1.4, package: Debian OpenMPI, ident: ...".
std::string mpiLibrary() {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    MPI_Get_library_version(text.data(), &length);
    std::string library(text.data(), static_cast<std::size_t>(length));
    library.resize(std::min(library.find_first_of(",\n"), library.size()));
    if (const auto v = library.find(" v"); v != std::string::npos) library.erase(v + 1, 1);
    return library;
}

}  // namespace kvgrid::comm
