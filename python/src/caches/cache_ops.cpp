#include <algorithm>

#include "caches.hpp"

namespace clattn::python {

namespace {

std::vector<BlockPair> block_pairs(nb::handle given) {
  const auto pairs = numbers<std::int64_t, 2>(given, "pairs");
  if (pairs.size() != 0 && pairs.shape(1) != 2) {
    throw_invalid("pairs: " + std::to_string(pairs.shape(1)) +
                  " columns, legal: 2, source and destination");
  }
  std::vector<BlockPair> mapping;
  for (std::size_t i = 0; i < pairs.size() / 2; ++i) {
    mapping.push_back({.source = pairs.data()[2 * i], .destination = pairs.data()[2 * i + 1]});
  }
  return mapping;
}

/// A cache, or memory of the host as the image of one; `waits`: nothing but the call keeps it.
template <typename Space, typename... Cache>
Space swap_space(nb::handle space, const char* name, bool& waits) {
  Space taken = std::span<std::byte>();
  if (((nb::isinstance<Cache>(space) && (taken = nb::cast<const Cache&>(space), true)) || ...))
    return taken;
  if (nb::isinstance<PinnedMemory>(space)) return nb::cast<const PinnedMemory&>(space).bytes();
  nb::ndarray<nb::c_contig, nb::device::cpu> image;
  if (!nb::try_cast(space, image, false)) {
    throw_invalid(std::string(name) + ": " + nb::type_name(space.type()).c_str() +
                  ", legal: a cache, PinnedMemory or a writable array without gaps");
  }
  waits = true;
  return std::span(static_cast<std::byte*>(image.data()), image.nbytes());
}

/// Binds a call that copies pages between spaces, which are `Cache`s or the host's.
template <typename Space, typename... Cache, typename Swap>
void bind_swap(nb::module_& module, const char* name, Swap swap, const char* doc) {
  module.def(
      name,
      [swap](const Context& context, const Queue& queue, nb::handle source, nb::handle destination,
             nb::handle pairs) {
        bool waits = false;
        const Space from = swap_space<Space, Cache...>(source, "source", waits);
        const Space to = swap_space<Space, Cache...>(destination, "destination", waits);
        const std::vector<BlockPair> mapping = block_pairs(pairs);
        Event event;
        without_gil([&] {
          swap(context, queue, from, to, mapping, &event);
          if (waits) queue.finish();
        });
        return event;
      },
      "context"_a, "queue"_a, "source"_a, "destination"_a, "pairs"_a, doc);
}

template <typename Given, typename Cache, typename Copy>
void bind_copy(nb::module_& module, const char* name, Copy copy, const char* doc) {
  module.def(
      name,
      [copy](const Context& context, const Queue& queue, const std::vector<const Given*>& layers,
             nb::handle pairs) {
        std::vector<Cache> caches;
        for (const Given* layer : layers) caches.push_back(*layer);
        const std::vector<BlockPair> mapping = block_pairs(pairs);
        Event event;
        without_gil([&] {
          copy(context, queue, std::span<const Cache>(caches), std::span<const BlockPair>(mapping),
               &event);
        });
        return event;
      },
      "context"_a, "queue"_a, "caches"_a, "pairs"_a, doc);
}

/// move_tokens() of caches of one form: by numbers, or by three buffers.
template <typename Cache, typename Move>
void bind_move(nb::module_& module, const char* name, Move move) {
  module.def(
      name,
      [move](const Context& context, const Queue& queue, const std::vector<const Cache*>& layers,
             nb::handle src_slots, nb::handle dst_slots, nb::handle starts) {
        std::vector<Cache> caches;
        for (const Cache* layer : layers) caches.push_back(*layer);
        Event event;
        if (nb::isinstance<Buffer>(starts)) {
          DeviceTokenMoves moves{nb::cast<Buffer>(src_slots), nb::cast<Buffer>(dst_slots),
                                 nb::cast<Buffer>(starts), 0};
          moves.num_requests = static_cast<std::int32_t>(moves.starts.size_bytes() / 4) - 1;
          without_gil([&] { move(context, queue, std::span<const Cache>(caches), moves, &event); });
          return event;
        }
        const auto src = numbers<std::int64_t>(src_slots, "src_slots");
        const auto dst = numbers<std::int64_t>(dst_slots, "dst_slots");
        const auto begins = numbers<std::int32_t>(starts, "starts");
        const TokenMoves moves{span_of(src), span_of(dst), span_of(begins)};
        without_gil([&] { move(context, queue, std::span<const Cache>(caches), moves, &event); });
        return event;
      },
      "context"_a, "queue"_a, "caches"_a, "src_slots"_a, "dst_slots"_a, "starts"_a,
      "Moves tokens inside every layer's own cache, as after drafts in a tree were verified: slot\n"
      "dst_slots[i] gets what slot src_slots[i] holds; the pairs starts[r] to starts[r + 1] - 1\n"
      "of request r are moved in order. Integers, or three Buffers of int64, int64 and int32.");
}

void bind_block_ops(nb::module_& module) {
  bind_move<KVCache>(module, "move_tokens", [](auto&&... arguments) { move_tokens(arguments...); });
  bind_move<MLACache>(module, "move_tokens_mla",
                      [](auto&&... arguments) { move_tokens_mla(arguments...); });
  const auto copy = [](auto&&... arguments) { copy_blocks(arguments...); };
  const char* const doc =
      "Copies whole pages inside every layer's own cache: pairs [n, 2] of source and destination.";
  bind_copy<KVCache, KVCache>(module, "copy_blocks", copy, doc);
  bind_copy<Packed, PackedKVCache>(module, "copy_blocks", copy, doc);
  bind_copy<MLACache, MLACache>(module, "copy_blocks_mla", &copy_blocks_mla, doc);
  nb::class_<PinnedMemory>(module, "PinnedMemory",
                           "Memory of the host that the device copies from and to fastest.")
      .def(nb::init<const Context&, std::size_t>(), "context"_a, "size_bytes"_a)
      .def_prop_ro(
          "array",
          [](const PinnedMemory& self) {
            const std::span<std::byte> bytes = self.bytes();
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(bytes.data(), {bytes.size()},
                                                                     nb::find(self));
          },
          "Its bytes, as a NumPy array that keeps it.");
  bind_swap<SwapSpace, KVCache, MLACache>(
      module, "swap_blocks", &swap_blocks,
      "Copies whole pages between two caches, or between a cache and an image of one: a\n"
      "contiguous array, for which the call waits, or PinnedMemory, which must be kept until the\n"
      "event that it returns.");
  bind_swap<PackedSwapSpace, Packed>(module, "swap_packed_blocks", &swap_packed_blocks,
                                     "As swap_blocks(), for x-packed caches.");
}

void bind_writes(nb::module_& module) {
  bind_store<KVCache>(
      module, "reshape_and_cache_flash", "key", "value", &reshape_and_cache_flash,
      "Stores token i's key and value of type dtype at slot_mapping[i]; a negative slot stores\n"
      "nothing. Tensors as AttentionImpl takes them. num_tokens: None is one a slot.");
  bind_store<Packed>(module, "reshape_and_cache", "key", "value", &reshape_and_cache,
                     "As reshape_and_cache_flash, into an x-packed cache.");
  bind_store<MLACache>(
      module, "concat_and_cache_mla", "kv_c", "k_pe", &concat_and_cache_mla,
      "Stores kv_c [tokens, kv_lora_rank] followed by k_pe [tokens, rope_dim] at slots.");
  const char* const doc =
      "Stores token i at position positions[i] of request batch_indices[i], in the pages that\n"
      "indices and indptr list (CSR). num_tokens: None is one a batch index.";
  bind_append<KVCache>(module, "append_paged_kv_cache", "key", "value", &append_paged_kv_cache,
                       doc);
  bind_append<MLACache>(module, "append_paged_mla_kv_cache", "ckv", "kpe",
                        &append_paged_mla_kv_cache, doc);
}

/// LSEs [tokens, heads], or [heads, tokens].
LseRef lse_ref(const TensorRef& rows, std::int64_t num_tokens, bool heads_first) {
  if (!heads_first) return {.buffer = rows.buffer, .offset = rows.offset};
  return {
      .buffer = rows.buffer, .offset = rows.offset, .token_stride = 1, .head_stride = num_tokens};
}

struct MergeTensors {
  nb::handle output, lse, prefix, prefix_lse, suffix, suffix_lse;
  bool heads_first = false;
};

Event merge(const Context& context, const Queue& queue, const MergeAttnStates& config,
            const MergeTensors& given, CallTensors& tensors) {
  const std::int64_t width = std::int64_t{config.num_heads} * config.head_size;
  const std::int64_t lse_width = given.heads_first ? config.num_tokens : config.num_heads;
  const auto lse_in = [&](nb::handle lse, const char* name) {
    return lse_ref(tensors.dense_input(lse, DType::kF32, lse_width, name), config.num_tokens,
                   given.heads_first);
  };
  const DType type = config.output_dtype.value_or(config.dtype);
  const OutputWithLse merged{tensors.output(given.output, type, width, "output"),
                             lse_ref(tensors.dense_output(given.lse, DType::kF32, lse_width, "lse"),
                                     config.num_tokens, given.heads_first)};
  const OutputWithLse before{tensors.input(given.prefix, config.dtype, width, "prefix"),
                             lse_in(given.prefix_lse, "prefix_lse")};
  const OutputWithLse after{tensors.input(given.suffix, config.dtype, width, "suffix"),
                            lse_in(given.suffix_lse, "suffix_lse")};
  return tensors.run([&](Event* event) {
    merge_attn_states(context, queue, config, merged, before, after, event);
  });
}

void bind_merge(nb::module_& module) {
  module.def(
      "merge_attn_states",
      [](const Context& context, const Queue& queue, nb::handle output, nb::handle lse,
         nb::handle prefix, nb::handle prefix_lse, nb::handle suffix, nb::handle suffix_lse,
         std::int32_t num_heads, std::int32_t head_size, std::int64_t num_tokens, nb::handle dtype,
         int lse_base, bool lse_heads_first, std::int64_t prefill_tokens_with_context,
         nb::handle output_dtype, nb::handle output_scale) {
        if (lse_base != 0 && lse_base != 2)
          throw_invalid("lse_base: " + std::to_string(lse_base) + ", legal: 0 (e), 2");
        CallTensors tensors(context, queue);
        MergeAttnStates config;
        config.num_tokens = num_tokens;
        config.num_heads = num_heads;
        config.head_size = head_size;
        config.dtype = parse_dtype(name_of(dtype));
        config.lse_base = lse_base == 2 ? LseBase::k2 : LseBase::kE;
        config.prefill_tokens_with_context = prefill_tokens_with_context;
        if (!output_dtype.is_none()) config.output_dtype = parse_dtype(name_of(output_dtype));
        config.output_scale = tensors.scalar(output_scale, "output_scale");
        return merge(context, queue, config,
                     {output, lse, prefix, prefix_lse, suffix, suffix_lse, lse_heads_first},
                     tensors);
      },
      "context"_a, "queue"_a, "output"_a, "lse"_a.none(), "prefix"_a, "prefix_lse"_a, "suffix"_a,
      "suffix_lse"_a, nb::kw_only(), "num_heads"_a, "head_size"_a, "num_tokens"_a, "dtype"_a,
      "lse_base"_a = 0, "lse_heads_first"_a = false, "prefill_tokens_with_context"_a = -1,
      "output_dtype"_a = nb::none(), "output_scale"_a = nb::none(),
      "Joins attention over a prefix and over a suffix of the keys into attention over both.\n"
      "Outputs are [num_tokens, num_heads, head_size], log-sum-exps f32 [num_tokens, num_heads],\n"
      "or [num_heads, num_tokens] with lse_heads_first; lse_base is 0 for e, or 2. Tokens from\n"
      "prefill_tokens_with_context on have no prefix; negative: all have one. output_dtype: an\n"
      "8-bit type, which holds out / output_scale (a number, or f32 [1]); None is dtype.");
  module.def(
      "cache_op_work_group_size",
      [](const Context& context) { return cache_op_work_group_size(context.capabilities()); },
      "context"_a, "Work-items per group of merge_attn_states() and concat_and_cache_mla().");
}

}  // namespace

Buffer scales_of(const Context& context, nb::handle scales, const char* name) {
  if (scales.is_none()) return {};
  if (nb::isinstance<Buffer>(scales)) return nb::cast<const Buffer&>(scales);
  return upload(context, numbers<float>(scales, name));
}

void bind_cache_ops(nb::module_& module) {
  bind_block_ops(module);
  bind_writes(module);
  bind_merge(module);
}

}  // namespace clattn::python
