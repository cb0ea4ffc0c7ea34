# Sets clattn_version from include/clattn/version.h, the one place that has it.
set(version_header ${CMAKE_CURRENT_LIST_DIR}/../include/clattn/version.h)
file(STRINGS ${version_header} clattn_version REGEX "^#define CLATTN_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" clattn_version "${clattn_version}")
list(JOIN clattn_version . clattn_version)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${version_header})
