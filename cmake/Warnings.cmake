# Warnings for our own targets; errors for developers only, so that a new compiler never breaks a user.
function(clattn_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                         -Wsign-conversion -Wnon-virtual-dtor -Woverloaded-virtual)
  # GCC 12 sees overlapping copies in std::string's operator+ where there are none (GCC bug 105651).
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
  if(CLATTN_DEVELOPER_MODE)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
