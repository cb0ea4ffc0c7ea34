#include "kernels/choose/candidates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace clattn {

std::string to_string(std::span<const Candidate> candidates) {
  std::string text;
  for (const Candidate& candidate : candidates) {
    fmt::format_to(std::back_inserter(text), "{}{:12} {:32} {}{}{}", text.empty() ? "" : "\n",
                   candidate.role, candidate.name, candidate.chosen ? "chosen" : "",
                   candidate.chosen && !candidate.reason.empty() ? ", " : "", candidate.reason);
  }
  return text;
}

namespace detail {
namespace {

std::string why_never_tried(const Variant& variant, const DeviceCapabilities& device,
                            KernelFamily family) {
  if (auto unmet = unmet_need(unit_of(variant.unit_id), device)) return *std::move(unmet);
  return serves_family(family, variant.family(), device)
             ? fmt::format("a faster family than {} serves the shape", to_string(variant.family()))
             : fmt::format("family {} serves this device only if kernel_family asks for it",
                           to_string(variant.family()));
}

}  // namespace

void KernelChoice::pass(const Variant& variant, std::string why) {
  considered.push_back({.role = std::string(to_string(variant.role)),
                        .name = std::string(variant.name),
                        .reason = std::move(why)});
}

void KernelChoice::reject(const Variant& variant, const std::string& why) {
  rejected.push_back(fmt::format("{}: {}", variant.name, why));
  pass(variant, why);
}

void KernelChoice::finish_role(Role role, std::span<const BuiltKernel> chosen) {
  const auto tuned_one = tuned(role);
  const auto name_of = [](const BuiltKernel& kernel) { return kernel.variant->name; };
  for (const Variant& variant : variants()) {
    if (variant.role != role) continue;
    auto candidate = std::ranges::find(considered, variant.name, &Candidate::name);
    if (candidate == considered.end()) {
      pass(variant, why_never_tried(variant, device.capabilities, family));
      candidate = std::prev(considered.end());
    }
    candidate->chosen = std::ranges::find(chosen, variant.name, name_of) != chosen.end();
    if (!candidate->chosen) continue;
    candidate->reason = tuned_one && tuned_one->name == variant.name ? "tuned" : "";
  }
}

}  // namespace detail
}  // namespace clattn
