// What vLLM's callers know by name and is but a few lines here.
#include <fmt/format.h>

#include <algorithm>
#include <clattn/compat/layer_parameters.hpp>
#include <clattn/compat/spec_decode.hpp>
#include <clattn/compat/v0_slot_mapping.hpp>
#include <clattn/compat/vllm_layer.hpp>
#include <set>
#include <string_view>

#include "base/checked.hpp"
#include "kernels/launch/step_launch.hpp"

namespace clattn {
namespace {

using detail::check_at_least, detail::throw_invalid_if, detail::to_size;

PerLayerParameters parameters_of(const AttentionConfig& config) {
  PerLayerParameters result;
  result.window_left = detail::window_of(config).left;
  if (config.logits_soft_cap != 0) result.logits_soft_cap = config.logits_soft_cap;
  result.sm_scale = detail::softmax_scale(config.scale, config.head_size);
  return result;
}

/// The table entries of tokens [first, seq_len).
void check_used_blocks(const V0SlotMappingRequest& request, std::int32_t first) {
  if (first >= request.seq_len) return;
  const auto last = to_size((request.seq_len - 1) / request.block_size);
  throw_invalid_if(request.block_table.size() <= last,
                   "block_table holds {} elements, legal: at least {} (seq_len {}, block_size {})",
                   request.block_table.size(), last + 1, request.seq_len, request.block_size);
  for (auto page = to_size(first / request.block_size); page <= last; ++page) {
    throw_invalid_if(request.block_table[page] < 0, "block_table[{}] is {}, legal: at least 0",
                     page, request.block_table[page]);
  }
}

}  // namespace

std::string extra_repr(const Attention& layer) {
  const AttentionConfig& config = layer.config();
  return fmt::format("head_size={}, num_heads={}, num_kv_heads={}, scale={}, backend={}",
                     config.head_size, config.num_heads, config.num_kv_heads,
                     detail::softmax_scale(config.scale, config.head_size),
                     layer.get_attn_backend()->name());
}

void process_weights_after_loading(const Attention& layer, DType act_dtype) {
  throw_invalid_if(act_dtype != layer.config().dtype,
                   "act_dtype is {}, legal: the layer's dtype, {}", to_string(act_dtype),
                   to_string(layer.config().dtype));
}

std::string_view get_kv_cache_spec_kind(const KVCacheSpec& spec) {
  switch (spec.kind) {
    case KVCacheKind::kFull:
      return spec.use_mla ? "mla_attention" : "full_attention";
    case KVCacheKind::kChunkedLocal:
      return "chunked_local_attention";
    case KVCacheKind::kEncoderOnly:
      return "encoder_only_attention";
    case KVCacheKind::kCross:
      return "cross_attention";
    case KVCacheKind::kSlidingWindow:
    case KVCacheKind::kMamba:
      break;
  }
  return to_string(spec.kind);
}

LayerParameters get_per_layer_parameters(std::span<const NamedAttentionConfig> layers) {
  LayerParameters result;
  std::set<std::string_view> names;
  for (const NamedAttentionConfig& layer : layers) {
    throw_invalid_if(!names.insert(layer.name).second,
                     "layer name \"{}\" is given twice, legal: once", layer.name);
    result.emplace_back(layer.name, parameters_of(layer.config));
  }
  return result;
}

GlobalHyperparameters infer_global_hyperparameters(const LayerParameters& per_layer_params) {
  throw_invalid_if(per_layer_params.empty(), "No attention layers found in the model.");
  const PerLayerParameters& first = per_layer_params.front().second;
  GlobalHyperparameters result{first};
  for (const auto& [name, parameters] : per_layer_params) {
    if (parameters.window_left != first.window_left) result.has_same_window_lefts = false;
    if (!(parameters == first)) result.has_same_all_params = false;
  }
  return result;
}

SpecDecodeTensor reshape_query_for_spec_decode(const TensorRef& query, std::int64_t num_tokens,
                                               std::int64_t batch_size) {
  check_at_least("batch_size", batch_size, 1);
  throw_invalid_if(num_tokens < 0 || num_tokens % batch_size != 0,
                   "num_tokens is {}, legal: a multiple of batch_size {}", num_tokens, batch_size);
  return {query, batch_size, num_tokens / batch_size};
}

bool is_v0_block_tables_empty(
    std::span<const std::optional<std::vector<std::int32_t>>> block_tables) {
  return std::ranges::none_of(block_tables, [](const auto& table) { return table.has_value(); });
}

std::int32_t compute_v0_slot_mapping_start_idx(V0Phase phase, std::int32_t query_len,
                                               std::int32_t window) {
  check_at_least("query_len", query_len, 0);
  check_at_least("window", window, 0);
  if (phase == V0Phase::kDecode || window == 0) return 0;
  return std::max(0, query_len - window);
}

void append_v0_slot_mapping(const V0SlotMappingRequest& request,
                            std::vector<std::int64_t>& slot_mapping) {
  check_at_least("seq_len", request.seq_len, 0);
  check_at_least("context_len", request.context_len, 0);
  check_at_least("start_idx", request.start_idx, 0);
  check_at_least("block_size", request.block_size, 1);
  if (request.is_profile_run) {
    slot_mapping.insert(slot_mapping.end(), to_size(request.seq_len), kPadSlotId);
    return;
  }
  const std::int32_t first = std::max(request.start_idx, request.context_len);
  check_used_blocks(request, first);
  slot_mapping.insert(slot_mapping.end(), to_size(first - request.context_len), kPadSlotId);
  for (std::int32_t token = first; token < request.seq_len; ++token) {
    const std::int64_t block = request.block_table[to_size(token / request.block_size)];
    slot_mapping.push_back(block * request.block_size + token % request.block_size);
  }
}

}  // namespace clattn
