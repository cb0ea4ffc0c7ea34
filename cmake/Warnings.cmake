# Warnings for our own targets; errors for developers only, so that a new compiler never breaks a user.
function(clattn_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                         -Wsign-conversion -Wnon-virtual-dtor -Woverloaded-virtual)
  if(CLATTN_DEVELOPER_MODE)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
