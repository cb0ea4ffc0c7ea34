#include <algorithm>

#include "tensors.hpp"

namespace clattn::python {

namespace {

using Pages = nb::ndarray<nb::ndim<4>, nb::device::cpu>;

/// Where the keys' and values' strides disagree with what a cache can be.
void check_views(const Pages& key, const Pages& value) {
  for (std::size_t i = 0; i < 4; ++i) {
    if (key.shape(i) != value.shape(i)) throw_invalid("key, value: shapes differ, legal: equal");
  }
  if (key.size() == 0) throw_invalid("key: no pages, legal: at least one");
  if (key.dtype() != value.dtype()) throw_invalid("key, value: types differ, legal: equal");
  if (value.stride(3) != 1) throw_invalid("value: elements of a head have gaps, legal: stride 1");
  if (key.stride(0) != value.stride(0) || key.stride(2) != value.stride(2)) {
    throw_invalid("key, value: strides of pages or heads differ, legal: equal");
  }
  if (key.stride(3) == 1 ? key.stride(1) != value.stride(1) : key.stride(1) != 1) {
    throw_invalid("key: strides of tokens and elements are " + std::to_string(key.stride(1)) +
                  ", " + std::to_string(key.stride(3)) +
                  ", legal: the value's, or 1 and at least block_size (keys by dim)");
  }
}

/// Elements between two addresses.
std::int64_t elements_between(const std::byte* begin, const void* at, std::size_t itemsize) {
  return (static_cast<const std::byte*>(at) - begin) / static_cast<std::ptrdiff_t>(itemsize);
}

KVCache cache_over(const Context& context, const Pages& key, const Pages& value, DType dtype) {
  check_dtype(key.dtype(), dtype, "key, value");
  check_views(key, value);
  const Extent keys = extent_of(HostArray(key));
  const Extent values = extent_of(HostArray(value));
  std::byte* const begin = std::min(keys.begin, values.begin);
  const auto int32 = [&](std::size_t i) { return static_cast<std::int32_t>(key.shape(i)); };
  KVCache cache;
  cache.buffer = without_gil([&] {
    return context.share({begin, std::max(keys.end, values.end)});
  });
  cache.dtype = dtype;
  cache.num_blocks = static_cast<std::int64_t>(key.shape(0));
  cache.block_size = int32(1);
  cache.num_kv_heads = int32(2);
  cache.head_size = int32(3);
  cache.k_offset = elements_between(begin, keys.begin, key.itemsize());
  cache.v_offset = elements_between(begin, values.begin, key.itemsize());
  cache.block_stride = value.stride(0);
  cache.token_stride = value.stride(1);
  cache.head_stride = value.stride(2);
  cache.key_dim_stride = key.stride(3);
  // The logical order of the arrays, each half of the pair a dimension of its own.
  cache.shape = {2, cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size};
  cache.strides = {cache.v_offset - cache.k_offset, cache.block_stride, cache.token_stride,
                   cache.head_stride, 1};
  return cache;
}

}  // namespace

void bind_cache(nb::module_& module) {
  bind_tensor(module);
  nb::class_<KVCache>(module, "KVCache", "One layer's paged cache as kernels read it.")
      .def_static(
          "share",
          [](const Context& context, const Pages& key, const Pages& value, nb::handle dtype) {
            return cache_over(context, key, value, parse_dtype(name_of(dtype)));
          },
          "context"_a, "key"_a, "value"_a, "dtype"_a, nb::keep_alive<0, 2>(),
          nb::keep_alive<0, 3>(), nb::keep_alive<0, 4>(),
          "A cache in the memory of two arrays [num_blocks, block_size, num_kv_heads, head_size]\n"
          "of any strides, which are views of one allocation (such as vLLM's): nothing is copied\n"
          "where the device works on the host's memory. Keys may lie by dim (the tokens of a page\n"
          "side by side), which CPU kernels prefer.")
      .def(
          "set_scales",
          [](KVCache& self, const Context& context, const Values<float, 1>& scales) {
            const auto per_head = 2 * static_cast<std::size_t>(self.num_kv_heads);
            const std::size_t of_query = scales.size() % 2, of_kv = scales.size() - of_query;
            if (of_kv != 2 && of_kv != per_head) {
              throw_invalid("scales: " + std::to_string(scales.size()) + " values, legal: 2 or " +
                            std::to_string(per_head) + ", or one more with that of queries");
            }
            self.scales = upload(context, scales);
            self.scales_per_head = of_kv != 2;
            self.scales_query = of_query != 0;
          },
          "context"_a, "scales"_a,
          "What stored values of 8 bits are multiplied by: [k, v], or the factors of every KV\n"
          "head's keys followed by those of its values. One more is what queries are divided by\n"
          "before they are rounded to 8 bits (AttentionConfig.fp8_products). The scales\n"
          "are copied.")
      .def_ro("scales_per_head", &KVCache::scales_per_head, "Scales of every KV head were set.")
      .def_ro("scales_query", &KVCache::scales_query, "The scales include one of queries.")
      .def_ro("buffer", &KVCache::buffer)
      .def_prop_ro("dtype", [](const KVCache& self) { return std::string(to_string(self.dtype)); })
      .def_ro("num_blocks", &KVCache::num_blocks)
      .def_ro("block_size", &KVCache::block_size)
      .def_ro("num_kv_heads", &KVCache::num_kv_heads)
      .def_ro("head_size", &KVCache::head_size)
      .def_ro("k_offset", &KVCache::k_offset, "Elements before the keys.")
      .def_ro("v_offset", &KVCache::v_offset, "Elements before the values.")
      .def_ro("block_stride", &KVCache::block_stride, "Elements from page to page.")
      .def_ro("token_stride", &KVCache::token_stride)
      .def_ro("head_stride", &KVCache::head_stride)
      .def_ro("key_dim_stride", &KVCache::key_dim_stride, "1 unless keys lie by dim.")
      .def_prop_ro("keys_by_dim", &KVCache::keys_by_dim);
}

}  // namespace clattn::python
