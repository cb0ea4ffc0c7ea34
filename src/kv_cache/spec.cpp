#include "kv_cache/spec.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "base/checked.hpp"
#include "base/names.hpp"

namespace clattn {

using detail::ceil_div, detail::checked_add, detail::checked_mul, detail::throw_invalid;
using detail::throw_invalid_if, detail::to_size;

namespace {

constexpr detail::Named<MambaCacheMode> kModes[] = {{MambaCacheMode::kNone, "none"},
                                                    {MambaCacheMode::kAlign, "align"},
                                                    {MambaCacheMode::kAll, "all"}};

}  // namespace

KVCacheSpec detail::page_spec(const AttentionConfig& config) {
  const bool narrow = !config.use_mla && config.head_size_v != config.head_size;
  return {.block_size = config.block_size,
          .num_kv_heads = config.num_kv_heads,
          .head_size = config.head_size,
          .dtype = config.cache_dtype(),
          .use_mla = config.use_mla,
          .head_size_v = narrow ? config.head_size_v : 0,
          .kv_quant_mode = config.cache_format().scales_per_row() ? KVQuantMode::kPerTokenHead
                                                                  : KVQuantMode::kNone};
}

detail::RowPage detail::row_page(std::int64_t rows, std::int64_t row_bytes, std::int64_t load) {
  constexpr std::int64_t kScale = sizeof(float);
  constexpr std::string_view kWhat = "KV cache: bytes of a page";
  const std::int64_t codes = checked_mul(rows, row_bytes, kWhat);
  const std::int64_t scales = checked_mul(rows, kScale, kWhat);
  const std::int64_t both = checked_add(checked_mul(codes, std::int64_t{2}, kWhat), scales, kWhat);
  if (scales % load == 0) return {codes, codes + scales, both};
  return {2 * codes, codes, both};
}

KVCacheSpec detail::whole_spec(KVCacheSpec spec) {
  spec.kind = KVCacheKind::kFull;
  spec.sliding_window = spec.attention_chunk_size = 0;
  return spec;
}

std::string_view to_string(MambaCacheMode mode) {
  return detail::row_of(kModes, mode, "mamba_cache_mode").name;
}

MambaCacheMode parse_mamba_cache_mode(std::string_view name) {
  return detail::parse_named(kModes, name, "mamba_cache_mode");
}

namespace {

void require_positive(std::int64_t value, std::string_view field) {
  if (value < 1) throw_invalid("KVCacheSpec: {} is {}, legal: >= 1", field, value);
}

/// Tokens of a request that must stay in the cache at once.
std::int64_t resident_tokens(const KVCacheSpec& spec, std::int64_t max_model_len,
                             std::int64_t max_num_batched_tokens, std::int64_t encoder_len) {
  const auto with_batch = [&](std::int32_t reach, std::string_view field, std::int64_t own) {
    require_positive(reach, field);
    return std::min(checked_add(reach - own, max_num_batched_tokens, "max_num_batched_tokens"),
                    max_model_len);
  };
  switch (spec.kind) {
    case KVCacheKind::kFull:
      return max_model_len;
    case KVCacheKind::kSlidingWindow:
      return with_batch(spec.sliding_window, "sliding_window", 1);
    case KVCacheKind::kChunkedLocal:
      return with_batch(spec.attention_chunk_size, "attention_chunk_size", 0);
    case KVCacheKind::kCross:
      return encoder_len;
    case KVCacheKind::kEncoderOnly:
    case KVCacheKind::kMamba:
      break;
  }
  return 0;
}

void check_states(const KVCacheSpec& spec) {
  const bool wanted = spec.kind == KVCacheKind::kMamba;
  const auto mode = to_string(spec.mamba_cache_mode);  // throws for none of the three
  throw_invalid_if(!wanted && spec.mamba_cache_mode != MambaCacheMode::kNone,
                   "KVCacheSpec: mamba_cache_mode is {}, legal: none (other kinds than kMamba)",
                   mode);
  throw_invalid_if(spec.num_speculative_blocks < 0 || (!wanted && spec.num_speculative_blocks > 0),
                   "KVCacheSpec: num_speculative_blocks is {}, legal: {}",
                   spec.num_speculative_blocks, wanted ? ">= 0" : "0 (other kinds than kMamba)");
  throw_invalid_if(spec.states.empty() == wanted, "KVCacheSpec: {} states, legal: {}",
                   spec.states.size(), wanted ? "at least 1 (kMamba)" : "0 (other kinds)");
  for (const StateTensor& state : spec.states)
    for (const std::int64_t extent : state.shape) require_positive(extent, "states: shape");
}

void check(const KVCacheSpec& spec) {
  require_positive(spec.block_size, "block_size");
  check_states(spec);
  if (spec.kind == KVCacheKind::kMamba) return;
  require_positive(spec.num_kv_heads, "num_kv_heads");
  require_positive(spec.head_size, "head_size");
  throw_invalid_if(spec.head_size_v < 0, "KVCacheSpec: head_size_v is {}, legal: >= 0",
                   spec.head_size_v);
  throw_invalid_if(
      spec.kv_quant_mode == KVQuantMode::kPerTokenHead && !is_quantized(spec.dtype),
      "KVCacheSpec: dtype is {}, legal: a type of a byte (kv_quant_mode kPerTokenHead)",
      to_string(spec.dtype));
  const std::int32_t codes = codes_per_element(spec.dtype);
  throw_invalid_if(codes > 1 && spec.kv_quant_mode != KVQuantMode::kPerTokenHead,
                   "KVCacheSpec: kv_quant_mode is kNone, legal with dtype {}: kPerTokenHead",
                   to_string(spec.dtype));
  throw_invalid_if(spec.head_size % codes != 0 || spec.head_size_v % codes != 0,
                   "KVCacheSpec: head_size is {}, head_size_v {}, legal with dtype {}: multiples "
                   "of {}",
                   spec.head_size, spec.head_size_v, to_string(spec.dtype), codes);
  if (!spec.use_mla) return;
  throw_invalid_if(spec.kind == KVCacheKind::kSlidingWindow,
                   "MLA is not supported for sliding window");
  throw_invalid_if(spec.num_kv_heads != 1, "KVCacheSpec: num_kv_heads is {}, legal: 1 (use_mla)",
                   spec.num_kv_heads);
  throw_invalid_if(spec.head_size_v != 0,
                   "KVCacheSpec: head_size_v is {}, legal: 0 (use_mla: V is part of K)",
                   spec.head_size_v);
}

/// Bytes of a page's K and V, or states, themselves.
std::size_t unpadded_page_bytes(const KVCacheSpec& spec) {
  if (spec.kind == KVCacheKind::kMamba) {
    std::size_t all = 0;
    for (const StateTensor& state : spec.states)
      all = checked_add(all, detail::state_bytes(state), "KVCacheSpec: page_size_bytes");
    return all;
  }
  const std::size_t numbers =
      to_size(spec.head_size) + (spec.use_mla ? 0 : to_size(spec.value_size()));
  std::size_t bytes =
      numbers / to_size(codes_per_element(spec.dtype)) * element_size_bytes(spec.dtype);
  if (spec.kv_quant_mode == KVQuantMode::kPerTokenHead) {
    bytes += (spec.use_mla ? 1 : 2) * sizeof(float);
  }
  for (const std::int32_t factor : {spec.block_size, spec.num_kv_heads}) {
    bytes = checked_mul(bytes, to_size(factor), "KVCacheSpec: page_size_bytes");
  }
  return bytes;
}

/// Throws unless a field, or what is worked out from some, is the same in all layers of a group.
template <typename Field>
void require_equal(std::span<const KVCacheSpec> specs, std::string_view name, Field field) {
  const auto of = [&](std::size_t layer) {
    return static_cast<std::int64_t>(std::invoke(field, specs[layer]));
  };
  for (std::size_t i = 1; i < specs.size(); ++i) {
    throw_invalid_if(of(i) != of(0),
                     "All layers in the same KV cache group must be the same. ({}: {} of layer {}, "
                     "{} of layer 0)",
                     name, of(i), i, of(0));
  }
}

/// Pages of states that a request holds at most.
std::int64_t pages_of_states(const KVCacheSpec& spec, std::int64_t max_model_len) {
  const std::int64_t drafts = spec.num_speculative_blocks;
  if (spec.mamba_cache_mode == MambaCacheMode::kAll)
    return ceil_div(max_model_len, std::int64_t{spec.block_size}) + drafts;
  return (spec.mamba_cache_mode == MambaCacheMode::kAlign ? 2 : 1) + drafts;
}

/// The one window or chunk that layers have, 0 if none has any.
std::int32_t merge_reach(std::span<const KVCacheSpec> specs, std::int32_t KVCacheSpec::*reach) {
  std::int32_t merged = 0;
  for (const KVCacheSpec& spec : specs) {
    throw_invalid_if(
        merged != 0 && spec.*reach != 0 && spec.*reach != merged,
        "All attention layers in the same KV cache group must have the same window size. ({} and "
        "{})",
        merged, spec.*reach);
    if (spec.*reach != 0) merged = spec.*reach;
  }
  return merged;
}

/// Throws unless a layer keeps the tokens that its group's spec says, in blocks of as many.
void require_same_tokens(const std::string& layer, const KVCacheSpec& own,
                         const KVCacheSpec& group) {
  const auto require = [&](std::string_view field, const auto& value, const auto& legal) {
    throw_invalid_if(value != legal, "KVCacheGroupSpec: layer '{}' has {} {}, legal: spec's {}",
                     layer, field, value, legal);
  };
  require("kind", to_string(own.kind), to_string(group.kind));
  require("block_size", own.block_size, group.block_size);
  if (group.kind == KVCacheKind::kFull) return;
  require("sliding_window", own.sliding_window, group.sliding_window);
  require("attention_chunk_size", own.attention_chunk_size, group.attention_chunk_size);
}

/// Pages of keys and values or of latent rows as large as `bytes`.
void enlarge(const std::string& layer, KVCacheSpec& spec, std::size_t bytes) {
  const std::size_t own = spec.page_size_bytes();
  if (spec.page_size_padded == 0 && bytes % own == 0) {
    const std::size_t tokens = bytes / own * to_size(spec.block_size);
    throw_invalid_if(tokens > std::numeric_limits<std::int32_t>::max(),
                     "KVCacheSpec: layer '{}': blocks of {} tokens, legal: up to 2^31 - 1", layer,
                     tokens);
    spec.block_size = static_cast<std::int32_t>(tokens);
    return;
  }
  throw_invalid_if(spec.use_mla,
                   "KVCacheSpec: layer '{}' has latent pages of {} bytes, legal: a divisor of the "
                   "largest page's {} (latent pages are not padded)",
                   layer, own, bytes);
  spec.page_size_padded = bytes;
}

}  // namespace

std::size_t detail::state_bytes(const StateTensor& state) {
  std::size_t bytes = element_size_bytes(state.dtype);
  for (const std::int64_t extent : state.shape)
    bytes = checked_mul(bytes, to_size(extent), "KVCacheSpec: bytes of a state");
  return bytes;
}

std::size_t KVCacheSpec::page_size_bytes() const {
  check(*this);
  const std::size_t bytes = unpadded_page_bytes(*this);
  if (page_size_padded == 0) return bytes;
  throw_invalid_if(page_size_padded < bytes,
                   "KVCacheSpec: page_size_padded is {}, legal: 0 or >= {} (the page's own bytes)",
                   page_size_padded, bytes);
  return page_size_padded;
}

KVCacheSpec KVCacheSpec::merge(std::span<const KVCacheSpec> specs) {
  if (specs.empty()) throw_invalid("KVCacheSpec: merge of no specs, legal: at least one");
  require_equal(specs, "kind", &KVCacheSpec::kind);
  require_equal(specs, "block_size", &KVCacheSpec::block_size);
  require_equal(specs, "num_kv_heads", &KVCacheSpec::num_kv_heads);
  require_equal(specs, "head_size", &KVCacheSpec::head_size);
  require_equal(specs, "dtype", &KVCacheSpec::dtype);
  require_equal(specs, "use_mla", &KVCacheSpec::use_mla);
  require_equal(specs, "head_size_v", &KVCacheSpec::value_size);
  require_equal(specs, "kv_quant_mode", &KVCacheSpec::kv_quant_mode);
  require_equal(specs, "page_size_padded", &KVCacheSpec::page_size_padded);
  require_equal(specs, "mamba_cache_mode", &KVCacheSpec::mamba_cache_mode);
  require_equal(specs, "num_speculative_blocks", &KVCacheSpec::num_speculative_blocks);
  for (const KVCacheSpec& spec : specs)
    throw_invalid_if(spec.states != specs[0].states,
                     "All layers in the same KV cache group must be the same. (states)");
  KVCacheSpec merged = specs[0];
  if (merged.kind != KVCacheKind::kFull) {
    require_equal(specs, "sliding_window", &KVCacheSpec::sliding_window);
    require_equal(specs, "attention_chunk_size", &KVCacheSpec::attention_chunk_size);
    return merged;
  }
  merged.sliding_window = merge_reach(specs, &KVCacheSpec::sliding_window);
  merged.attention_chunk_size = merge_reach(specs, &KVCacheSpec::attention_chunk_size);
  throw_invalid_if(
      merged.sliding_window != 0 && merged.attention_chunk_size != 0,
      "Model with both sliding window layers and chunked local attention layers is not "
      "supported.");
  return merged;
}

std::int64_t KVCacheSpec::max_admission_blocks_per_request(std::int64_t max_model_len,
                                                           std::int64_t max_num_batched_tokens,
                                                           std::int64_t encoder_len) const {
  check(*this);
  throw_invalid_if(
      max_model_len < 0 || max_num_batched_tokens < 0 || encoder_len < 0,
      "KVCacheSpec: max_model_len {}, max_num_batched_tokens {}, encoder_len {}; legal: >= 0",
      max_model_len, max_num_batched_tokens, encoder_len);
  const std::int64_t tokens =
      resident_tokens(*this, max_model_len, max_num_batched_tokens, encoder_len);
  if (kind == KVCacheKind::kMamba) return pages_of_states(*this, max_model_len);
  std::int64_t pages = ceil_div(tokens, std::int64_t{block_size});
  // A window may begin inside a block, so it can touch one block more than its length needs.
  if (kind == KVCacheKind::kSlidingWindow) ++pages;
  return pages;
}

std::size_t KVCacheSpec::max_memory_usage_bytes(std::int64_t max_model_len,
                                                std::int64_t max_num_batched_tokens,
                                                std::int64_t encoder_len) const {
  const std::size_t page_bytes = page_size_bytes();
  const auto pages =
      to_size(max_admission_blocks_per_request(max_model_len, max_num_batched_tokens, encoder_len));
  return checked_mul(pages, page_bytes, "KVCacheSpec: max_memory_usage_bytes");
}

const KVCacheSpec& KVCacheGroupSpec::spec_of(const std::string& layer) const {
  for (const auto& [name, own] : layer_specs) {
    throw_invalid_if(std::ranges::find(layer_names, name) == layer_names.end(),
                     "KVCacheGroupSpec: layer_specs has a layer '{}', legal: layer_names", name);
    require_same_tokens(name, own, spec);
  }
  const auto own = layer_specs.find(layer);
  return own == layer_specs.end() ? spec : own->second;
}

std::size_t KVCacheGroupSpec::page_size_bytes() const {
  std::size_t all = 0;
  for (const std::string& layer : layer_names)
    all = checked_add(all, spec_of(layer).page_size_bytes(), "KVCacheGroupSpec: page_size_bytes");
  return all;
}

std::size_t KVCacheGroupSpec::max_memory_usage_bytes(std::int64_t max_model_len,
                                                     std::int64_t max_num_batched_tokens,
                                                     std::int64_t encoder_len) const {
  const std::size_t page_bytes = page_size_bytes();  // checks that layers need equally many pages
  const auto pages = to_size(
      spec.max_admission_blocks_per_request(max_model_len, max_num_batched_tokens, encoder_len));
  return checked_mul(pages, page_bytes, "KVCacheGroupSpec: max_memory_usage_bytes");
}

void unify_kv_cache_spec_page_size(std::map<std::string, KVCacheSpec>& specs) {
  std::size_t keys = 0, states = 0;  // the largest pages of both sorts
  for (const auto& [layer, spec] : specs) {
    std::size_t& largest = spec.kind == KVCacheKind::kMamba ? states : keys;
    largest = std::max(largest, spec.page_size_bytes());
  }
  const std::size_t bytes =
      keys == 0 ? states
                : checked_mul(keys, std::max(ceil_div(states, keys), std::size_t{1}),
                              "KVCacheSpec: page_size_bytes");
  std::map<std::string, KVCacheSpec> unified = specs;
  for (auto& [layer, spec] : unified) {
    if (spec.page_size_bytes() == bytes) continue;
    if (spec.kind == KVCacheKind::kMamba)
      spec.page_size_padded = bytes;
    else
      enlarge(layer, spec, bytes);
  }
  specs = std::move(unified);
}

}  // namespace clattn
