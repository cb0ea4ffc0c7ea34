#include "kv_cache/layout.hpp"

#include <atomic>
#include <clattn/kv_cache.hpp>

#include "base/checked.hpp"
#include "base/environment.hpp"

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

std::array<std::int64_t, 5> detail::strides_of(const std::array<std::int64_t, 5>& shape,
                                               const std::array<std::int32_t, 5>& order) {
  std::array<std::int64_t, 5> strides{};
  std::int64_t step = 1;
  for (std::size_t place = order.size(); place-- > 0;) {
    const auto dimension = to_size(order.at(place));
    strides.at(dimension) = step;
    step = checked_mul(step, shape.at(dimension), "KV cache: elements");
  }
  return strides;
}

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
