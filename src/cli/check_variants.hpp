#pragma once

#include <array>
#include <clattn/attention_config.hpp>
#include <clattn/context.hpp>
#include <memory>
#include <string_view>

namespace clattn::cli {

/// Families of kernels that variants belong to.
inline constexpr std::array kVariantFamilies = {KernelFamily::kCpu, KernelFamily::kGpu,
                                                KernelFamily::kGpuPtx};

/// What to run; empty: all.
struct VariantFilter {
  std::string_view backend, family;
};

/// Runs every kernel variant that the device takes and prints a line of error and latency for each.
/// Returns whether all passed; a variant that was built but never ran does not.
bool check_variants(const std::shared_ptr<Context>& context, VariantFilter only);

}  // namespace clattn::cli
