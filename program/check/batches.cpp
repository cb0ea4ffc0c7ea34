#include "program/check/batches.hpp"

#include <algorithm>
#include <clattn/mla.hpp>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "oracle/row_scales.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {

std::vector<BatchFamily> batch_families() {
  return {
      {"decode", {{1, 1}, {1, 15}, {1, 16}, {1, 17}, {1, 130}, {1, 513}}},
      {"decode, 4 splits", {{1, 300}, {1, 9}, {1, 64}, {1, 1000}}, 4},
      {"decode, 2-16 tokens", {{4, 4}, {2, 61}, {16, 257}, {5, 700}}},
      {"prefill", {{33, 33}, {128, 128}, {17, 17}}},
      {"chunk over history", {{40, 150}, {64, 513}, {17, 65}}},
      {"mixed, some empty", {{1, 20}, {50, 50}, {0, 0}, {0, 33}, {1, 200}, {20, 90}, {3, 3}}},
      {"not causal", {{20, 60}, {1, 40}, {7, 7}}, 0, false},
  };
}

namespace {

constexpr std::int32_t kSparePages = 3;

/// Lengths and tensors; no cache yet.
AttentionCall make_tensors(const BatchFamily& family, const AttentionConfig& config,
                           std::uint32_t seed) {
  AttentionCall call;
  call.config = config;
  call.causal = family.causal && config.attn_type == AttentionType::kDecoder;
  call.num_splits = family.num_splits;
  call.padding = family.padding;
  call.query_start_loc = {0};
  for (const RequestShape& request : family.requests) {
    call.query_start_loc.push_back(call.query_start_loc.back() + request.query_len);
    call.seq_lens.push_back(config.contiguous_kv() ? request.query_len : request.seq_len);
  }
  call.list(family.requests, config);
  const std::size_t tokens = to_size(call.num_tokens());
  const std::size_t row = to_size(config.num_kv_heads) * to_size(config.head_size);
  call.query = random_elements(
      config.dtype, tokens * to_size(config.num_heads) * to_size(config.head_size), seed + 1);
  if (config.attn_type != AttentionType::kEncoderDecoder) {
    call.key = random_elements(config.dtype, tokens * row, seed + 2, family.size);
    const std::size_t values = row / to_size(config.head_size) * to_size(config.output_head_size());
    call.value = random_elements(config.dtype, tokens * values, seed + 3, family.size);
  }
  if (config.custom_mask) {
    std::mt19937 random(seed + 5);
    std::bernoulli_distribution visible(0.6);
    call.custom_mask.resize(tokens * to_size(call.max_seq_len()));
    for (std::byte& entry : call.custom_mask) entry = static_cast<std::byte>(visible(random));
  }
  call.output_scale = 0.25F;
  return call;
}

/// Factors of K, then of V, that spread the values of a quantized cache over its codes.
std::vector<float> make_scales(const AttentionConfig& config, bool per_head) {
  if (!is_quantized(config.cache_dtype()) || config.cache_format().scales_per_row()) return {};
  const float unit = config.cache_dtype() == DType::kInt8 ? 0x1p-5F : 0.5F;
  const std::size_t count = per_head ? to_size(config.num_kv_heads) : 1;
  std::vector<float> scales(2 * count);
  for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = i % 3 == 1 ? 2 * unit : unit;
  return scales;
}

/// Shuffled pages for all requests, and a table with a column too many. A common prefix stands in
/// the first request's pages.
void make_table(AttentionCall& call, std::uint32_t seed) {
  const std::int32_t block_size = call.config.block_size;
  const auto pages_of = [&](std::int32_t seq_len) { return ceil_div(seq_len, block_size); };
  std::int64_t num_pages = 0;
  for (const std::int32_t seq_len : call.seq_lens) {
    call.max_blocks = std::max<std::int64_t>(call.max_blocks, pages_of(seq_len) + 1);
    num_pages += pages_of(seq_len);
  }
  call.num_blocks = num_pages + kSparePages;
  const std::vector<std::int32_t> pages = shuffled_pages(call.num_blocks, seed);
  call.block_table.assign(call.seq_lens.size() * to_size(call.max_blocks), INT_MAX);
  auto next = pages.begin();
  for (std::size_t r = 0; r < call.seq_lens.size(); ++r) {
    const std::int32_t count = pages_of(call.seq_lens[r]);
    std::copy_n(next, count, &call.block_table[r * to_size(call.max_blocks)]);
    const std::int32_t shared = std::min(call.common_prefix_len / block_size, count);
    std::copy_n(call.block_table.begin(), shared, &call.block_table[r * to_size(call.max_blocks)]);
    next += count;
  }
}

/// NaN as the scale of every row, if the cache has such.
void poison_row_scales(AttentionCall& call) {
  if (!call.config.cache_format().scales_per_row()) return;
  const auto rows =
      to_size(call.num_blocks * call.config.block_size) * to_size(call.config.num_kv_heads);
  call.cache.key_scales.assign(rows, std::numeric_limits<float>::quiet_NaN());
  call.cache.value_scales = call.cache.key_scales;
}

/// Scales of a slot's rows that differ from head to head and from slot to slot.
void put_row_scales(AttentionCall& call, std::int64_t slot) {
  if (call.cache.key_scales.empty()) return;
  const float unit = call.config.cache_dtype() == DType::kInt8 ? 0x1p-5F : 0.5F;
  for (std::int32_t head = 0; head < call.config.num_kv_heads; ++head) {
    const std::size_t row = to_size(slot) * to_size(call.config.num_kv_heads) + to_size(head);
    call.cache.key_scales[row] = std::ldexp(unit, static_cast<int>(row % 3));
    call.cache.value_scales[row] = std::ldexp(unit, static_cast<int>(row % 4) - 3);
    if (call.config.cache_dtype() != DType::kUInt4x2) continue;
    for (float* scale : {&call.cache.key_scales[row], &call.cache.value_scales[row]})
      *scale = oracle::join_scale(
          {static_cast<double>(*scale), static_cast<std::uint32_t>((row * 7 + (slot & 3)) % 16)});
  }
}

/// The history's rows in a cache of poison, and the slots of the new tokens.
void make_cache_image(AttentionCall& call, double family_size, std::uint32_t seed) {
  const AttentionConfig& config = call.config;
  const std::size_t unit = to_size(config.num_kv_heads) * element_size_bytes(config.cache_dtype());
  const std::size_t row_bytes = unit * to_size(config.head_size);
  const std::size_t value_bytes = unit * to_size(value_width(config));
  const auto slots = to_size(call.num_blocks * config.block_size);
  const bool is_int4 = config.cache_dtype() == DType::kUInt4x2;
  const auto poison_of = [&](std::size_t size) {  // of 4 bits it is codes, too
    std::vector<std::byte> bytes = poisoned(size);
    if (is_int4)
      for (std::byte& code : bytes) code &= std::byte{15};
    return bytes;
  };
  const auto poison = poison_of(slots * row_bytes);
  call.cache = {poison, poison_of(slots * value_bytes)};
  poison_row_scales(call);
  const double spread = config.cache_dtype() == DType::kInt8 ? 16 : is_int4 ? 4 : 1;
  const double size = family_size * spread, mean = is_int4 ? 7.5 : 0;
  const std::vector<std::byte> history = random_elements(
      config.cache_dtype(), poison.size() / element_size_bytes(config.cache_dtype()), seed + 4,
      size, mean);
  const bool cross = config.attn_type == AttentionType::kEncoderDecoder;
  std::size_t next_row = 0;
  for (std::size_t r = 0; r < call.seq_lens.size(); ++r) {
    const std::int32_t stored =
        call.seq_lens[r] - (cross ? 0 : call.query_start_loc[r + 1] - call.query_start_loc[r]);
    const std::int32_t* table = &call.block_table[r * to_size(call.max_blocks)];
    for (std::int32_t p = 0; p < call.seq_lens[r]; ++p) {
      const std::int64_t slot =
          std::int64_t{table[p / config.block_size]} * config.block_size + p % config.block_size;
      if (p >= stored) {
        call.slot_mapping.push_back(slot);
        continue;
      }
      if (!call.first_keys.empty() && p < call.first_keys[r]) continue;  // may hold anything
      // Keys and values of one position differ: they start a row apart in the same random pool.
      std::memcpy(&call.cache.key[to_size(slot) * row_bytes], &history[next_row * row_bytes],
                  row_bytes);
      const std::size_t other = (next_row + 1) % (history.size() / row_bytes);
      std::memcpy(&call.cache.value[to_size(slot) * value_bytes], &history[other * row_bytes],
                  value_bytes);
      put_row_scales(call, slot);
      ++next_row;
    }
  }
}

}  // namespace

