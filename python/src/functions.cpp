#include <clattn/attention_functions.hpp>

#include "attention.hpp"

namespace clattn::python {

namespace {

constexpr const char* kLayouts = ", legal: 'tokens' ([tokens, heads]) or 'heads' ([heads, tokens])";

/// [tokens, heads] or [heads, tokens], without gaps.
LseRef take_lse(CallTensors& taken, nb::handle lse, const AttentionConfig& config,
                std::int64_t tokens, std::string_view layout) {
  const bool heads_first = layout == "heads";
  if (!heads_first && layout != "tokens")
    throw_invalid("lse_layout: '" + std::string(layout) + "'" + kLayouts);
  const std::int64_t width = heads_first ? tokens : config.num_heads;
  LseRef made{taken.dense_output(lse, DType::kF32, width, "lse").buffer};
  if (heads_first) {
    made.token_stride = 1;
    made.head_stride = tokens;
  }
  return made;
}

LseBase lse_base_of(std::string_view base) {
  if (base == "e") return LseBase::kE;
  if (base == "2") return LseBase::k2;
  throw_invalid("lse_base: '" + std::string(base) + "', legal: 'e' or '2'");
}

/// clattn.functions calls it: attention(), or with a cache paged_attention().
Event attend(const Context& context, const Queue& queue, const AttentionConfig& config,
             const KVCache* cache, nb::handle query, nb::handle key, nb::handle value,
             nb::handle output, nb::handle query_start_loc, nb::handle key_start_loc,
             nb::handle seq_lens, nb::handle block_table, nb::handle page_start_loc, bool causal,
             nb::handle direction, nb::handle span_start_loc, nb::handle spans,
             nb::handle first_keys, nb::handle keep_keys, nb::handle tree_start_loc,
             nb::handle tree_parents, nb::handle lse, std::string_view lse_layout,
             std::string_view lse_base, nb::handle mask, bool packed_mask, nb::handle output_fp8,
             nb::handle output_scale, bool shares_cache) {
  const auto starts = numbers<std::int32_t>(query_start_loc, "query_start_loc");
  const auto key_starts = optional_numbers<std::int32_t>(key_start_loc, "key_start_loc");
  const auto lengths = optional_numbers<std::int32_t>(seq_lens, "seq_lens");
  const auto lists = optional_numbers<std::int32_t>(page_start_loc, "page_start_loc");
  const RequestLists told(direction, span_start_loc, spans, first_keys, keep_keys, tree_start_loc,
                          tree_parents);
  std::optional<Values<std::int32_t, 2>> rows;
  std::optional<Int32s> pages;
  if (lists) {
    pages = optional_numbers<std::int32_t>(block_table, "block_table");
  } else {
    rows = optional_numbers<std::int32_t, 2>(block_table, "block_table");
  }
  if (rows && rows->size() != 0 && rows->shape(0) + 1 != starts.size()) {
    throw_invalid("block_table: " + std::to_string(rows->shape(0)) +
                  " rows, legal: " + std::to_string(starts.size() - 1) + ", one a sequence");
  }
  if (starts.size() == 0) throw_invalid("query_start_loc: no values, legal: sequences + 1");
  const std::int64_t tokens = starts.data()[starts.size() - 1];
  const Widths widths = widths_of(config);
  CallTensors taken(context, queue);
  AttentionArguments call;
  call.query = taken.input(query, config.dtype, widths.query, "query");
  call.key = taken.input(key, config.dtype, widths.key, "key");
  call.value = taken.input(value, config.dtype, widths.value, "value");
  call.output = taken.output(output, config.dtype, widths.output, "out");
  call.query_start_loc = span_of(starts);
  call.key_start_loc = span_of(key_starts);
  call.seq_lens = span_of(lengths);
  call.block_table = lists ? span_of(pages) : span_of(rows);
  call.page_start_loc = span_of(lists);
  call.causal = causal;
  told.give(call);
  call.lse = take_lse(taken, lse, config, tokens, lse_layout);
  call.lse_base = lse_base_of(lse_base);
  const TensorRef masked = taken.mask(mask);
  if (masked.buffer == nullptr && !mask.is_none() && tokens > 0)
    throw_invalid("mask: it has no keys, legal: as many as the longest sequence");
  if (shares_cache) taken.shared(cache->buffer, !key.is_none());
  call.mask = {masked.buffer, masked.token_stride, packed_mask};
  call.output_fp8 =
      taken.dense_output(output_fp8, DType::kFp8E4M3, widths.output, "output_fp8").buffer;
  const Buffer scale = taken.scalar(output_scale, "output_scale");
  call.output_scale = scale.handle();
  return taken.run([&](Event* done) {
    if (cache == nullptr) return attention(queue, call, config, done);
    paged_attention(queue, call, *cache, config, done);
  });
}

}  // namespace

void bind_functions(nb::module_& module) {
  module.def("_attend", &attend, "context"_a, "queue"_a, "config"_a, "cache"_a.none(), "query"_a,
             "key"_a.none(), "value"_a.none(), "output"_a, "query_start_loc"_a,
             "key_start_loc"_a.none(), "seq_lens"_a.none(), "block_table"_a.none(),
             "page_start_loc"_a.none(), "causal"_a, "direction"_a.none(), "span_start_loc"_a.none(),
             "spans"_a.none(), "first_keys"_a.none(), "keep_keys"_a.none(),
             "tree_start_loc"_a.none(), "tree_parents"_a.none(), "lse"_a.none(), "lse_layout"_a,
             "lse_base"_a, "mask"_a.none(), "packed_mask"_a, "output_fp8"_a.none(),
             "output_scale"_a.none(), "shares_cache"_a);
  module.def(
      "clear_attention_functions", [] { without_gil([] { clear_attention_functions(); }); },
      "Frees the kernels and memory that attention() and paged_attention() keep.");
}

}  // namespace clattn::python
