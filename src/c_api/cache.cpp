#include "c_api/handles.hpp"
#include "kv_cache/spec.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

CLATTN_DESTROYS(clattn_cache_destroy, ClattnCache)

namespace {

ClattnResult set_scales(ClattnCache* cache, const ClattnBuffer* scales, std::int32_t per_head,
                        bool of_query) {
  return guarded([&] {
    KVCache& of = held(cache);
    detail::throw_invalid_if(scales != nullptr && !is_quantized(of.dtype),
                             "scales: given, legal for a cache of {}: NULL, since only types of 8 "
                             "bits have scales",
                             to_string(of.dtype));
    detail::throw_invalid_if(of.row_scales.has_value(),
                             "scales: given, legal for a cache of {}: none, since each token and "
                             "head has its own",
                             to_string(of.format()));
    of.scales = buffer_of(scales);
    of.scales_per_head = scales != nullptr && per_head != 0;
    of.scales_query = scales != nullptr && of_query;
  });
}

std::int32_t rope_dim_of(const AttentionConfig& config) {
  return config.use_mla ? config.rope_dim : 0;
}

/// A cache in memory of the application, whose pages are those of `spec`.
ClattnCache view_cache(const ClattnLayer& layer, const Buffer& memory, const KVCacheSpec& spec,
                       const char* layout) {
  const AttentionBackend& backend = *layer.held.get_attn_backend();
  const KVCacheLayout order =
      layout_of(layout).value_or(backend.preferred_layout(layer.context->capabilities()));
  return {{reshape_kv_cache(memory, spec, backend, order)},
          spec.page_size_bytes(),
          rope_dim_of(layer.held.config())};
}

KVCache strided_cache(const AttentionConfig& config, const Buffer& memory,
                      const ClattnCacheStrides& at) {
  detail::throw_unsupported_if(config.use_mla,
                               "strides: given for a layer with use_mla, supported: "
                               "clattn_cache_adopt(), because one row is key and value");
  detail::throw_unsupported_if(config.cache_format().scales_per_row(),
                               "strides: given for a layer with kv_cache_dtype {}, supported: "
                               "clattn_cache_adopt(), because they say nothing about scales",
                               to_string(config.cache_format()));
  for (const std::int64_t offset : {at.k_offset, at.v_offset})
    detail::throw_invalid_if(offset < 0, "strides: an offset is {}, legal: >= 0", offset);
  KVCache cache;
  cache.buffer = memory;
  cache.dtype = config.cache_dtype();
  cache.num_blocks = at.num_blocks;
  cache.block_size = config.block_size;
  cache.num_kv_heads = config.num_kv_heads;
  cache.head_size = config.head_size;
  cache.head_size_v = config.output_head_size();
  cache.k_offset = at.k_offset;
  cache.v_offset = at.v_offset;
  cache.block_stride = at.block_stride;
  cache.token_stride = at.token_stride;
  cache.head_stride = at.head_stride;
  // Of two tensors of pages, one after the other, or of one whose rows are key and value.
  cache.shape = {2, at.num_blocks, config.block_size, config.num_kv_heads, config.head_size};
  if (cache.value_size() != cache.head_size) {
    cache.shape.front() = 1;
    cache.shape.back() += cache.value_size();
  }
  cache.strides = {at.v_offset - at.k_offset, at.block_stride, at.token_stride, at.head_stride, 1};
  return cache;
}

}  // namespace

const KVCache& clattn::c_api::require_bound(const KVCache& cache) {
  detail::throw_invalid_if(!cache.buffer,
                           "layer: it has no cache, legal: after clattn_layer_bind_cache()");
  return cache;  // NOLINT(bugprone-return-const-ref-from-parameter): a handle's own
}

ClattnResult clattn_cache_create(const ClattnLayer* layer, const ClattnQueue* queue,
                                 int64_t num_blocks, const char* layout, ClattnCache** cache) {
  return make_handle(cache, [&] {
    const AttentionConfig& config = held(layer).config();
    return ClattnCache{{make_kv_cache(*layer->context, held(queue), *layer->held.get_attn_backend(),
                                      config, num_blocks, layout_of(layout))},
                       detail::page_spec(config).page_size_bytes(),
                       rope_dim_of(config)};
  });
}

ClattnResult clattn_cache_adopt(const ClattnLayer* layer, const ClattnBuffer* buffer,
                                const char* layout, ClattnCache** cache) {
  return make_handle(cache, [&] {
    const KVCacheSpec spec = detail::page_spec(held(layer).config());
    return view_cache(*layer, held(buffer), spec, layout);
  });
}

ClattnResult clattn_cache_view(const ClattnLayer* layer, const ClattnBuffer* buffer,
                               const ClattnKVCacheSpec* spec, const char* layout,
                               ClattnCache** cache) {
  return make_handle(cache, [&] {
    return view_cache(deref(layer, "layer"), held(buffer), spec_of(spec, "spec"), layout);
  });
}

ClattnResult clattn_cache_adopt_strided(const ClattnLayer* layer, const ClattnBuffer* buffer,
                                        const ClattnCacheStrides* strides, ClattnCache** cache) {
  return make_handle(cache, [&] {
    const AttentionConfig& config = held(layer).config();
    return ClattnCache{{strided_cache(config, held(buffer), read(strides, "strides"))},
                       detail::page_spec(config).page_size_bytes(),
                       0};
  });
}

ClattnResult clattn_layer_cache(const ClattnLayer* layer, ClattnCache** cache) {
  return make_handle(cache, [&] {
    const auto bound = held(layer).shared_kv_cache();
    const KVCache& of = require_bound(*bound);
    return ClattnCache{{of},
                       of.buffer.size_bytes() / static_cast<std::size_t>(of.num_blocks),
                       rope_dim_of(layer->held.config()),
                       bound};
  });
}

ClattnResult clattn_layer_check_cache(const ClattnLayer* layer, const ClattnCache* cache) {
  return guarded([&] { held(layer).check_kv_cache(held(cache)); });
}

ClattnResult clattn_cache_info(const ClattnCache* cache, ClattnCacheInfo* info) {
  return guarded([&] {
    const KVCache& of = held(cache);
    ClattnCacheInfo values{.struct_size = 0,
                           .block_size = of.block_size,
                           .num_blocks = of.num_blocks,
                           .num_kv_heads = of.num_kv_heads,
                           .head_size = of.head_size,
                           .dtype = to_string(of.dtype).data(),
                           .buffer = of.buffer.handle(),
                           .page_size_bytes = cache->page_size_bytes,
                           .shape = {},
                           .strides = {},
                           .k_offset = of.k_offset,
                           .v_offset = of.v_offset,
                           .block_stride = of.block_stride,
                           .token_stride = of.token_stride,
                           .head_stride = of.head_stride,
                           .head_size_v = of.value_size(),
                           .reserved = 0};
    std::ranges::copy(of.shape, values.shape);
    std::ranges::copy(of.strides, values.strides);
    fill(info, "info", values);
  });
}

ClattnResult clattn_cache_set_scales(ClattnCache* cache, const ClattnBuffer* scales,
                                     int32_t per_head) {
  return set_scales(cache, scales, per_head, false);
}

ClattnResult clattn_cache_set_scales_with_query(ClattnCache* cache, const ClattnBuffer* scales,
                                                int32_t per_head) {
  return set_scales(cache, scales, per_head, true);
}
