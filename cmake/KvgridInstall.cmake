# cmake --install, and the package that find_package(kvgrid) reads.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvgrid)

install(TARGETS kvgrid EXPORT kvgridTargets FILE_SET HEADERS)
install(EXPORT kvgridTargets NAMESPACE kvgrid:: DESTINATION ${package_dir})
if(TARGET kvgrid_cli)
    set_target_properties(kvgrid_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
    install(TARGETS kvgrid_cli)
endif()
# The program looks for these relative to itself: ../share/kvgrid.
install(DIRECTORY launch/models launch/traces DESTINATION share/kvgrid)
install(FILES LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR})

configure_package_config_file(cmake/kvgridConfig.cmake.in
    ${PROJECT_BINARY_DIR}/generated/kvgridConfig.cmake
    INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/generated/kvgridConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
install(FILES
    ${PROJECT_BINARY_DIR}/generated/kvgridConfig.cmake
    ${PROJECT_BINARY_DIR}/generated/kvgridConfigVersion.cmake
    cmake/FindNCCL.cmake
    cmake/FindNuma.cmake
    cmake/FindxxHash.cmake
    DESTINATION ${package_dir})
