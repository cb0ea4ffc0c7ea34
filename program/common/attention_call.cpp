#include "program/common/attention_call.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "oracle/row_scales.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

enum class Scaling : std::uint8_t { kStore, kLoad };

/// Elements of a head's row of keys (0) or values (1).
std::size_t row_width(const AttentionConfig& config, std::size_t kv) {
  return to_size(kv == 0 ? config.head_size : value_width(config));
}

/// Divides rows of [num_kv_heads, row_width()] by the factors of K (0) or V (1), or multiplies.
void apply_scales(const AttentionCall& call, std::size_t kv, Scaling scaling,
                  std::vector<double>& values) {
  if (call.scales.empty()) return;
  const std::size_t count = call.scales.size() / 2;
  const std::size_t head_size = row_width(call.config, kv);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto scale = static_cast<double>(call.scales[kv * count + i / head_size % count]);
    values[i] = scaling == Scaling::kStore ? values[i] / scale : values[i] * scale;
  }
}

/// Keys (0) or values (1) as the oracle reads them. `rows`: the scale of each token and head.
std::vector<double> widened(const AttentionCall& call, std::size_t kv,
                            const std::vector<std::byte>& stored, const std::vector<float>& rows) {
  std::vector<double> values = decode_elements(call.config.cache_dtype(), stored);
  apply_scales(call, kv, Scaling::kLoad, values);
  if (rows.empty()) return values;
  const std::size_t width = row_width(call.config, kv);
  const oracle::Element element = element_of(call.config.cache_dtype());
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] =
        oracle::row_value(element, std::to_integer<std::uint8_t>(stored[i]), rows[i / width]);
  return values;
}

/// The scale of a row and its zero as one f32, of codes of 4 bits (oracle/row_scales.hpp).
float scale_with_zero(std::span<const double> row) {
  float lo = 0, hi = 0;
  for (const double x : row) {
    if (!std::isfinite(x)) continue;
    lo = std::min(lo, static_cast<float>(x));
    hi = std::max(hi, static_cast<float>(x));
  }
  const float scale = hi / 15 - lo / 15;
  if (scale < std::numeric_limits<float>::min()) return 0;
  const double zero = std::clamp(std::nearbyint(static_cast<double>(-lo / scale)), 0.0, 15.0);
  return oracle::join_scale({static_cast<double>(scale), static_cast<std::uint32_t>(zero)});
}

/// Divides each row of `width` values by a scale of its own, which makes the largest finite one the
/// largest code, in f32; returns these scales. Codes of 4 bits have zeros, too.
std::vector<float> divide_rows(DType code, std::size_t width, std::vector<double>& values) {
  std::vector<float> scales;
  for (std::size_t first = 0; first < values.size(); first += width) {
    float largest = 0;
    for (std::size_t i = first; i < first + width; ++i)
      if (std::isfinite(values[i]))
        largest = std::max(largest, static_cast<float>(std::abs(values[i])));
    const float found = largest / (code == DType::kInt8 ? 127.0F : 448.0F);
    scales.push_back(found < std::numeric_limits<float>::min() ? 0 : found);
    float scale = scales.back(), zero = 0;
    if (code == DType::kUInt4x2) {
      scales.back() = scale_with_zero(std::span(values).subspan(first, width));
      const auto parts = oracle::split_scale(scales.back());
      scale = static_cast<float>(parts.scale);
      zero = static_cast<float>(parts.zero);
    }
    for (std::size_t i = first; i < first + width; ++i) {
      if (scale > 0)
        values[i] = static_cast<double>(static_cast<float>(values[i]) / scale + zero);
      else if (!std::isnan(values[i]))
        values[i] = 0;
    }
  }
  return scales;
}

