#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "cli/common/error.hpp"
#include "cli/run/run.hpp"

namespace clattn::cli {
namespace {

/// What attends to what. Encoder types have no cache; cross attention may have one: without key.npy
/// it reads the encoder's keys from pages.
AttentionType read_attn_type(CaseFile& file, bool& causal) {
  constexpr std::array<std::string_view, 4> kTypes = {"decoder", "encoder", "encoder_only",
                                                      "encoder_decoder"};
  const std::string name = file.choice("attn_type", kTypes, "decoder");
  const bool decoder = name == "decoder";
  causal = file.boolean("causal", decoder);
  throw_invalid_if(causal && !decoder && name != "encoder_only",
                   "case.json: causal: expected false or nothing with attn_type {}, got true",
                   name);
  return parse_attention_type(name);
}

/// An <f4 array of `count` numbers, finite or (where it means something) -inf.
std::vector<float> read_floats(const CaseFile& file, std::string_view name, std::int64_t count,
                               bool minus_infinity = false) {
  if (!file.has_array(name)) return {};
  const NpyArray array = file.array(name, "<f4", {count});
  std::vector<float> values(to_size(count));
  std::memcpy(values.data(), array.data.data(), array.data.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i]) || (minus_infinity && values[i] < 0)) continue;
    throw_invalid("{}.npy: entry {} is {}; expected finite numbers{}", name, i, values[i],
                  minus_infinity ? " and -inf" : "");
  }
  return values;
}

void read_shape(CaseFile& file, AttentionConfig& config) {
  config.num_heads = file.int32("num_heads", kHeads);
  config.num_kv_heads = file.int32("num_kv_heads", kHeads);
  throw_invalid_if(config.num_heads % config.num_kv_heads != 0,
                   "case.json: num_heads: {} is not a multiple of num_kv_heads = {}",
                   config.num_heads, config.num_kv_heads);
  config.head_size = file.int32("head_size", kHeadSize);
  config.head_size_v = file.int32("head_size_v", {0, config.head_size}, 0);
  config.block_size = file.int32("block_size", kBlockSize);
  config.dtype = read_dtype(file);
  config.kv_cache_dtype = read_kv_cache_dtype(file);
}

void read_logit_options(CaseFile& file, AttentionConfig& config) {
  if (file.has("scale")) config.scale = static_cast<float>(file.number("scale"));
  const auto tokens = [&](const char* key) { return file.int32(key, {1, INT32_MAX}, 0); };
  config.sliding_window = tokens("sliding_window");
  config.attention_chunk_size = tokens("attention_chunk_size");
  if (file.has("logits_soft_cap")) {
    config.logits_soft_cap = static_cast<float>(file.number("logits_soft_cap"));
    throw_invalid_if(config.logits_soft_cap < 0,
                     "case.json: logits_soft_cap: expected a number >= 0 (0 = none), got {}",
                     config.logits_soft_cap);
  }
  config.alibi_slopes = read_floats(file, "alibi_slopes", config.num_heads);
  config.sinks = read_floats(file, "sinks", config.num_heads, true);
}

/// Slots past the last token are padding and dropped.
void read_stored_slots(const CaseFile& file, AttentionCall& call) {
  const std::int64_t tokens = call.num_tokens();
  if (!file.has_array("slot_mapping") && !file.has_array("key")) return;
  call.slot_mapping = file.indices64("slot_mapping", {-1});
  throw_invalid_if(std::cmp_less(call.slot_mapping.size(), tokens),
                   "slot_mapping.npy: holds {} slots; expected at least {}, one a token",
                   call.slot_mapping.size(), tokens);
  call.slot_mapping.resize(to_size(tokens));
}

