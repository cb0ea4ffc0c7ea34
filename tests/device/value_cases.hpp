#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "device/attention_case.hpp"
#include "device/forced_variant.hpp"

/// Cases with values of fewer elements than keys.
namespace value_test {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using clattn::detail::Variant;

struct Sizes {
  std::int32_t key, value;
};

inline CaseResult expect_right(const std::shared_ptr<clattn::Context>& context,
                               const CaseSpec& spec) {
  const CaseResult result = attention_test::run_case(context, spec);
  EXPECT_EQ(result.fault, "") << describe(spec);
  EXPECT_LE(result.worst_share, 1.0)
      << describe(spec) << "\n on " << context->capabilities().name << "\n " << result.worst_place;
  return result;
}

/// Expects a row to be right in the cases that it takes, on the devices that run it; `forced`: it
/// and rows of other roles. False if nothing ran.
inline bool expect_row_right(const Variant& variant, const std::vector<const Variant*>& forced,
                             std::span<const CaseSpec> cases) {
  bool ran = false;
  for (const auto& context : attention_test::all_contexts()) {
    if (!clattn::detail::why_not(variant, context->capabilities()).empty()) continue;
    const attention_test::ForcedVariants rows(context, forced);
    for (const CaseSpec& spec : cases) {
      if (!takes_shape(variant, clattn::detail::kernel_shape(spec.config))) continue;
      const CaseResult result = expect_right(context, spec);
      ran |= attention_test::expect_ran(context, variant, spec, result);
    }
  }
  return ran;
}

}  // namespace value_test
