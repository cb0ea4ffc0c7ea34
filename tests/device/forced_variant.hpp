#pragma once

#include <clattn/tuning.hpp>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kernels/choose/variants.hpp"

namespace attention_test {

/// While it lives, layers on a context get this row of variants.inc, if it fits them. On CPUs, GPU
/// kernels have the tuning database's device class "gpu".
class ForcedVariant {
 public:
  ForcedVariant(std::shared_ptr<clattn::Context> context, const clattn::detail::Variant& variant)
      : context_(std::move(context)) {
    clattn::TuningRow row;
    row.device = variant.family() == clattn::KernelFamily::kCpu ? "cpu" : "gpu";
    row.role = clattn::detail::to_string(variant.role);
    row.variant = variant.name;
    clattn::set_tuning(*context_, std::span(&row, 1));
  }
  ~ForcedVariant() { clattn::set_tuning(*context_, {}); }
  ForcedVariant(const ForcedVariant&) = delete;
  ForcedVariant& operator=(const ForcedVariant&) = delete;

 private:
  std::shared_ptr<clattn::Context> context_;
};

}  // namespace attention_test