void store_rows(const AttentionCall& call, std::size_t kv, const std::vector<std::byte>& rows,
                std::vector<std::byte>& cache, std::vector<float>& cache_scales) {
  const AttentionConfig& config = call.config;
  std::vector<std::byte> converted;
  std::vector<float> scales;  // of rows
  if (config.cache_format().scales_per_row()) {
    std::vector<double> values = decode_elements(config.dtype, rows);
    scales = divide_rows(config.cache_dtype(), row_width(config, kv), values);
    converted = encode_elements(config.cache_dtype(), values);
  } else if (call.scales.empty()) {
    converted = convert_elements(config.dtype, config.cache_dtype(), rows);
  } else {
    std::vector<double> values = decode_elements(config.dtype, rows);
    apply_scales(call, kv, Scaling::kStore, values);
    converted = encode_elements(config.cache_dtype(), values);
  }
  const std::size_t row_bytes = to_size(config.num_kv_heads) * row_width(config, kv) *
                                element_size_bytes(config.cache_dtype());
  for (std::size_t t = 0; t < converted.size() / row_bytes; ++t) {
    if (call.slot_mapping[t] < 0) continue;
    std::memcpy(&cache[to_size(call.slot_mapping[t]) * row_bytes], &converted[t * row_bytes],
                row_bytes);
    const auto heads = to_size(config.num_kv_heads);
    if (!scales.empty())
      std::copy_n(&scales[t * heads], heads, &cache_scales[to_size(call.slot_mapping[t]) * heads]);
  }
}

/// Contiguous keys: seq_lens are the lengths that key_start_loc (or query_start_loc) says.
void validate_key_lengths(const AttentionCall& call) {
  const bool own = call.key_start_loc.empty();
  const char* const name = own ? "query_start_loc" : "key_start_loc";
  const std::vector<std::int32_t>& starts = own ? call.query_start_loc : call.key_start_loc;
  for (std::size_t r = 0; r < call.seq_lens.size(); ++r) {
    const std::int64_t keys = std::int64_t{starts[r + 1]} - starts[r];
    if (call.seq_lens[r] == keys) continue;
    throw_invalid("request {}: seq_lens is {}, legal: {} ({}[{}] - {}[{}])", r, call.seq_lens[r],
                  keys, name, r + 1, name, r);
  }
}

/// Requests that attend to nothing need not share the prefix.
bool is_idle(const AttentionCall& call, std::size_t r) {
  return call.query_start_loc[r + 1] == call.query_start_loc[r] || call.is_refused(r);
}

/// The prefix is whole pages, the same ones in every request. The batch itself is legal.
void validate_prefix(const AttentionCall& call) {
  const std::int32_t prefix = call.common_prefix_len, block_size = call.config.block_size;
  const auto row = [&](std::size_t r) {
    return call.block_table.begin() + static_cast<std::ptrdiff_t>(r) * call.max_blocks;
  };
  throw_invalid_if(prefix % block_size != 0,
                   "common_prefix_len is {}, legal: multiples of block_size {}", prefix,
                   block_size);
  std::optional<std::size_t> first;
  for (std::size_t r = 0; r < call.seq_lens.size(); ++r) {
    if (is_idle(call, r)) continue;
    throw_invalid_if(prefix > call.seq_lens[r],
                     "request {}: common_prefix_len is {}, legal: 0 … {} (its seq_len)", r, prefix,
                     call.seq_lens[r]);
    if (!first) first = r;
    const auto end = row(*first) + prefix / block_size;
    const auto [shared, own] = std::mismatch(row(*first), end, row(r));
    if (shared == end) continue;
    throw_invalid(
        "request {}: block_table[{}] is {}, legal: {} (request {}'s: "
        "common_prefix_len {})",
        r, own - row(r), *own, *shared, *first, prefix);
  }
}

}  // namespace

std::int32_t AttentionCall::computed_prefix_len() const {
  std::int32_t prefix = common_prefix_len;
  for (std::size_t r = 0; r < seq_lens.size(); ++r) {
    if (is_idle(*this, r)) continue;
    const std::int32_t computed = seq_lens[r] - (query_start_loc[r + 1] - query_start_loc[r]);
    prefix = std::min(prefix, computed / config.block_size * config.block_size);
  }
  return prefix;
}

