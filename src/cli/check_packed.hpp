#pragma once

#include <clattn/attention.hpp>
#include <cstdint>
#include <memory>
#include <vector>

#include "cli/check_batches.hpp"
#include "cli/check_plan.hpp"
#include "cli/check_report.hpp"

namespace clattn::cli {

/// Writes rows to an x-packed cache (reshape_and_cache) full of poison and compares all its bytes,
/// and those behind it, with what must be there.
Verdict compare_packed_write(const Context& context, const AttentionConfig& config);

/// Decode over an x-packed cache (paged_attention_v1 and v2) against the oracle.
Verdict compare_packed_attention(const std::shared_ptr<Context>& context,
                                 const AttentionConfig& config, const BatchFamily& family,
                                 std::uint32_t seed);
/// Decodes alone, unsplit and split.
const std::vector<BatchFamily>& packed_batches();

/// The lines of x-packed caches: writes and decodes, with every kind of type.
void plan_packed(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan);

}  // namespace clattn::cli
