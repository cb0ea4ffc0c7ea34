#include <clattn/attention.hpp>
#include <clattn/kv_cache.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {

namespace {

using detail::checked_mul;
using detail::throw_invalid;

/// Strides of the logical dimensions when memory holds them in `order`, slowest first, without
/// gaps.
std::array<std::int64_t, 5> strides_of(const std::array<std::int64_t, 5>& shape,
                                       const std::array<std::int32_t, 5>& order) {
  std::array<std::int64_t, 5> strides{};
  std::int64_t step = 1;
  for (std::size_t place = order.size(); place-- > 0;) {
    const auto dimension = static_cast<std::size_t>(order.at(place));
    strides.at(dimension) = step;
    step = checked_mul(step, shape.at(dimension), "KV cache: elements");
  }
  return strides;
}

void require_same_form(const KVCacheSpec& spec, const AttentionBackend& backend) {
  if (spec.use_mla == backend.is_mla()) return;
  detail::throw_unsupported("KV cache: use_mla is {}, supported by backend {}: {}", spec.use_mla,
                            backend.name(), backend.is_mla());
}

void require_plain_pages(const KVCacheSpec& spec) {
  if ((spec.head_size_v != 0 && spec.head_size_v != spec.head_size) ||
      spec.kv_quant_mode != KVQuantMode::kNone || spec.page_size_padded != 0) {
    detail::throw_unsupported(
        "KV cache: pages with head_size_v {} (head_size {}), scales of each token {}, "
        "page_size_padded {}; supported: plain K and V, or latent rows",
        spec.head_size_v, spec.head_size, spec.kv_quant_mode == KVQuantMode::kPerTokenHead,
        spec.page_size_padded);
  }
}

}  // namespace

KVCache reshape_kv_cache(const Buffer& raw, const KVCacheSpec& spec,
                         const AttentionBackend& backend, KVCacheLayout layout) {
  const std::size_t page_bytes = spec.page_size_bytes();
  require_plain_pages(spec);
  require_same_form(spec, backend);
  if (!raw || raw.size_bytes() < page_bytes || raw.size_bytes() % page_bytes != 0) {
    throw_invalid("KV cache: buffer of {} bytes, legal: a positive multiple of the page size {}",
                  raw.size_bytes(), page_bytes);
  }
  KVCache cache;
  cache.buffer = raw;
  cache.dtype = spec.dtype;
  cache.num_blocks = static_cast<std::int64_t>(raw.size_bytes() / page_bytes);
  cache.block_size = spec.block_size;
  cache.num_kv_heads = spec.num_kv_heads;
  cache.head_size = spec.head_size;
  cache.shape = backend.get_kv_cache_shape(cache.num_blocks, spec.block_size, spec.num_kv_heads,
                                           spec.head_size);
  cache.strides = strides_of(cache.shape, backend.get_kv_cache_stride_order(layout));
  // Every backend's logical shape is {K/V, blocks in either order} followed by token, head, dim.
  const auto kv = static_cast<std::size_t>(backend.kv_dimension());
  if (!spec.use_mla) cache.v_offset = cache.strides.at(kv);  // of a latent row, V is the front
  cache.block_stride = cache.strides.at(1 - kv);
  cache.token_stride = cache.strides[2];
  cache.head_stride = cache.strides[3];
  return cache;
}

KVCache make_kv_cache(const Context& context, cl_command_queue queue,
                      const AttentionBackend& backend, const AttentionConfig& config,
                      std::int64_t num_blocks) {
  const KVCacheSpec spec{.block_size = config.block_size,
                         .num_kv_heads = config.num_kv_heads,
                         .head_size = config.head_size,
                         .dtype = config.cache_dtype(),
                         .use_mla = config.use_mla};
  if (num_blocks < 1) throw_invalid("num_blocks is {}, legal: >= 1", num_blocks);
  const std::size_t bytes =
      checked_mul(static_cast<std::size_t>(num_blocks), spec.page_size_bytes(), "KV cache: bytes");
  const KVCacheConfig one_layer{num_blocks, {{bytes, {"layer"}}}, {{{"layer"}, spec}}};
  const Buffer raw = allocate_kv_cache(context, queue, one_layer).at("layer");
  return reshape_kv_cache(raw, spec, backend, backend.preferred_layout(context.capabilities()));
}

}  // namespace clattn
