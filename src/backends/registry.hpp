#pragma once

#include <clattn/attention.hpp>

namespace clattn::detail {

// Each backend's file defines its function; the entry it returns lives as long as the process.
#define CLATTN_BACKEND(function) const AttentionBackend& function();
#include "backends/backend_list.inc"
#undef CLATTN_BACKEND

}  // namespace clattn::detail
