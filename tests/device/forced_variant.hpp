#pragma once

#include <algorithm>
#include <clattn/tuning.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

}  // namespace attention_test