/// Keys and values that are attended directly, or are to be stored.
void read_keys(const CaseFile& file, AttentionCall& call) {
  const AttentionConfig& config = call.config;
  if (!config.contiguous_kv() && !file.has_array("key")) return;
  const std::int32_t rows =
      call.key_start_loc.empty() ? call.num_tokens() : call.key_start_loc.back();
  const Extents shape = {rows, config.num_kv_heads, config.head_size};
  call.key = file.array("key", descr_of(config.dtype), shape).data;
  const Extents of_values = {rows, config.num_kv_heads, config.output_head_size()};
  call.value = file.array("value", descr_of(config.dtype), of_values).data;
}

void read_tensors(const CaseFile& file, AttentionCall& call) {
  const AttentionConfig& config = call.config;
  const std::int64_t tokens = call.num_tokens();
  call.query =
      file.array("query", descr_of(config.dtype), {tokens, config.num_heads, config.head_size})
          .data;
  throw_invalid_if(file.has_array("key") != file.has_array("value"),
                   "key.npy, value.npy: expected both or neither");
  if (!config.contiguous_kv()) read_stored_slots(file, call);
  read_keys(file, call);
  if (!config.contiguous_kv()) {
    Extents pages = {-1, config.block_size, config.num_kv_heads, config.head_size};
    call.cache = read_caches(file, config.cache_dtype(), pages);
    call.num_blocks = pages[0];
  }
  if (config.custom_mask) {
    call.custom_mask = file.array("custom_mask", "|u1", {tokens, call.max_seq_len()}).data;
  }
  if (config.output_fp8) {
    call.output_scale = read_floats(file, "output_scale", 1).front();
    throw_invalid_if(!(call.output_scale > 0),
                     "output_scale.npy: entry 0 is {}; expected a number > 0", call.output_scale);
  }
}

void read_arrays(const CaseFile& file, AttentionCall& call) {
  if (call.config.contiguous_kv()) {
    std::vector<std::int64_t> shape;
    call.seq_lens = file.indices32("seq_lens", {-1}, &shape);
    call.query_start_loc = read_prefix_sums(file, "query_start_loc", shape[0]);
    if (file.has_array("key_start_loc")) {
      call.key_start_loc = read_prefix_sums(file, "key_start_loc", shape[0]);
    }
    return;
  }
  static_cast<BatchArrays&>(call) = read_batch_with_queries(file);
  if (file.has_array("seq_len_bounds"))
    call.seq_len_bounds = file.indices32("seq_len_bounds", {call.num_reqs()});
}

}  // namespace

AttentionCall read_attention_call(CaseFile& file, const RunOptions& options) {
  // The batch is checked first, because it says how large the tensors must be; then its blocks and
  // slots, once the cache's size is known.
  AttentionCall call;
  AttentionConfig& config = call.config;
  read_shape(file, config);
  read_logit_options(file, config);
  config.attn_type = read_attn_type(file, call.causal);
  const bool cross = config.attn_type == AttentionType::kEncoderDecoder;
  if (config.attn_type != AttentionType::kDecoder && (!cross || file.has_array("key"))) {
    config.block_size = 0;
  }
  config.custom_mask = file.has_array("custom_mask");
  config.output_fp8 = file.has_array("output_scale");
  config.fp8_products = file.boolean("fp8_products", false);
  call.scales = read_scales(file, config.cache_dtype(), config.num_kv_heads);
  call.query_scale = read_scale(file, config.cache_dtype(), "q_scale");
  call.num_splits = file.int32("num_splits", {0, 65536}, 0);
  call.backend = read_backend(file, options);
  call.layout = read_layout(file, &call.packed);
  if (call.packed) require_no_backend(call.backend);
  call.plan = read_plan(file);
  call.plan.decode_threshold = file.int32("decode_threshold", {1, INT32_MAX}, 1);
  call.common_prefix_len = file.int32("common_prefix_len", kCount, 0);
  config.kernel_family = read_kernel_family(file);
  file.refuse_unknown_keys();
  read_arrays(file, call);
  validate_call(call, -1);
  read_tensors(file, call);
  validate_call(call, call.num_blocks);
  return call;
}

}  // namespace clattn::cli
