#include <fmt/ranges.h>

#include <clattn/attention.hpp>
#include <string>

#include "base/environment.hpp"
#include "base/error.hpp"

namespace clattn {

namespace {

std::string backend_names() {
  std::vector<std::string_view> names;
  for (const AttentionBackend* backend : list_attn_backends()) names.push_back(backend->name());
  return fmt::format("{}", fmt::join(names, ", "));
}

const AttentionBackend& forced_backend(std::string_view name, const AttentionConfig& config,
                                       const DeviceCapabilities* capabilities) {
  for (const AttentionBackend* backend : list_attn_backends()) {
    if (backend->name() != name) continue;
    const auto reasons = backend->validate_configuration(config, capabilities);
    if (!reasons.empty()) {
      detail::throw_unsupported(
          "Selected backend {} is not valid for this configuration. Reason: {}", name,
          fmt::join(reasons, "; "));
    }
    return *backend;
  }
  detail::throw_invalid("Invalid attention backend: '{}'. Valid backends are: auto, {}", name,
                        backend_names());
}

}  // namespace

BackendChoice choose_attn_backend(const AttentionConfig& config,
                                  const DeviceCapabilities* capabilities) {
  BackendChoice choice;
  for (const AttentionBackend* backend : list_attn_backends()) {
    auto reasons = backend->validate_configuration(config, capabilities);
    if (!reasons.empty()) {
      choice.rejected.push_back({backend->name(), std::move(reasons)});
    } else if (choice.backend == nullptr) {
      choice.backend = backend;
    }
  }
  return choice;
}

const AttentionBackend& get_attn_backend(const AttentionConfig& config,
                                         const DeviceCapabilities* capabilities,
                                         std::string_view name) {
  if (name.empty()) name = detail::environment().backend;
  if (!name.empty() && name != "auto") return forced_backend(name, config, capabilities);
  const BackendChoice choice = choose_attn_backend(config, capabilities);
  if (choice.backend != nullptr) return *choice.backend;
  std::string reasons;
  for (const BackendChoice::Rejection& rejection : choice.rejected) {
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : " | ", rejection.name,
                           fmt::join(rejection.reasons, "; "));
  }
  detail::throw_unsupported("No valid attention backend found. Reasons: {}", reasons);
}

}  // namespace clattn
