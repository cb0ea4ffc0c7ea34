# Installation, what find_package(clattn) and pkg-config read, and Debian packages. Components:
# runtime (the shared library), dev (headers and what builds with them), tools (the program and its
# manual pages), docs (documents and examples).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
install(TARGETS clattn EXPORT clattn_targets
        RUNTIME COMPONENT runtime
        LIBRARY COMPONENT runtime NAMELINK_COMPONENT dev
        ARCHIVE COMPONENT dev)
install(DIRECTORY include/clattn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)

# Documents and examples, laid out as here, so that the links between them resolve. A build inside
# another project installs only what programs need. examples/CMakeLists.txt is part of this build.
if(PROJECT_IS_TOP_LEVEL)
  file(GLOB pages CONFIGURE_DEPENDS *.md)
  install(FILES ${pages} CITATION.cff DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT docs)
  install(DIRECTORY docs examples DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT docs
          REGEX "/examples/CMakeLists\\.txt$|/__pycache__$" EXCLUDE)
  # As for clattn-tools: the package of these files may stand without the library's.
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/clattn-doc COMPONENT docs)
endif()

# find_package(clattn), from an installation or from this build.
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/clattn)
set(compatibility SameMajorVersion)
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(compatibility SameMinorVersion)
endif()
install(EXPORT clattn_targets NAMESPACE clattn:: DESTINATION ${package_dir} COMPONENT dev)
export(EXPORT clattn_targets NAMESPACE clattn:: FILE clattn_targets.cmake)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/clattn-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/clattn-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/clattn-config-version.cmake
  COMPATIBILITY ${compatibility})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/clattn-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/clattn-config-version.cmake DESTINATION ${package_dir}
  COMPONENT dev)

# pkg-config: a static library names what it is linked with, the shared one has it inside.
set(private_requires "")
set(private_libraries "")
if(NOT BUILD_SHARED_LIBS)
  set(private_requires fmt)
  set(private_libraries "-lstdc++ -lm")
endif()
file(RELATIVE_PATH up /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${CMAKE_CURRENT_LIST_DIR}/clattn.pc.in clattn.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/clattn.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)

# cpack in the build folder makes four .deb files, of a build with the shared library
# (packaging/debs.sh).
if(PROJECT_IS_TOP_LEVEL AND BUILD_SHARED_LIBS)
  set(CPACK_GENERATOR DEB)
  set(CPACK_PACKAGE_VENDOR CLAttn)
  set(CPACK_PACKAGE_CONTACT "The CLAttn authors <noreply@localhost>")
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  set(CPACK_STRIP_FILES ON)
  set(CPACK_DEB_COMPONENT_INSTALL ON)
  set(CPACK_COMPONENTS_ALL runtime dev docs)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)

  set(runtime libclattn${clattn_abi})
  # Libraries of several architectures may stand side by side. CPack has a variable for the field
  # from CMake 3.31 on; this works with all: the field behind that of the section.
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION "libs\nMulti-Arch: same")
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME ${runtime})
  set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "${PROJECT_DESCRIPTION}
 The shared library. A driver for OpenCL is needed too.")
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS opencl-icd)

  set(CPACK_DEBIAN_DEV_PACKAGE_NAME libclattn-dev)
  set(CPACK_DEBIAN_DEV_PACKAGE_SECTION "libdevel\nMulti-Arch: same")
  set(CPACK_COMPONENT_DEV_DESCRIPTION "${PROJECT_DESCRIPTION}: development files
 Headers in C and C++, and what CMake and pkg-config read.")
  set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS
      "${runtime} (= ${PROJECT_VERSION}), ocl-icd-opencl-dev | opencl-dev, opencl-c-headers")

  set(CPACK_DEBIAN_DOCS_PACKAGE_NAME clattn-doc)
  set(CPACK_DEBIAN_DOCS_PACKAGE_SECTION "doc\nMulti-Arch: foreign")
  set(CPACK_DEBIAN_DOCS_PACKAGE_ARCHITECTURE all)
  set(CPACK_COMPONENT_DOCS_DESCRIPTION "${PROJECT_DESCRIPTION}: documents
 Guide, recipes, reference and examples, in /usr/share/doc/clattn.")

  if(CLATTN_DEVELOPER_MODE)
    list(APPEND CPACK_COMPONENTS_ALL tools)
    set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME clattn-tools)
    set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION utils)
    set(CPACK_DEBIAN_TOOLS_PACKAGE_RECOMMENDS opencl-icd)
    set(CPACK_COMPONENT_TOOLS_DESCRIPTION "${PROJECT_DESCRIPTION}: tools
 The program clattn, which lists, checks, measures and tunes devices.")
  endif()
  include(CPack)
endif()