AttentionConfig make_config(std::int32_t heads, std::int32_t kv_heads, std::int32_t head_size,
                            std::int32_t block_size, DType dtype, DType cache) {
  return {.num_heads = heads,
          .num_kv_heads = kv_heads,
          .head_size = head_size,
          .block_size = block_size,
          .dtype = dtype,
          .kv_cache_dtype = cache};
}

std::vector<float> per_head_values(std::int32_t num_heads, bool minus_infinity) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  std::vector<float> values;
  for (std::int32_t h = 0; h < num_heads; ++h) {
    const float sink = h % 4 == 3 ? kNone : static_cast<float>(4 * (h % 4) - 3);
    values.push_back(minus_infinity ? sink : std::ldexp(1.0F, -1 - h));
  }
  return values;
}

AttentionCall make_call(const BatchFamily& family, const AttentionConfig& config,
                        std::uint32_t seed) {
  AttentionCall call = make_tensors(family, config, seed);
  if (config.contiguous_kv()) return call;
  call.scales = make_scales(config, family.scales_per_head);
  call.query_scale = 0.25F;
  call.common_prefix_len = family.common_prefix_len;
  make_table(call, seed);
  make_cache_image(call, family.size, seed);
  return call;
}

AttentionCall make_latent_call(const BatchFamily& family, const AttentionConfig& config,
                               std::uint32_t seed) {
  AttentionCall call = make_call(family, config, seed);
  call.backend = kMLABackendName;
  call.layout = KVCacheLayout::kNHD;
  call.value = call.key;
  call.cache.value = call.cache.key;
  if (!call.scales.empty()) call.scales[1] = call.scales[0];
  return call;
}

}  // namespace clattn::cli
