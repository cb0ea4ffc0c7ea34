#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/explain.hpp>
#include <clattn/tuning.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"
#include "kernels/choose/variants.hpp"

namespace attention_test {

inline std::vector<const clattn::detail::Variant*> variants_of(
    const std::vector<clattn::detail::Role>& roles) {
  std::vector<const clattn::detail::Variant*> chosen;
  for (const clattn::detail::Variant& variant : clattn::detail::variants())
    if (std::ranges::find(roles, variant.role) != roles.end()) chosen.push_back(&variant);
  return chosen;
}

/// While it lives, layers on a context get these rows of variants.inc, one of a role, where they
/// fit. On CPUs, GPU kernels have the tuning database's device class "gpu".
class ForcedVariants {
 public:
  ForcedVariants(std::shared_ptr<clattn::Context> context,
                 const std::vector<const clattn::detail::Variant*>& variants)
      : context_(std::move(context)) {
    std::vector<clattn::TuningRow> rows;
    for (const clattn::detail::Variant* variant : variants) {
      clattn::TuningRow& row = rows.emplace_back();
      row.device = variant->family() == clattn::KernelFamily::kCpu ? "cpu" : "gpu";
      row.role = clattn::detail::to_string(variant->role);
      row.variant = variant->name;
    }
    clattn::set_tuning(*context_, rows);
  }
  ~ForcedVariants() { clattn::set_tuning(*context_, {}); }
  ForcedVariants(const ForcedVariants&) = delete;
  ForcedVariants& operator=(const ForcedVariants&) = delete;

 private:
  std::shared_ptr<clattn::Context> context_;
};

/// Expects a row among the kernels that ran, unless the driver spills its registers, so that
/// another one ran. Whether it ran.
inline bool expect_ran(const std::shared_ptr<clattn::Context>& context,
                       const clattn::detail::Variant& variant, const CaseSpec& spec,
                       const CaseResult& result) {
  if (std::ranges::find(result.kernels, variant.name) != result.kernels.end()) return true;
  const auto& backend =
      *clattn::get_attn_backend(spec.config, &context->capabilities(), spec.backend);
  const auto candidates = backend.make_impl(context, spec.config)->candidates();
  const auto candidate = std::ranges::find(candidates, variant.name, &clattn::Candidate::name);
  const std::string reason = candidate == candidates.end() ? "no candidate" : candidate->reason;
  EXPECT_TRUE(reason.starts_with("spills "))
      << variant.name << " did not run: " << reason << "; "
      << (result.kernels.empty() ? "none" : result.kernels.front()) << " did: " << describe(spec);
  return false;
}

}  // namespace attention_test
