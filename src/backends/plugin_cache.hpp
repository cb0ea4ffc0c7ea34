#pragma once

#include <array>
#include <clattn/attention.hpp>
#include <cstdint>
#include <string_view>
#include <vector>

namespace clattn::detail {

/// What a plugin says of its caches, against what the library asked for: throws kUnsupported naming
/// backend, place and numbers. `wanted`: K/V, blocks, tokens, heads, dims.
void check_plugin_shape(std::string_view backend, std::int32_t kv_dimension,
                        const std::array<std::int64_t, 5>& shape,
                        const std::array<std::int64_t, 5>& wanted);
/// The C contract has no stride of dims: they stand last.
void check_plugin_order(std::string_view backend, const std::array<std::int32_t, 5>& order);

/// Where a backend's own layouts put the elements of a cache.
class PluginCachePlaces {
 public:
  explicit PluginCachePlaces(const AttentionBackend& backend);
  /// Throws kInvalidArgument naming field, value and legal values for a cache of other strides.
  void check(const KVCache& cache) const;

 private:
  struct Layout {
    KVCacheLayout name;
    std::array<std::int32_t, 5> order;
  };
  std::string_view backend_;
  std::size_t kv_ = 0;  ///< logical dimension of K and V
  std::vector<Layout> layouts_;
};

}  // namespace clattn::detail
