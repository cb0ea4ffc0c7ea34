#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/attention.hpp>
#include <clattn/kv_cache.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kv_cache/layout.hpp"
#include "kv_cache/spec.hpp"

namespace clattn {

namespace {

using detail::checked_mul, detail::throw_invalid, detail::throw_invalid_if;

void require_same_form(const KVCacheSpec& spec, const AttentionBackend& backend) {
  if (spec.use_mla == backend.is_mla()) return;
  detail::throw_unsupported("KV cache: use_mla is {}, supported by backend {}: {}", spec.use_mla,
                            backend.name(), backend.is_mla());
}

/// What pages may hold that a KVCache cannot say, and why not.
void require_plain_pages(const KVCacheSpec& spec) {
  throw_invalid_if(spec.kind == KVCacheKind::kMamba,
                   "KV cache: pages of states, legal: keys and values (view_state_pages)");
  detail::throw_unsupported_if(
      spec.head_size_v != 0 && spec.head_size_v != spec.head_size,
      "KV cache: head_size_v is {}, supported: head_size's {} (kernels read K and V rows of one "
      "width)",
      spec.head_size_v, spec.head_size);
  detail::throw_unsupported_if(
      spec.kv_quant_mode != KVQuantMode::kNone,
      "KV cache: kv_quant_mode is kPerTokenHead, supported: kNone (kernels read factors per "
      "tensor or per KV head, outside the pages)");
}

/// Elements from page to page of a spec with padding.
std::int64_t padded_stride(const KVCacheSpec& spec) {
  constexpr std::size_t kUnit = 8;  // elements that kernels load at a time
  const std::size_t unit_bytes = kUnit * element_size_bytes(spec.dtype);
  throw_invalid_if(
      spec.page_size_padded % unit_bytes != 0,
      "KVCacheSpec: page_size_padded is {}, legal: multiples of {} ({} elements of {})",
      spec.page_size_padded, unit_bytes, kUnit, to_string(spec.dtype));
  return static_cast<std::int64_t>(spec.page_size_padded / element_size_bytes(spec.dtype));
}

/// Strides of the backend's order. Padded pages are contiguous, K and V of a block together, even
/// where the order puts all K first: layers of other shapes may share the buffer page by page.
std::array<std::int64_t, 5> page_strides(const KVCacheSpec& spec,
                                         const std::array<std::int64_t, 5>& shape,
                                         std::array<std::int32_t, 5> order, std::size_t blocks) {
  if (spec.page_size_padded == 0) return detail::strides_of(shape, order);
  const auto place = std::ranges::find(order, static_cast<std::int32_t>(blocks));
  std::rotate(order.begin(), place, place + 1);
  std::array<std::int64_t, 5> strides = detail::strides_of(shape, order);
  strides.at(blocks) = padded_stride(spec);
  return strides;
}

/// Pages of `spec` that a raw buffer holds.
std::int64_t whole_pages(const Buffer& raw, const KVCacheSpec& spec) {
  const std::size_t page_bytes = spec.page_size_bytes();
  require_plain_pages(spec);
  throw_invalid_if(!raw || raw.size_bytes() < page_bytes || raw.size_bytes() % page_bytes != 0,
                   "KV cache: buffer of {} bytes, legal: a positive multiple of the page size {}",
                   raw.size_bytes(), page_bytes);
  return static_cast<std::int64_t>(raw.size_bytes() / page_bytes);
}

}  // namespace

KVCache reshape_kv_cache(const Buffer& raw, const KVCacheSpec& spec,
                         const AttentionBackend& backend, KVCacheLayout layout) {
  require_same_form(spec, backend);
  KVCache cache;
  cache.num_blocks = whole_pages(raw, spec);
  cache.buffer = raw;
  cache.dtype = spec.dtype;
  cache.block_size = spec.block_size;
  cache.num_kv_heads = spec.num_kv_heads;
  cache.head_size = spec.head_size;
  cache.shape = backend.get_kv_cache_shape(cache.num_blocks, spec.block_size, spec.num_kv_heads,
                                           spec.head_size);
  const auto layouts = backend.supported_layouts();
  if (std::ranges::find(layouts, layout) == layouts.end())
    detail::throw_unsupported("KV cache: layout {} is none of backend {}", to_string(layout),
                              backend.name());
  // Every backend's logical shape is {K/V, blocks in either order} followed by token, head, dim.
  const auto kv = static_cast<std::size_t>(backend.kv_dimension());
  cache.strides =
      page_strides(spec, cache.shape, backend.get_kv_cache_stride_order(layout), 1 - kv);
  if (!spec.use_mla) cache.v_offset = cache.strides.at(kv);  // of a latent row, V is the front
  cache.block_stride = cache.strides.at(1 - kv);
  cache.token_stride = cache.strides[2];
  cache.head_stride = cache.strides[3];
  if (layout == KVCacheLayout::kHDN) {
    throw_invalid_if(spec.block_size % detail::kKeysByDimTokens != 0,
                     "KV cache: block_size is {}, legal for layout HDN: multiples of {}",
                     spec.block_size, detail::kKeysByDimTokens);
    cache.key_dim_stride = spec.block_size;
  }
  return cache;
}

std::array<std::int64_t, 3> get_packed_kv_cache_shape(std::int64_t num_blocks,
                                                      std::int32_t block_size,
                                                      std::int32_t num_kv_heads,
                                                      std::int32_t head_size) {
  const std::int64_t rows = checked_mul(std::int64_t{block_size}, std::int64_t{num_kv_heads},
                                        "KV cache: elements of a page");
  return {2, num_blocks,
          checked_mul(rows, std::int64_t{head_size}, "KV cache: elements of a page")};
}

PackedKVCache split_kv_cache(const Buffer& raw, const KVCacheSpec& spec) {
  detail::throw_unsupported_if(spec.use_mla,
                               "KV cache: use_mla is set, supported: false (x-packed pages)");
  detail::throw_unsupported_if(spec.page_size_padded != 0,
                               "KV cache: page_size_padded is {}, supported: 0 (x-packed pages)",
                               spec.page_size_padded);
  PackedKVCache cache;
  cache.num_blocks = whole_pages(raw, spec);
  const auto x = static_cast<std::int32_t>(16 / element_size_bytes(spec.dtype));
  throw_invalid_if(spec.head_size % x != 0,
                   "cache: head_size is {}, legal in an x-packed cache of {}: multiples of {}",
                   spec.head_size, to_string(spec.dtype), x);
  cache.key = cache.value = raw.handle();
  cache.dtype = spec.dtype;
  cache.block_size = spec.block_size;
  cache.num_kv_heads = spec.num_kv_heads;
  cache.head_size = spec.head_size;
  const auto shape = get_packed_kv_cache_shape(cache.num_blocks, spec.block_size, spec.num_kv_heads,
                                               spec.head_size);
  cache.value_offset = shape[1] * shape[2];
  return cache;
}

KVCache make_kv_cache(const Context& context, cl_command_queue queue,
                      const AttentionBackend& backend, const AttentionConfig& config,
                      std::int64_t num_blocks, std::optional<KVCacheLayout> layout) {
  const KVCacheLayout order = layout.value_or(backend.preferred_layout(context.capabilities()));
  const auto reasons = backend.validate_layout(order, config, &context.capabilities());
  if (!reasons.empty()) detail::throw_unsupported("KV cache: {}", fmt::join(reasons, "; "));
  const KVCacheSpec spec = detail::page_spec(config);
  if (num_blocks < 1) throw_invalid("num_blocks is {}, legal: >= 1", num_blocks);
  const std::size_t bytes =
      checked_mul(static_cast<std::size_t>(num_blocks), spec.page_size_bytes(), "KV cache: bytes");
  const KVCacheConfig one_layer{num_blocks, {{bytes, {"layer"}}}, {{{"layer"}, spec}}};
  const Buffer raw = allocate_kv_cache(context, queue, one_layer).at("layer");
  return reshape_kv_cache(raw, spec, backend, order);
}

}  // namespace clattn
