#pragma once

#include <array>
#include <clattn/attention_backend.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <cstdint>
#include <optional>
#include <string_view>

namespace clattn::detail {

/// What a page of such a layer holds, whichever pages it may give back.
KVCacheSpec page_spec(const AttentionConfig& config);
/// The same pages, of layers that see all keys.
KVCacheSpec whole_spec(KVCacheSpec spec);

/// Bytes of one request's tensor of states; throws on overflow.
std::size_t state_bytes(const StateTensor& state);

/// Pages of `spec` that a raw buffer holds. Throws unless they are whole, and K and V alone.
std::int64_t whole_pages(const Buffer& raw, const KVCacheSpec& spec);

/// Strides of the logical dimensions when memory holds them in `order`, slowest first, without
/// gaps. Throws where they overflow.
std::array<std::int64_t, 5> strides_of(const std::array<std::int64_t, 5>& shape,
                                       const std::array<std::int32_t, 5>& order);

/// get_kv_cache_layout() for an override and the text of CLATTN_KV_CACHE_LAYOUT.
std::optional<KVCacheLayout> choose_kv_cache_layout(std::optional<KVCacheLayout> layout_override,
                                                    std::string_view variable);
/// `wanted`, or default_kv_cache_layout(). Throws kUnsupported with the backend's reasons against
/// it.
KVCacheLayout supported_layout(const AttentionBackend& backend,
                               const DeviceCapabilities& capabilities,
                               std::optional<KVCacheLayout> wanted);

/// Where things lie in a page with a scale for each of `rows` tokens and heads, in bytes from its
/// first key: its scales of keys, its values, their scales.
struct RowPage {
  std::int64_t key_scales = 0, values = 0, value_scales = 0;
};
/// Keys, their scales, values, their scales, with rows of `row_bytes`; where values would not begin
/// at a multiple of `load`, the bytes that kernels load, the scales of keys come behind the values.
RowPage row_page(std::int64_t rows, std::int64_t row_bytes, std::int64_t load);

/// Elements of a cache that kernels load at a time: of eight numbers.
constexpr std::int64_t load_elements(DType dtype) {
  return 8 / codes_per_element(dtype);
}

}  // namespace clattn::detail
