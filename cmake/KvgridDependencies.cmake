# Every dependency of kvgrid. All that are missing are named at once, with their Debian package and
# what they are for.

set(missing "")
macro(kvgrid_require debian_package purpose)
    find_package(${ARGN} QUIET)
    if(NOT ${ARGV2}_FOUND)
        string(APPEND missing "\n  ${ARGV2}: ${purpose} (Debian: ${debian_package})")
        list(APPEND missing_packages ${debian_package})
    endif()
endmacro()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
kvgrid_require(libopenmpi-dev "ranks and the MPI transport" MPI COMPONENTS C)
kvgrid_require(libhwy-dev "SIMD with run-time dispatch" hwy 1.0.3)
kvgrid_require(libexpected-dev "Result<T> in the public headers" tl-expected)
kvgrid_require(libxxhash-dev "digests" xxHash)
kvgrid_require(libfmt-dev "messages" fmt)
kvgrid_require(libnuma-dev "memory placement on hosts with several sockets" Numa)
kvgrid_require(nlohmann-json3-dev "reading model configurations and traces, JSON reports" nlohmann_json)
kvgrid_require(libcxxopts-dev "the command line" cxxopts)
if(KVGRID_TESTS)
    kvgrid_require(libgtest-dev "tests (or configure with -DKVGRID_TESTS=OFF)" GTest)
    kvgrid_require(librapidcheck-dev "property tests (or configure with -DKVGRID_TESTS=OFF)" rapidcheck)
endif()

if(missing)
    list(JOIN missing_packages " " missing_packages)
    message(FATAL_ERROR "kvgrid needs what was not found here:${missing}\n"
        "On Debian: apt-get install ${missing_packages}\n"
        "./launch/quickstart and ./launch/test install them by themselves.")
endif()
