# The CUDA compiler and runtime, and what CUDA files are compiled with.

# Only our own -gencode flags choose architectures: CMake's list knows no PTX beside a 90a.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES OFF)
endif()
enable_language(CUDA)
# CMake 3.25 does not know that this compiler knows C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)
if(KVGRID_NCCL)
    find_package(NCCL 2.18 QUIET)
    if(NOT NCCL_FOUND)
        message(FATAL_ERROR "KVGRID_NCCL=ON needs nccl.h and libnccl 2.18 or newer (name them with "
            "-DNCCL_INCLUDE_DIR=... -DNCCL_LIBRARY=...); with -DKVGRID_NCCL=OFF GPU ranks talk over MPI")
    endif()
endif()
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.5)
    message(FATAL_ERROR "CUDA ${CMAKE_CUDA_COMPILER_VERSION} was found; CUDA 12.5 is the oldest with cudaGetDriverEntryPointByVersion")
endif()
if(KVGRID_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${KVGRID_CCACHE})
endif()

set(kvgrid_gencode "")
foreach(architecture IN LISTS KVGRID_CUDA_ARCHITECTURES)
    if(NOT architecture MATCHES "^[0-9]+[af]?$")
        message(FATAL_ERROR "KVGRID_CUDA_ARCHITECTURES: ${architecture} is not like 80 or 90a")
    endif()
    if(architecture MATCHES "^(9|[0-9][0-9])[0-9]" AND NOT architecture STREQUAL "90a")
        message(FATAL_ERROR "KVGRID_CUDA_ARCHITECTURES: ${architecture}: from 90 on there is code for 90a alone; newer GPUs "
            "run the PTX of one before, as 80")
    endif()
    list(APPEND kvgrid_gencode
        "SHELL:-gencode arch=compute_${architecture},code=sm_${architecture}")
    # PTX of plain architectures, for GPUs that come later.
    if(architecture MATCHES "^[0-9]+$")
        list(APPEND kvgrid_gencode
            "SHELL:-gencode arch=compute_${architecture},code=compute_${architecture}")
    endif()
endforeach()

target_compile_options(kvgrid_options INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:
    ${kvgrid_gencode}
    -fmad=false  # as -ffp-contract=off; fused operations are written
    # -Wshadow is left to the C++ files: nvcc's own stubs would not pass.
    -Xcompiler=-Wall,-Wextra,-ffp-contract=off$<$<BOOL:${KVGRID_WERROR}>:,-Werror>
    $<$<BOOL:${KVGRID_WERROR}>:-Werror=all-warnings>
    $<$<CONFIG:Release>:-lineinfo>>)
