#include <clattn/cache_ops.hpp>

#include "tensors.hpp"

namespace clattn::python {

namespace {

using Pairs = nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

std::vector<BlockPair> block_pairs(const Pairs& pairs) {
  std::vector<BlockPair> mapping;
  for (std::size_t i = 0; i < pairs.shape(0); ++i) {
    mapping.push_back({.source = pairs.data()[2 * i], .destination = pairs.data()[2 * i + 1]});
  }
  return mapping;
}

/// A cache, or an array of the host as the image of one.
SwapSpace swap_space(nb::handle space) {
  if (nb::isinstance<KVCache>(space)) return nb::cast<const KVCache&>(space);
  const auto image = nb::cast<nb::ndarray<nb::c_contig, nb::device::cpu>>(space);
  return std::span(static_cast<std::byte*>(image.data()), image.nbytes());
}

void bind_block_ops(nb::module_& module) {
  module.def(
      "copy_blocks",
      [](const Context& context, const Queue& queue, const std::vector<const KVCache*>& layers,
         const Pairs& pairs) {
        std::vector<KVCache> caches;
        for (const KVCache* layer : layers) caches.push_back(*layer);
        const std::vector<BlockPair> mapping = block_pairs(pairs);
        Event event;
        without_gil([&] { copy_blocks(context, queue, caches, mapping, &event); });
        return event;
      },
      "context"_a, "queue"_a, "caches"_a, "pairs"_a,
      "Copies whole pages inside every layer's own cache: pairs [n, 2] of source and destination.");
  module.def(
      "swap_blocks",
      [](const Context& context, const Queue& queue, nb::handle source, nb::handle destination,
         const Pairs& pairs) {
        const SwapSpace from = swap_space(source);
        const SwapSpace to = swap_space(destination);
        const std::vector<BlockPair> mapping = block_pairs(pairs);
        without_gil([&] {
          swap_blocks(context, queue, from, to, mapping);
          queue.finish();  // an image must stay alive until then
        });
      },
      "context"_a, "queue"_a, "source"_a, "destination"_a, "pairs"_a,
      "Copies whole pages between two caches, or between a cache and a contiguous array that is\n"
      "the image of one. Waits.");
}

void bind_writes(nb::module_& module) {
  module.def(
      "reshape_and_cache_flash",
      [](const Context& context, const Queue& queue, nb::handle key, nb::handle value,
         const KVCache& cache, const Values<std::int64_t, 1>& slot_mapping, nb::handle dtype) {
        const DType type = parse_dtype(name_of(dtype));
        const std::int64_t width = std::int64_t{cache.num_kv_heads} * cache.head_size;
        CallTensors tensors(context, queue);
        const TensorRef keys = tensors.input(key, type, width, "key");
        const TensorRef values = tensors.input(value, type, width, "value");
        const std::span<const std::int64_t> slots(slot_mapping.data(), slot_mapping.size());
        if (slots.empty()) return;
        without_gil([&] {
          const Buffer on_device = context.allocate(slots.size_bytes());
          queue.write(on_device, std::as_bytes(slots));
          reshape_and_cache_flash(context, queue, keys, values, type, cache, on_device.handle(), 0,
                                  static_cast<std::int64_t>(slots.size()));
          tensors.finish();
        });
      },
      "context"_a, "queue"_a, "key"_a, "value"_a, "cache"_a, "slot_mapping"_a, "dtype"_a,
      "Stores token i's key and value of type dtype at slot_mapping[i]; a negative slot stores\n"
      "nothing. Tensors as AttentionImpl takes them.");
}

void bind_merge(nb::module_& module) {
  module.def(
      "merge_attn_states",
      [](const Context& context, const Queue& queue, nb::handle output, nb::handle lse,
         nb::handle prefix, nb::handle prefix_lse, nb::handle suffix, nb::handle suffix_lse,
         std::int32_t num_heads, std::int32_t head_size, std::int64_t num_tokens,
         nb::handle dtype) {
        MergeAttnStates config;
        config.num_tokens = num_tokens;
        config.num_heads = num_heads;
        config.head_size = head_size;
        config.dtype = parse_dtype(name_of(dtype));
        const std::int64_t width = std::int64_t{num_heads} * head_size;
        CallTensors tensors(context, queue);
        const auto lse_of = [](const TensorRef& rows) {
          return LseRef{.buffer = rows.buffer, .offset = rows.offset};
        };
        const OutputWithLse merged{
            tensors.output(output, config.dtype, width, "output"),
            lse_of(tensors.dense_output(lse, DType::kF32, num_heads, "lse"))};
        const OutputWithLse before{
            tensors.input(prefix, config.dtype, width, "prefix"),
            lse_of(tensors.dense_input(prefix_lse, DType::kF32, num_heads, "prefix_lse"))};
        const OutputWithLse after{
            tensors.input(suffix, config.dtype, width, "suffix"),
            lse_of(tensors.dense_input(suffix_lse, DType::kF32, num_heads, "suffix_lse"))};
        without_gil([&] {
          merge_attn_states(context, queue, config, merged, before, after);
          tensors.finish();
        });
      },
      "context"_a, "queue"_a, "output"_a, "lse"_a.none(), "prefix"_a, "prefix_lse"_a, "suffix"_a,
      "suffix_lse"_a, nb::kw_only(), "num_heads"_a, "head_size"_a, "num_tokens"_a, "dtype"_a,
      "Joins attention over a prefix and over a suffix of the keys into attention over both.\n"
      "Outputs are [num_tokens, num_heads, head_size], log-sum-exps f32 [num_tokens, num_heads].");
}

}  // namespace

void bind_cache_ops(nb::module_& module) {
  bind_block_ops(module);
  bind_writes(module);
  bind_merge(module);
}

}  // namespace clattn::python