std::int32_t AttentionCall::max_seq_len() const {
  const std::vector<std::int32_t>& lens = seq_len_bounds.empty() ? seq_lens : seq_len_bounds;
  return lens.empty() ? 0 : *std::ranges::max_element(lens);
}

void validate_bounds(std::span<const std::int32_t> seq_lens, std::span<const std::int32_t> bounds,
                     std::int64_t most) {
  for (std::size_t r = 0; r < bounds.size(); ++r) {
    throw_invalid_if(seq_lens[r] < 0, "request {}: seq_lens is {}, legal: at least 0", r,
                     seq_lens[r]);
    throw_invalid_if(bounds[r] < seq_lens[r] || bounds[r] > most,
                     "request {}: seq_len_bounds is {}, legal: {} … {} (from its seq_len to its "
                     "block table's end)",
                     r, bounds[r], seq_lens[r], most);
  }
}

void validate_call(const AttentionCall& call, std::int64_t num_blocks) {
  if (call.config.contiguous_kv()) {
    if (call.common_prefix_len == 0) return validate_key_lengths(call);
    throw_invalid("common_prefix_len is {}, legal: 0 (attn_type {} has no pages to share)",
                  call.common_prefix_len, to_string(call.config.attn_type));
  }
  const std::int64_t most = call.max_blocks * call.config.block_size;
  validate_bounds(call.seq_lens, call.seq_len_bounds, most);
  CommonAttentionMetadata batch = call.batch();
  std::vector<std::int32_t> lens = call.seq_lens;
  for (std::size_t r = 0; r < lens.size(); ++r)
    if (call.is_refused(r)) lens[r] = call.seq_len_bounds[r];
  batch.seq_lens = lens;
  const std::vector<std::int32_t> no_queries(call.query_start_loc.size(), 0);
  if (call.config.attn_type == AttentionType::kEncoderDecoder || call.packed) {
    // The queries are no tokens of the cache: its lengths stand for themselves.
    batch.query_start_loc = no_queries;
    batch.num_actual_tokens = 0;
  }
  validate_batch(batch, call.config.block_size, num_blocks);
  validate_prefix(call);
}

CommonAttentionMetadata BatchArrays::metadata() const {
  auto batch = CommonAttentionMetadata::of(query_start_loc, seq_lens, {});
  batch.block_table = block_table;
  batch.block_table_stride = max_blocks;
  for_each_list([](auto& list, const auto& own) { list = own; }, batch, *this);
  return batch;
}

CommonAttentionMetadata AttentionCall::batch() const {
  CommonAttentionMetadata batch = metadata();
  batch.num_actual_tokens += padding;
  batch.key_start_loc = key_start_loc;
  batch.slot_mapping = slot_mapping;
  if (direction.empty()) batch.causal = causal;
  return batch;
}

void BatchArrays::list(std::span<const RequestShape> requests, const AttentionConfig& config) {
  span_start_loc = tree_start_loc = {0};
  for (const RequestShape& request : requests) {
    if (config.use_directions) direction.push_back(request.direction);
    if (config.use_first_keys) first_keys.push_back(request.first_key);
    if (config.use_keep_keys) keep_keys.push_back(request.keep_keys);
    for (const KeySpan& span : request.spans) spans.insert(spans.end(), {span.first, span.end});
    span_start_loc.push_back(static_cast<std::int32_t>(spans.size() / 2));
    tree_parents.insert(tree_parents.end(), request.parents.begin(), request.parents.end());
    tree_start_loc.push_back(static_cast<std::int32_t>(tree_parents.size()));
  }
  if (spans.empty()) span_start_loc.clear();
  if (config.use_trees) return;
  tree_start_loc.clear();
  tree_parents.clear();
}

KVCacheLayout choose_layout(const AttentionBackend& backend, std::optional<KVCacheLayout> wanted,
                            const DeviceCapabilities* capabilities) {
  if (!wanted) wanted = get_kv_cache_layout();
  if (!wanted) {
    return capabilities != nullptr ? backend.preferred_layout(*capabilities)
                                   : backend.supported_layouts().front();
  }
  const auto reasons = backend.validate_layout(*wanted);
  if (!reasons.empty()) {
    throw_unsupported("{}", fmt::join(reasons, "; "));
  }
  return *wanted;
}

