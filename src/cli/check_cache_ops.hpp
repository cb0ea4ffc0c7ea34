#pragma once

#include <clattn/context.hpp>
#include <memory>

#include "cli/check_plan.hpp"
#include "cli/check_report.hpp"

namespace clattn::cli {

/// A line for each operation on caches and attention states: copying and swapping blocks, latent
/// rows in and out, appending by page lists, merging states, advancing a step.
void plan_cache_ops(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan);

}  // namespace clattn::cli
