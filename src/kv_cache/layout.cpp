#include "kv_cache/layout.hpp"

#include <atomic>
#include <clattn/kv_cache.hpp>

#include "base/environment.hpp"
#include "base/error.hpp"

namespace clattn {
namespace {

constexpr int kNoOverride = -1;

/// The one choice that a process makes for all its contexts; vLLM's API asks for it. A number,
/// because an atomic optional is not lock-free with every compiler.
std::atomic<int>& layout_override() {
  static std::atomic<int> value{kNoOverride};
  return value;
}

}  // namespace

std::optional<KVCacheLayout> detail::choose_kv_cache_layout(
    std::optional<KVCacheLayout> layout_override, std::string_view variable) {
  if (layout_override) return layout_override;
  if (variable.empty()) return std::nullopt;
  for (const KVCacheLayout layout :
       {KVCacheLayout::kNHD, KVCacheLayout::kHND, KVCacheLayout::kHDN}) {
    if (to_string(layout) == variable) return layout;
  }
  throw_invalid("CLATTN_KV_CACHE_LAYOUT: '{}' is not one of NHD, HND, HDN", variable);
}

std::optional<KVCacheLayout> get_kv_cache_layout() {
  const int chosen = layout_override().load();
  return detail::choose_kv_cache_layout(
      chosen == kNoOverride ? std::nullopt : std::optional(static_cast<KVCacheLayout>(chosen)),
      detail::environment().kv_cache_layout);
}

void set_kv_cache_layout(std::optional<KVCacheLayout> layout) {
  if (layout) static_cast<void>(to_string(*layout));  // refuses what is no layout
  layout_override().store(layout ? static_cast<int>(*layout) : kNoOverride);
}

}  // namespace clattn
