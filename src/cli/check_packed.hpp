#pragma once

#include <clattn/attention.hpp>

#include "cli/verify.hpp"

namespace clattn::cli {

/// Writes rows to an x-packed cache (reshape_and_cache) full of poison and compares all its bytes,
/// and those behind it, with what must be there. Sets the device time of the write.
Deviation compare_packed_write(const Context& context, const AttentionConfig& config,
                               double& latency_us);

}  // namespace clattn::cli
