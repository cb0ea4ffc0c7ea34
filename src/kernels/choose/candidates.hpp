#pragma once

#include <clattn/attention.hpp>
#include <span>
#include <string>
#include <vector>

#include "kernels/choose/tuned.hpp"

namespace clattn::detail {

/// Everything that was considered for the kernels of a shape.
struct Considered {
  std::vector<Candidate> all;
  std::vector<std::string> rejected;  ///< those that take the shape, but do not work here

  void pass(const Variant& variant, std::string why);
  void reject(const Variant& variant, const std::string& why);
};

/// Marks a role's variants that were chosen, and says of those that nobody looked at why not.
void finish_role(Role role, std::span<const Variant> chosen, const TunedDevice& device,
                 const KernelShape& shape, KernelFamily family, Considered& considered);

}  // namespace clattn::detail
