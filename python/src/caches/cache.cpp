#include <algorithm>
#include <array>

#include "tensors.hpp"

namespace clattn::python {

namespace {

using Pages = nb::ndarray<nb::ndim<4>, nb::device::cpu>;
using Strides = std::array<std::int64_t, 4>;  // of pages, tokens, heads, elements

Pages pages_of(nb::handle given, const char* name) {
  Pages pages;
  if (!nb::try_cast(given, pages, false)) {
    throw_invalid(std::string(name) + ": " + nb::type_name(given.type()).c_str() +
                  ", legal: a writable array [num_blocks, block_size, num_kv_heads, head_size]");
  }
  if (pages.size() == 0) throw_invalid(std::string(name) + ": no pages, legal: at least one");
  return pages;
}

/// Axes of one element have no stride: they get that of an array without gaps.
Strides strides_of(const Pages& pages) {
  Strides strides;
  std::int64_t dense = 1;
  for (std::size_t i = 4; i-- > 0;) {
    strides.at(i) = pages.shape(i) == 1 ? dense : pages.stride(i);
    dense *= static_cast<std::int64_t>(pages.shape(i));
  }
  return strides;
}

/// Where the keys' and values' strides disagree with what a cache can be.
void check_views(const Pages& key, const Pages& value) {
  for (std::size_t i = 0; i < 4; ++i) {
    const bool fewer = i == 3 && value.shape(i) < key.shape(i);
    if (key.shape(i) != value.shape(i) && !fewer)
      throw_invalid("key, value: shapes differ, legal: equal, or fewer elements of values");
  }
  if (key.dtype() != value.dtype()) throw_invalid("key, value: types differ, legal: equal");
  const Strides keys = strides_of(key), values = strides_of(value);
  if (values[3] != 1) throw_invalid("value: elements of a head have gaps, legal: stride 1");
  const auto differ = [&](std::size_t i) { return key.shape(i) > 1 && keys[i] != values[i]; };
  if (differ(0) || differ(2))
    throw_invalid("key, value: strides of pages or heads differ, legal: equal");
  if (keys[3] != 1) throw_invalid("key: elements of a head have gaps, legal: stride 1");
  if (differ(1)) {
    throw_invalid("key, value: strides of tokens are " + std::to_string(keys[1]) + " and " +
                  std::to_string(values[1]) + ", legal: equal");
  }
}

/// A cache is one buffer, which must not reach over memory that is nobody's. Arrays that do not say
/// whose memory they view have to overlap or touch.
void check_allocation(nb::handle key, nb::handle value, const Extent& keys, const Extent& values) {
  const nb::object same = nb::module_::import_("clattn.arrays").attr("same_allocation")(key, value);
  const bool together = keys.begin <= values.end && values.begin <= keys.end;
  if (same.is_none() ? together : nb::cast<bool>(same)) return;
  throw_invalid(
      "key, value: two allocations, legal: views of one, such as array[:, 0] and array[:, 1]");
}

/// Elements between two addresses.
std::int64_t elements_between(const std::byte* begin, const void* at, std::size_t itemsize) {
  return (static_cast<const std::byte*>(at) - begin) / static_cast<std::ptrdiff_t>(itemsize);
}

KVCache cache_over(const Context& context, nb::handle key_given, nb::handle value_given,
                   DType dtype) {
  if (codes_per_element(dtype) > 1)
    throw Error(ErrorCode::kUnsupported,
                "KVCache.share: dtype is " + std::string(to_string(dtype)) +
                    ", supported: types of whole bytes, since arrays of keys and values have no "
                    "scales of tokens and heads");
  const Pages key = pages_of(key_given, "key"), value = pages_of(value_given, "value");
  check_dtype(key.dtype(), dtype, "key, value");
  check_views(key, value);
  const Extent keys = extent_of(HostArray(key));
  const Extent values = extent_of(HostArray(value));
  check_allocation(key_given, value_given, keys, values);
  const Strides strides = strides_of(value);
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
  if (value.shape(3) != key.shape(3)) cache.head_size_v = static_cast<std::int32_t>(value.shape(3));
  cache.k_offset = elements_between(begin, keys.begin, key.itemsize());
  cache.v_offset = elements_between(begin, values.begin, key.itemsize());
  cache.block_stride = strides[0];
  cache.token_stride = strides[1];
  cache.head_stride = strides[2];
  // The logical order of the arrays, each half of the pair a dimension of its own.
  cache.shape = {2, cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size};
  if (cache.head_size_v != 0) {
    cache.shape.front() = 1;
    cache.shape.back() += cache.head_size_v;
  }
  cache.strides = {cache.v_offset - cache.k_offset, cache.block_stride, cache.token_stride,
                   cache.head_stride, 1};
  return cache;
}

void bind_fields(nb::class_<KVCache>& cache) {
  cache.def_ro("scales_per_head", &KVCache::scales_per_head, "Scales of every KV head were set.")
      .def_ro("scales_query", &KVCache::scales_query, "The scales include one of queries.")
      .def_ro("buffer", &KVCache::buffer)
      .def_prop_ro("dtype", [](const KVCache& self) { return std::string(to_string(self.dtype)); })
      .def_prop_ro(
          "format", [](const KVCache& self) { return std::string(to_string(self.format())); },
          "Its name in kv_cache_dtype.")
      .def_ro("num_blocks", &KVCache::num_blocks)
      .def_ro("block_size", &KVCache::block_size)
      .def_ro("num_kv_heads", &KVCache::num_kv_heads)
      .def_ro("head_size", &KVCache::head_size)
      .def_prop_ro("head_size_v", &KVCache::value_size, "Elements of a head's value.")
      .def_ro("k_offset", &KVCache::k_offset, "Elements before the keys.")
      .def_ro("v_offset", &KVCache::v_offset, "Elements before the values.")
      .def_ro("block_stride", &KVCache::block_stride, "Elements from page to page.")
      .def_ro("token_stride", &KVCache::token_stride)
      .def_ro("head_stride", &KVCache::head_stride)
      .def_ro("scales", &KVCache::scales, "f32 on the device; empty: all are 1.")
      .def_ro("shape", &KVCache::shape, "The backend's logical shape.")
      .def_ro("strides", &KVCache::strides, "Of that shape.")
      .def("key_at", &KVCache::key_at, "block"_a, "token"_a, "head"_a, "dim"_a,
           "The buffer's element that holds this one of K.")
      .def("value_at", &KVCache::value_at, "block"_a, "token"_a, "head"_a, "dim"_a,
           "The buffer's element that holds this one of V.");
}

}  // namespace

void bind_cache(nb::module_& module) {
  bind_tensor(module);
  nb::class_<KVCache> cache(module, "KVCache", "One layer's paged cache as kernels read it.");
  cache
      .def_static(
          "share",
          [](const Context& context, nb::handle key, nb::handle value, nb::handle dtype) {
            return cache_over(context, key, value, parse_dtype(name_of(dtype)));
          },
          "context"_a, "key"_a, "value"_a, "dtype"_a, nb::keep_alive<0, 2>(),
          nb::keep_alive<0, 3>(), nb::keep_alive<0, 4>(),
          "A cache in the memory of two arrays [num_blocks, block_size, num_kv_heads, head_size]\n"
          "of any strides, which are views of one allocation (such as vLLM's): nothing is copied\n"
          "where the device works on the host's memory. Values may have fewer elements, if each\n"
          "follows its key: rows[..., :192] and rows[..., 192:].")
      .def(
          "set_scales",
          [](KVCache& self, const Context& context, nb::handle given) {
            if (self.row_scales) {
              throw_invalid("scales: the cache stores " + std::string(to_string(self.format())) +
                            ", legal: not set, since each token and head has its own");
            }
            self.scales_per_head = self.scales_query = false;
            self.scales = Buffer();
            if (given.is_none()) return;
            if (!is_quantized(self.dtype)) {
              throw_invalid("scales: the cache stores " + std::string(to_string(self.dtype)) +
                            ", legal: None, or a cache of 8 bits");
            }
            const Values<float, 1> scales = numbers<float>(given, "scales");
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
          "context"_a, "scales"_a.none(),
          "What stored values of 8 bits are multiplied by: [k, v], or the factors of every KV\n"
          "head's keys followed by those of its values. One more is what queries are divided by\n"
          "before they are rounded to 8 bits (AttentionConfig.fp8_products). The scales\n"
          "are copied. None: there are none.");
  bind_fields(cache);
}

}  // namespace clattn::python
