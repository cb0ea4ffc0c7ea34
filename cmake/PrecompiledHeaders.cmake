# Headers that most sources include, read once for each target. The sanitizers' presets ask for it;
# other builds do not, so that they find a source that does not include what it uses.
option(CLATTN_PRECOMPILED_HEADERS "Read the most frequent headers once for each target" OFF)

function(clattn_precompiled_headers target) # HEADER...: besides those of all targets
  if(CLATTN_PRECOMPILED_HEADERS)
    target_precompile_headers(
      ${target} PRIVATE <algorithm> <functional> <memory> <string> <vector> <fmt/format.h>
      <clattn/clattn.hpp> ${ARGN})
  endif()
endfunction()
