# libnuma, which has no CMake package of its own. Defines numa::numa.

find_path(Numa_INCLUDE_DIR numa.h)
find_library(Numa_LIBRARY numa)
mark_as_advanced(Numa_INCLUDE_DIR Numa_LIBRARY)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Numa REQUIRED_VARS Numa_LIBRARY Numa_INCLUDE_DIR)
if(Numa_FOUND AND NOT TARGET numa::numa)
    add_library(numa::numa UNKNOWN IMPORTED)
    set_target_properties(numa::numa PROPERTIES
        IMPORTED_LOCATION "${Numa_LIBRARY}"
        INTERFACE_INCLUDE_DIRECTORIES "${Numa_INCLUDE_DIR}")
endif()
