#pragma once

#include <clattn/attention_config.hpp>
#include <clattn/context.hpp>
#include <memory>
#include <span>
#include <string_view>

#include "cli/check_plan.hpp"

namespace clattn::cli {

/// Families of kernels that variants belong to.
inline constexpr auto kVariantFamilies = std::span(kKernelFamilies).subspan<1>();  // all but kAuto

/// What to run; empty: all.
struct VariantFilter {
  std::string_view backend, family;
};

/// Runs kernel variants that the device takes and prints a line of error and latency for each. One
/// that was built but never ran fails.
void plan_variants(const std::shared_ptr<Context>& context, VariantFilter only, CheckPlan& plan);

}  // namespace clattn::cli
