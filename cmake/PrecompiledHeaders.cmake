# Headers that most sources include, read once for each target: a quarter of a build's time. A build
# inside another project leaves them to it, and ./dev lint parses src without them, so that it finds
# a source that does not include what it uses.
option(CLATTN_PRECOMPILED_HEADERS "Read the most frequent headers once for each target"
       ${CLATTN_DEVELOPER_MODE})

function(clattn_precompiled_headers target) # HEADER...: besides those of all targets
  if(CLATTN_PRECOMPILED_HEADERS)
    target_precompile_headers(
      ${target} PRIVATE <algorithm> <functional> <memory> <string> <vector> <fmt/format.h>
      <clattn/clattn.hpp> ${ARGN})
  endif()
endfunction()
