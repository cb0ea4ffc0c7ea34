#include <algorithm>
#include <array>
#include <clattn/config_fields.hpp>
#include <cmath>
#include <cstring>
#include <utility>

#include "program/common/error.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

/// What attends to what. Encoder types have no cache; cross attention may have one: without key.npy
/// it reads the encoder's keys from pages.
AttentionType read_attn_type(CaseFile& file, bool& causal) {
  constexpr std::array<std::string_view, 4> kTypes = {"decoder", "encoder", "encoder_only",
                                                      "encoder_decoder"};
  const std::string name = file.choice("attn_type", kTypes, "decoder");
  const bool decoder = name == "decoder";
  throw_invalid_if(file.has("causal") && file.has_array("direction"),
                   "case.json: causal: expected nothing beside direction.npy, which says it of "
                   "each request");
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

/// A field of the configuration: a key, or an array.
///@{
void read(CaseFile& file, const ConfigField<std::int32_t>& row, AttentionConfig& config) {
  const auto least = static_cast<std::int64_t>(row.legal.least);
  const double most = std::min(row.legal.most, double{INT32_MAX});
  const bool required = row.standard < least;
  config.*row.member =
      file.int32(std::string(row.name), {least, static_cast<std::int64_t>(most)},
                 required ? std::nullopt : std::optional<std::int64_t>(row.standard));
}
void read(CaseFile& file, const ConfigField<bool>& row, AttentionConfig& config) {
  if (!row.legal.array.empty()) {
    config.*row.member = file.has_array(row.legal.array);
    return;
  }
  const bool brings = row.member == &AttentionConfig::use_spans && file.has_array("spans");
  config.*row.member = file.boolean(std::string(row.name), brings || row.standard);
}
template <typename Number>
void read(CaseFile& file, const ConfigField<Number>& row, AttentionConfig& config) {
  const std::string key(row.name);
  if (!file.has(key)) return;
  const double number = file.number(key);
  throw_invalid_if(number < row.legal.least || number > row.legal.most,
                   "case.json: {}: expected {}, got {}", key, row.legal.words, number);
  config.*row.member = static_cast<float>(number);
}
void read(CaseFile& file, const ConfigField<std::vector<float>>& row, AttentionConfig& config) {
  config.*row.member = read_floats(file, row.name, config.num_heads, row.legal.minus_infinity);
}
void read(CaseFile& file, const ConfigField<DType>& row, AttentionConfig& config) {
  config.*row.member = read_dtype(file);
}
void read(CaseFile& file, const ConfigField<std::optional<CacheFormat>>& row,
          AttentionConfig& config) {
  config.*row.member = read_kv_cache_dtype(file);
}
void read(CaseFile&, const ConfigField<AttentionType>&, AttentionConfig&) {}  // read_attn_type()
void read(CaseFile& file, const ConfigField<KernelFamily>& row, AttentionConfig& config) {
  config.*row.member = read_kernel_family(file);
}
void read(CaseFile& file, const ConfigField<SpanRule>& row, AttentionConfig& config) {
  constexpr std::array<std::string_view, 3> kRules = {"whole", "clip_left", "clip_both"};
  config.*row.member = parse_span_rule(file.choice(std::string(row.name), kRules, "whole"));
}
///@}

void read_config(CaseFile& file, AttentionCall& call) {
  AttentionConfig& config = call.config;
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    const bool is_list = std::is_same_v<Value, std::vector<float>>;
    if (is_case_key(row) || is_list || !row.legal.array.empty()) read(file, row, config);
  });
  throw_invalid_if(config.num_heads % config.num_kv_heads != 0,
                   "case.json: num_heads: {} is not a multiple of num_kv_heads = {}",
                   config.num_heads, config.num_kv_heads);
  throw_invalid_if(config.head_size_v > config.head_size,
                   "case.json: head_size_v: expected an integer from 0 to {}, got {}",
                   config.head_size, config.head_size_v);
  config.attn_type = read_attn_type(file, call.causal);
  const bool cross = config.attn_type == AttentionType::kEncoderDecoder;
  if (config.attn_type != AttentionType::kDecoder && (!cross || file.has_array("key"))) {
    config.block_size = 0;
  } else {
    throw_invalid_if(config.block_size < 1,
                     "case.json: block_size: expected an integer from 1 on, got {}",
                     config.block_size);
  }
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
    call.num_blocks = -1;
    call.cache = read_caches(file, config, call.num_blocks);
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

std::vector<Direction> read_directions(const CaseFile& file, std::int64_t num_reqs) {
  std::vector<Direction> directions;
  for (const std::byte entry : file.array("direction", "|u1", {num_reqs}).data) {
    const auto value = std::to_integer<std::uint8_t>(entry);
    throw_invalid_if(value > static_cast<std::uint8_t>(Direction::kCanvas),
                     "direction.npy: entry {} is {}; expected 0 (both ways), 1 (causal) or 2 "
                     "(canvas)",
                     directions.size(), value);
    directions.push_back(static_cast<Direction>(value));
  }
  return directions;
}

