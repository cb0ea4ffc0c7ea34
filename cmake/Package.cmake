# Installation and the package that find_package(clattn) reads.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
install(TARGETS clattn EXPORT clattn_targets)
install(DIRECTORY include/clattn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/clattn)
install(EXPORT clattn_targets NAMESPACE clattn:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/clattn-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/clattn-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/clattn-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/clattn-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/clattn-config-version.cmake DESTINATION ${package_dir})
