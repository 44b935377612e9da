// What the files that call MPI share.
#pragma once

#include <string>

namespace kvgrid::comm {

// Throws Error for every MPI result but success: internal where the arguments were wrong, deadline
// where the other ranks cannot be reached any more.
void checkMpi(int mpi_result, const char* operation);

// Name and version of the library that is loaded: "Open MPI 4.1.4". MPI need not run.
[[nodiscard]] std::string mpiLibrary();

}  // namespace kvgrid::comm