/// The spans of a request ascend and are disjoint, whether the layer looks at them or not.
void read_spans(const CaseFile& file, AttentionCall& call) {
  call.span_start_loc = read_prefix_sums(file, "span_start_loc", call.num_reqs());
  call.spans = file.indices32("spans", {call.span_start_loc.back(), 2});
  for (std::size_t r = 0; r + 1 < call.span_start_loc.size(); ++r) {
    std::int32_t behind = 0;
    for (std::int32_t i = call.span_start_loc[r]; i < call.span_start_loc[r + 1]; ++i) {
      const std::int32_t first = call.spans[2 * to_size(i)], end = call.spans[2 * to_size(i) + 1];
      throw_invalid_if(first < behind || end < first,
                       "spans.npy: row {} is {}, {}; expected a first position from {} on, behind "
                       "the spans of request {} before it, and one past its last",
                       i, first, end, behind, r);
      behind = end;
    }
  }
}

/// Each tree holds its request's query tokens, and a node's parent stands before it.
void read_trees(const CaseFile& file, AttentionCall& call) {
  call.tree_start_loc = read_prefix_sums(file, "tree_start_loc", call.num_reqs());
  call.tree_parents = file.indices32("tree_parents", {call.tree_start_loc.back()});
  for (std::size_t r = 0; r + 1 < call.tree_start_loc.size(); ++r) {
    const std::int32_t first = call.tree_start_loc[r];
    const std::int32_t nodes = call.tree_start_loc[r + 1] - first;
    const std::int32_t query_len = call.query_start_loc[r + 1] - call.query_start_loc[r];
    const std::int32_t most = std::min(kMaxTreeNodes, call.seq_lens[r]);
    throw_invalid_if(nodes != 0 && (nodes < query_len || nodes > most),
                     "tree_start_loc.npy: request {} has a tree of {} nodes; expected none, or {} "
                     "to {}",
                     r, nodes, query_len, most);
    for (std::int32_t node = 0; node < nodes; ++node) {
      const std::int32_t parent = call.tree_parents[to_size(first + node)];
      throw_invalid_if(parent < -1 || parent >= node,
                       "tree_parents.npy: entry {} is {}; expected an integer in [-1, {}]",
                       first + node, parent, node - 1);
    }
  }
}

/// A position or a number of keys for each request.
std::vector<std::int32_t> read_keys(const CaseFile& file, const char* name,
                                    const AttentionCall& call) {
  std::vector<std::int32_t> keys = file.indices32(name, {call.num_reqs()});
  for (std::size_t r = 0; r < keys.size(); ++r) {
    throw_invalid_if(keys[r] < 0 || keys[r] > call.seq_lens[r],
                     "{}.npy: entry {} is {}; expected an integer in [0, {}], its seq_lens", name,
                     r, keys[r], call.seq_lens[r]);
  }
  return keys;
}

/// What the batch says of its requests beyond lengths.
void read_lists(const CaseFile& file, AttentionCall& call) {
  if (call.config.use_directions) call.direction = read_directions(file, call.num_reqs());
  throw_invalid_if(file.has_array("spans") != file.has_array("span_start_loc"),
                   "spans.npy, span_start_loc.npy: expected both or neither");
  if (file.has_array("spans")) read_spans(file, call);
  read_seen_keys(file, call);
  if (call.config.use_keep_keys) call.keep_keys = read_keys(file, "keep_keys", call);
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

void pad_to(std::int32_t num_rows, AttentionCall& call) {
  throw_invalid_if(num_rows != 0 && num_rows < call.num_tokens(),
                   "case.json: num_actual_tokens: expected an integer from {} on (the requests' "
                   "query tokens), got {}",
                   call.num_tokens(), num_rows);
  call.padding = std::max(num_rows - call.num_tokens(), 0);
}

void read_seen_keys(const CaseFile& file, AttentionCall& call) {
  if (call.config.use_trees) read_trees(file, call);
  if (call.config.use_first_keys) call.first_keys = read_keys(file, "first_keys", call);
}

AttentionCall read_attention_call(CaseFile& file, const RunOptions& options) {
  // The batch is checked first, because it says how large the tensors must be; then its blocks and
  // slots, once the cache's size is known.
  AttentionCall call;
  read_config(file, call);
  const AttentionConfig& config = call.config;
  call.scales = read_scales(file, config.cache_dtype(), config.num_kv_heads);
  call.query_scale = read_scale(file, config.cache_dtype(), "q_scale");
  call.num_splits = file.int32("num_splits", {0, 65536}, 0);
  call.backend = read_backend(file, options);
  call.layout = read_layout(file, &call.packed);
  if (call.packed) require_no_backend(call.backend);
  call.plan = read_plan(file);
  call.plan.decode_threshold = file.int32("decode_threshold", {1, INT32_MAX}, 1);
  call.common_prefix_len = file.int32("common_prefix_len", kCount, 0);
  const std::int32_t num_rows = file.int32("num_actual_tokens", kCount, 0);
  file.refuse_unknown_keys();
  read_arrays(file, call);
  pad_to(num_rows, call);
  validate_call(call, -1);
  read_lists(file, call);
  read_tensors(file, call);
  validate_call(call, call.num_blocks);
  return call;
}

}  // namespace clattn::cli
