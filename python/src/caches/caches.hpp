#pragma once

#include <clattn/cache_ops.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/mla.hpp>

#include "tensors.hpp"

namespace clattn::python {

/// An x-packed cache that keeps its memory.
struct Packed : PackedKVCache {
  Packed(Buffer keys, Buffer values) : kept_key(std::move(keys)), kept_value(std::move(values)) {
    key = kept_key.handle();
    value = kept_value.handle();
  }
  Buffer kept_key;
  Buffer kept_value;
};

/// DeviceErrors, and the context in which arrays become buffers.
struct Errors {
  Errors(std::shared_ptr<Context> made_in, const Queue& queue)
      : context(std::move(made_in)), errors(*context, queue) {}
  std::shared_ptr<Context> context;
  DeviceErrors errors;
};

/// Elements of a token's keys and of its values.
inline std::pair<std::int64_t, std::int64_t> row_widths(const KVCache& cache) {
  const std::int64_t heads = cache.num_kv_heads;
  return {heads * cache.head_size, heads * cache.value_size()};
}
template <typename Cache>
std::pair<std::int64_t, std::int64_t> row_widths(const Cache& cache) {
  const std::int64_t width = std::int64_t{cache.num_kv_heads} * cache.head_size;
  return {width, width};
}
inline std::pair<std::int64_t, std::int64_t> row_widths(const MLACache& cache) {
  return {cache.kv_lora_rank, cache.rope_dim};
}

/// Keeps scales of `count` values on the device: a Buffer, or numbers.
Buffer scales_of(const Context& context, nb::handle scales, const char* name);

/// Binds a call that stores rows at slots: reshape_and_cache_flash() and those like it.
template <typename Cache, typename Store>
void bind_store(nb::module_& module, const char* name, const char* key, const char* value,
                Store store, const char* doc) {
  module.def(
      name,
      [=](const Context& context, const Queue& queue, nb::handle keys, nb::handle values,
          const Cache& cache, nb::handle slot_mapping, nb::handle dtype,
          std::optional<std::int64_t> num_tokens) {
        const DType type = parse_dtype(name_of(dtype));
        CallTensors tensors(context, queue);
        const TensorRef k = tensors.input(keys, type, row_widths(cache).first, key);
        const TensorRef v = tensors.input(values, type, row_widths(cache).second, value);
        const Buffer slots = tensors.values<std::int64_t>(slot_mapping, "slot_mapping");
        const auto all = static_cast<std::int64_t>(slots.size_bytes() / sizeof(std::int64_t));
        if (num_tokens.value_or(all) == 0) return Event();
        return tensors.run([&](Event* event) {
          store(context, queue, k, v, type, cache, slots.handle(), 0, num_tokens.value_or(all),
                event);
        });
      },
      "context"_a, "queue"_a, nb::arg(key), nb::arg(value), "cache"_a, "slot_mapping"_a, "dtype"_a,
      "num_tokens"_a = nb::none(), doc);
}

/// Binds a call that stores rows at positions of requests' page lists.
template <typename Cache, typename Store>
void bind_append(nb::module_& module, const char* name, const char* key, const char* value,
                 Store store, const char* doc) {
  module.def(
      name,
      [=](const Context& context, const Queue& queue, nb::handle keys, nb::handle values,
          nb::handle dtype, const Cache& cache, nb::handle batch_indices, nb::handle positions,
          nb::handle indices, nb::handle indptr, std::optional<std::int64_t> num_tokens) {
        const DType type = parse_dtype(name_of(dtype));
        CallTensors tensors(context, queue);
        const TensorRef k = tensors.input(keys, type, row_widths(cache).first, key);
        const TensorRef v = tensors.input(values, type, row_widths(cache).second, value);
        const Buffer requests = tensors.values<std::int32_t>(batch_indices, "batch_indices");
        const Buffer at = tensors.values<std::int32_t>(positions, "positions");
        const Buffer starts = tensors.values<std::int32_t>(indptr, "indptr");
        const auto num_reqs = static_cast<std::int32_t>(starts.size_bytes() / 4) - 1;
        const PagedKVLists lists{tensors.values<std::int32_t>(indices, "indices"), starts,
                                 num_reqs};
        const auto all = static_cast<std::int64_t>(requests.size_bytes() / sizeof(std::int32_t));
        return tensors.run([&](Event* event) {
          store(context, queue, k, v, type, cache, requests, at, num_tokens.value_or(all), lists,
                event);
        });
      },
      "context"_a, "queue"_a, nb::arg(key), nb::arg(value), "dtype"_a, "cache"_a, nb::kw_only(),
      "batch_indices"_a, "positions"_a, "indices"_a, "indptr"_a, "num_tokens"_a = nb::none(), doc);
}

}  // namespace clattn::python
