#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/choose/attention_kernels.hpp"

namespace clattn::detail {

/// A choice of kernels under way: for whom, and everything that was considered so far.
struct KernelChoice {
  TunedDevice device;
  const KernelShape& shape;
  KernelFamily family;
  /// Null: nothing is built, and every variant that the capabilities allow is assumed to fit.
  Runtime* runtime;
  std::string bundle = {};  ///< result of Runtime::expect()
  std::vector<Candidate> considered = {};
  std::vector<std::string> rejected = {};  ///< those that take the shape, but do not work here

  std::optional<Variant> tuned(Role role) const {
    return tuned_variant(device, shape, family, role);
  }
  void pass(const Variant& variant, std::string why);
  void reject(const Variant& variant, const std::string& why);
  /// Marks a role's variants that were chosen, and says why others were not looked at.
  void finish_role(Role role, std::span<const BuiltKernel> chosen);
};

}  // namespace clattn::detail
