#include "backends/plugin_adapter.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kv_cache/layout.hpp"

namespace clattn::detail {

namespace {

/// What the C contract hands on of a cache's strides, in elements.
struct Strides {
  std::int64_t value = 0, block = 0, token = 0, head = 0;
};

/// Of a cache of the `extents` K/V, blocks, tokens, heads, dims (`kv`: which of the first two is
/// K/V), whose dimensions memory holds in `order`, slowest first.
Strides c_strides(const std::array<std::int64_t, 5>& extents,
                  const std::array<std::int32_t, 5>& order, std::size_t kv) {
  const auto strides = strides_of(extents, order);
  return {strides.at(kv), strides.at(1 - kv), strides[2], strides[3]};
}

/// The first field in which a cache is not laid out like that, or none.
struct Difference {
  std::string_view field;
  std::int64_t value = 0, wanted = 0;
};

Difference compare(const KVCache& cache, const Strides& wanted, bool padded) {
  const std::int64_t value_stride = cache.v_offset - cache.k_offset;
  if (value_stride != wanted.value) return {"v_offset - k_offset", value_stride, wanted.value};
  if (cache.token_stride != wanted.token) return {"token_stride", cache.token_stride, wanted.token};
  if (cache.head_stride != wanted.head) return {"head_stride", cache.head_stride, wanted.head};
  if (cache.keys_by_dim()) return {"key_dim_stride", cache.key_dim_stride, 1};
  const bool right =
      padded ? cache.block_stride >= wanted.block : cache.block_stride == wanted.block;
  return right ? Difference{} : Difference{"block_stride", cache.block_stride, wanted.block};
}

}  // namespace

void check_plugin_shape(std::string_view backend, std::int32_t kv_dimension,
                        const std::array<std::int64_t, 5>& shape,
                        const std::array<std::int64_t, 5>& wanted) {
  constexpr std::array<std::string_view, 5> kNames = {"K and V", "num_blocks", "block_size",
                                                      "num_kv_heads", "head_size"};
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const std::size_t of = i < 2 && kv_dimension == 1 ? 1 - i : i;
    if (shape.at(i) == wanted.at(of)) continue;
    throw_unsupported("backend {}: kv_cache_shape[{}] is {}, legal: {} ({}, kv_dimension {})",
                      backend, i, shape.at(i), wanted.at(of), kNames.at(of), kv_dimension);
  }
}

void check_plugin_order(std::string_view backend, const std::array<std::int32_t, 5>& order) {
  const std::string text =
      fmt::format("{}, {}, {}, {}, {}", order[0], order[1], order[2], order[3], order[4]);
  auto sorted = order;
  std::ranges::sort(sorted);
  throw_unsupported_if(sorted != std::array<std::int32_t, 5>{0, 1, 2, 3, 4},
                       "backend {}: kv_cache_stride_order is {}, legal: a permutation of 0 … 4",
                       backend, text);
  if (order.back() == 4) return;
  throw_unsupported(
      "backend {}: kv_cache_stride_order is {}, legal: 4 last (a head's elements are contiguous)",
      backend, text);
}

PluginCachePlaces::PluginCachePlaces(const AttentionBackend& backend)
    : backend_(backend.name()), kv_(to_size(backend.kv_dimension())) {
  for (const KVCacheLayout layout : backend.supported_layouts())
    layouts_.push_back({layout, backend.get_kv_cache_stride_order(layout)});
}

void PluginCachePlaces::check(const KVCache& cache) const {
  std::array<std::int64_t, 5> extents = {2, cache.num_blocks, cache.block_size, cache.num_kv_heads,
                                         cache.head_size};
  if (kv_ == 1) std::swap(extents[0], extents[1]);
  std::string differences;
  for (const Layout& layout : layouts_) {
    const Difference found = compare(cache, c_strides(extents, layout.order, kv_), false);
    if (found.field.empty()) return;
    // Padded pages hold K and V together, whatever the order (reshape_kv_cache).
    auto paged = layout.order;
    const auto blocks = std::ranges::find(paged, static_cast<std::int32_t>(1 - kv_));
    std::rotate(paged.begin(), blocks, blocks + 1);
    if (compare(cache, c_strides(extents, paged, kv_), true).field.empty()) return;
    differences += fmt::format("{}{} has {} {}", differences.empty() ? "" : ", ",
                               to_string(layout.name), found.field, found.wanted);
  }
  throw_invalid(
      "kv_cache: v_offset - k_offset {}, block_stride {}, token_stride {}, head_stride {}, legal: "
      "backend {}'s layouts: {}",
      cache.v_offset - cache.k_offset, cache.block_stride, cache.token_stride, cache.head_stride,
      backend_, differences);
}

}  // namespace clattn::detail
