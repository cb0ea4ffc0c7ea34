#include <clattn/attention_functions.hpp>

#include "base/config_in_c.hpp"
#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

namespace {

AttentionConfig config_of(const ClattnLayerConfig* config) {
  const ClattnLayerConfig& given = read(config, "config");
  const auto refuse = [](bool set, const char* field) {
    detail::throw_invalid_if(set, "config: {} is set, legal: for layers alone", field);
  };
  refuse(given.name != nullptr, "name");
  refuse(given.backend != nullptr, "backend");
  refuse(given.kv_sharing_target_layer_name != nullptr, "kv_sharing_target_layer_name");
  refuse(given.calculate_kv_scales != 0, "calculate_kv_scales");
  return detail::config_from_c(given);
}

AttentionArguments arguments_of(const ClattnAttentionCall& given) {
  detail::throw_invalid_if(given.num_seqs < 0, "call: num_seqs is {}, legal: >= 0", given.num_seqs);
  detail::throw_invalid_if(given.num_pages < 0, "call: num_pages is {}, legal: >= 0",
                           given.num_pages);
  const auto count = static_cast<std::size_t>(given.num_seqs);
  const auto starts = [&](const int32_t* array) {
    return std::span(array, array == nullptr ? 0 : count + 1);
  };
  AttentionArguments made = {
      .query = tensor_of(given.query),
      .key = tensor_of(given.key),
      .value = tensor_of(given.value),
      .output = tensor_of(given.output),
      .query_start_loc = elements(given.query_start_loc, count + 1, "call: query_start_loc"),
      .key_start_loc = starts(given.key_start_loc),
      .seq_lens = std::span(given.seq_lens, given.seq_lens == nullptr ? 0 : count),
      .block_table = elements(given.block_table, static_cast<std::size_t>(given.num_pages),
                              "call: block_table"),
      .page_start_loc = starts(given.page_start_loc),
      .causal = given.not_causal == 0,
      .lse = {memory_of(given.lse), given.lse_offset, given.lse_token_stride,
              given.lse_head_stride},
      .lse_base = given.lse_base_2 != 0 ? LseBase::k2 : LseBase::kE,
      .mask = {memory_of(given.mask), given.mask_stride, given.mask_bits != 0},
      .output_fp8 = memory_of(given.output_fp8),
      .output_scale = memory_of(given.output_scale)};
  take_lists(given, count, "call", made);
  return made;
}

}  // namespace

ClattnResult clattn_attention(const ClattnQueue* queue, const ClattnLayerConfig* config,
                              const ClattnAttentionCall* call) {
  return guarded([&] {
    const Queue& on = held(queue);
    const AttentionConfig layer = config_of(config);
    const ClattnAttentionCall& given = read(call, "call");
    attention(on, arguments_of(given), layer, event_of(given.event));
  });
}

ClattnResult clattn_paged_attention(const ClattnQueue* queue, const ClattnCache* cache,
                                    const ClattnLayerConfig* config,
                                    const ClattnAttentionCall* call) {
  return guarded([&] {
    const Queue& on = held(queue);
    const KVCache& pages = deref(cache, "cache").in_use();
    const AttentionConfig layer = config_of(config);
    const ClattnAttentionCall& given = read(call, "call");
    paged_attention(on, arguments_of(given), pages, layer, event_of(given.event));
  });
}

ClattnResult clattn_clear_attention_functions() {
  return guarded([] { clear_attention_functions(); });
}
