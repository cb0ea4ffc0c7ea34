#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <vector>

#include "c_api/handles.hpp"
#include "kv_cache/spec.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

namespace {

ClattnResult set_scales(ClattnCache* cache, const ClattnBuffer* scales, std::int32_t per_head,
                        bool of_query) {
  return guarded([&] {
    KVCache& of = deref(cache, "cache").cache;
    of.scales = scales == nullptr ? Buffer() : scales->buffer;
    of.scales_per_head = scales != nullptr && per_head != 0;
    of.scales_query = scales != nullptr && of_query;
  });
}

}  // namespace

ClattnResult clattn_cache_create(const ClattnLayer* layer, const ClattnQueue* queue,
                                 int64_t num_blocks, const char* layout, ClattnCache** cache) {
  return make_handle(cache, "cache", [&] {
    const ClattnLayer& of = deref(layer, "layer");
    const AttentionConfig& config = of.layer.config();
    return ClattnCache{
        make_kv_cache(*of.context, deref(queue, "queue").queue, *of.layer.get_attn_backend(),
                      config, num_blocks, layout_of(layout)),
        detail::page_spec(config).page_size_bytes()};
  });
}

ClattnResult clattn_cache_adopt(const ClattnLayer* layer, const ClattnBuffer* buffer,
                                const char* layout, ClattnCache** cache) {
  return make_handle(cache, "cache", [&] {
    const ClattnLayer& of = deref(layer, "layer");
    const AttentionBackend& backend = *of.layer.get_attn_backend();
    const KVCacheSpec spec = detail::page_spec(of.layer.config());
    return ClattnCache{reshape_kv_cache(deref(buffer, "buffer").buffer, spec, backend,
                                        layout_of(layout).value_or(
                                            backend.preferred_layout(of.context->capabilities()))),
                       spec.page_size_bytes()};
  });
}

void clattn_cache_destroy(ClattnCache* cache) {
  delete cache;
}

ClattnResult clattn_cache_info(const ClattnCache* cache, ClattnCacheInfo* info) {
  return guarded([&] {
    const KVCache& of = deref(cache, "cache").cache;
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
                           .key_dim_stride = of.key_dim_stride};
    std::ranges::copy(of.shape, values.shape);
    std::ranges::copy(of.strides, values.strides);
    fill(info, values, "info");
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

ClattnResult clattn_reshape_and_cache(const ClattnContext* context, const ClattnQueue* queue,
                                      const ClattnCache* cache, const ClattnCacheWrite* write) {
  return guarded([&] {
    const ClattnCacheWrite& given = read(write, "write");
    reshape_and_cache_flash(*deref(context, "context").context, deref(queue, "queue").queue,
                            tensor_of(given.key), tensor_of(given.value),
                            parse_dtype(text_or(given.dtype, "f16")),
                            deref(cache, "cache").in_use(), memory_of(given.slot_mapping),
                            given.slot_offset_bytes, given.num_tokens, event_of(given.event));
  });
}

ClattnResult clattn_copy_blocks(const ClattnContext* context, const ClattnQueue* queue,
                                const ClattnCache* const* caches, size_t num_caches,
                                const int64_t* pairs, size_t num_pairs) {
  return guarded([&] {
    std::vector<KVCache> in;
    for (const ClattnCache* const cache : elements(caches, num_caches, "caches")) {
      in.push_back(deref(cache, "caches: an element").in_use());
    }
    elements(pairs, num_pairs, "pairs");
    std::vector<BlockPair> mapping;
    mapping.reserve(num_pairs);
    for (std::size_t i = 0; i < num_pairs; ++i) {
      mapping.push_back({pairs[2 * i], pairs[2 * i + 1]});
    }
    copy_blocks(*deref(context, "context").context, deref(queue, "queue").queue, in, mapping);
  });
}