KVCache make_cache(const Context& context, const AttentionBackend& backend, KVCacheLayout layout,
                   const KVCacheSpec& spec, std::int64_t num_blocks) {
  const std::size_t page_bytes = spec.page_size_bytes();
  std::size_t bytes = 0;
  throw_invalid_if(
      __builtin_mul_overflow(page_bytes, to_size(std::max<std::int64_t>(num_blocks, 1)), &bytes),
      "num_blocks: {} pages of {} bytes overflow", num_blocks, page_bytes);
  return reshape_kv_cache(context.allocate(bytes), spec, backend, layout);
}

LogicalCache expected_cache(const AttentionCall& call) {
  LogicalCache cache = call.cache;
  store_rows(call, 0, call.key, cache.key, cache.key_scales);
  store_rows(call, 1, call.value, cache.value, cache.value_scales);
  return cache;
}

namespace {

/// What the batch says of its requests beyond lengths, as far as the layer looks at it.
void put_lists(const AttentionCall& call, oracle::AttentionCase& result) {
  for (const Direction each : call.direction)
    result.looks.push_back(static_cast<oracle::Looks>(each));
  result.first_keys = call.first_keys;
  result.keep_keys = call.keep_keys;
  result.span_cut = static_cast<oracle::SpanCut>(call.config.span_rule);
  for (std::size_t r = 0; r + 1 < call.tree_start_loc.size(); ++r)
    result.tree_parents.emplace_back(call.tree_parents.begin() + call.tree_start_loc[r],
                                     call.tree_parents.begin() + call.tree_start_loc[r + 1]);
  if (!call.config.use_spans) return;
  for (std::size_t r = 0; r + 1 < call.span_start_loc.size(); ++r) {
    for (std::int32_t i = call.span_start_loc[r]; i < call.span_start_loc[r + 1]; ++i) {
      const std::int32_t* span = &call.spans[2 * to_size(i)];
      result.spans.push_back({static_cast<std::int32_t>(r), span[0], span[1]});
    }
  }
}

/// Rows of a head's values as long as its keys, which is what the oracle knows: zeros after them.
std::vector<double> widened(const std::vector<double>& values, std::size_t from, std::size_t to) {
  std::vector<double> wide(values.size() / from * to);
  for (std::size_t i = 0; i < values.size(); ++i) wide[i / from * to + i % from] = values[i];
  return wide;
}

}  // namespace

oracle::AttentionCase oracle_case(const AttentionCall& call) {
  const AttentionConfig& config = call.config;
  oracle::AttentionCase result;
  result.num_heads = config.num_heads;
  result.num_kv_heads = config.num_kv_heads;
  result.head_size = config.head_size;
  result.causal = call.causal;
  result.query_start_loc = call.query_start_loc;
  result.seq_lens = call.seq_lens;
  put_lists(call, result);
  put_logit_options(config, {0, config.num_heads}, result);
  for (const std::byte entry : call.custom_mask) {
    result.custom_mask.push_back(std::to_integer<std::uint8_t>(entry));
  }
  result.custom_mask_stride = call.max_seq_len();
  result.query = decode_elements(config.dtype, call.query);
  if (config.contiguous_kv()) {
    result.key_start_loc = call.key_start_loc.empty() ? call.query_start_loc : call.key_start_loc;
    result.key_cache = decode_elements(config.dtype, call.key);
    result.value_cache = widened(decode_elements(config.dtype, call.value), row_width(config, 1),
                                 row_width(config, 0));
    return result;
  }
  result.block_size = config.block_size;
  result.block_table = call.block_table;
  result.max_blocks = call.max_blocks;
  const LogicalCache cache = expected_cache(call);
  result.key_cache = widened(call, 0, cache.key, cache.key_scales);
  result.value_cache = widened(widened(call, 1, cache.value, cache.value_scales),
                               row_width(config, 1), row_width(config, 0));
  return result;
}

}  // namespace clattn::cli
