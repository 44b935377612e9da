# How everything of kvgrid is compiled, and kvgrid_floor(), which makes one floor of the library.

if(PROJECT_IS_TOP_LEVEL)
    if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
        set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
    endif()
    set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
    find_program(KVGRID_CCACHE ccache)
    mark_as_advanced(KVGRID_CCACHE)
    if(KVGRID_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
        set(CMAKE_CXX_COMPILER_LAUNCHER ${KVGRID_CCACHE})
    endif()
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)

# What every target of ours is compiled with, tests included. Never exported. CUDA files: KvgridCuda.
add_library(kvgrid_options INTERFACE)
target_compile_options(kvgrid_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:
    # The same tokens must give the same bits in every build. A compiler that may fuse a*b+c does so
    # where it pleases, and differently from one call site to the next. Fused operations are written.
    -ffp-contract=off
    -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Werror=return-type
    $<$<BOOL:${KVGRID_WERROR}>:-Werror>
    # GCC 12 sees overlapping copies in "literal" + std::string (GCC bug 105651).
    $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
    # Line tables for profilers and stack traces. No -march: Highway picks the target at run time.
    $<$<CONFIG:Release>:-g1>>)
target_compile_definitions(kvgrid_options INTERFACE
    OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1  # the C interface of MPI, not its C++ bindings
    $<$<BOOL:${KVGRID_FAULT_INJECTION}>:KVGRID_FAULT_INJECTION=1>)
target_include_directories(kvgrid_options INTERFACE
    ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include
    ${PROJECT_BINARY_DIR}/generated ${PROJECT_BINARY_DIR}/generated/include)

if(KVGRID_SANITIZE)
    add_compile_options(-fsanitize=${KVGRID_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    # GCC 12 under sanitizers takes parts of std::regex for uninitialised (GCC bug 105562).
    add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    add_compile_definitions(_GLIBCXX_ASSERTIONS)
    add_link_options(-fsanitize=${KVGRID_SANITIZE})
endif()

# kvgrid_floor(NAME SOURCES file... [LINK target...])
#
# Makes the object library kvgrid_NAME and adds its objects to the library kvgrid. LINK names the
# dependencies that this floor may see; what is not named here cannot be included.
function(kvgrid_floor name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINK")
    if(arg_UNPARSED_ARGUMENTS)
        message(FATAL_ERROR "kvgrid_floor(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
    endif()
    if(NOT arg_SOURCES)
        return()
    endif()
    add_library(kvgrid_${name} OBJECT ${arg_SOURCES})
    target_link_libraries(kvgrid_${name} PRIVATE kvgrid_options tl::expected ${arg_LINK})
    target_sources(kvgrid PRIVATE $<TARGET_OBJECTS:kvgrid_${name}>)
endfunction()
