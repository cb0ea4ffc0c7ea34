# Warnings for our own targets; errors where asked for (.ci/run asks), so that a compiler newer than
# ours never breaks a build.
option(CLATTN_WARNINGS_AS_ERRORS "Treat warnings in our own sources as errors"
       $ENV{CLATTN_WARNINGS_AS_ERRORS})
function(clattn_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                         -Wsign-conversion -Wnon-virtual-dtor -Woverloaded-virtual)
  # GCC 12 sees overlapping copies in std::string's operator+ where there are none (GCC bug 105651).
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
  if(CLATTN_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
