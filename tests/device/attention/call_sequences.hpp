#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <clattn/attention_backend.hpp>
#include <clattn/attention_functions.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "device/layer_model.hpp"
#include "oracle/oracle.hpp"

/// Sequences that attention() and paged_attention() are called with, and what must come of it.
namespace call_test {

using clattn::AttentionArguments;
using clattn::AttentionConfig;
using layer_test::random_values;

inline constexpr std::int32_t kHeads = 4, kKVHeads = 2, kDims = 32, kPage = 8;
inline constexpr std::size_t kRow = std::size_t{kHeads} * kDims,
                             kKVRow = std::size_t{kKVHeads} * kDims;
inline constexpr float kUntouched = -77;

inline AttentionConfig config() {
  return {.num_heads = kHeads,
          .num_kv_heads = kKVHeads,
          .head_size = kDims,
          .dtype = clattn::DType::kF32};
}

/// Sequences of so many query tokens and keys; a token may have no key at all.
struct Lengths {
  std::int32_t queries, keys;
};
inline const std::vector<Lengths> kLengths = {{5, 5}, {1, 70}, {3, 9}, {4, 2}, {0, 6}, {20, 33}};

inline std::vector<double> widened(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

/// Sequences on a device, and as the oracle has them.
struct Sequences : layer_test::Device {
  std::vector<std::int32_t> query_starts{0}, key_starts{0}, seq_lens;
  std::vector<float> query, key, value;
  clattn::Buffer q, k, v, out, lse;

  explicit Sequences(const std::shared_ptr<clattn::Context>& opened,
                     const std::vector<Lengths>& lengths = kLengths)
      : Device(opened) {
    for (const Lengths& one : lengths) {
      query_starts.push_back(query_starts.back() + one.queries);
      key_starts.push_back(key_starts.back() + one.keys);
      seq_lens.push_back(one.keys);
    }
    query = random_values(tokens() * kRow, 1);
    key = random_values(keys() * kKVRow, 2);
    value = random_values(keys() * kKVRow, 3);
    q = upload(query);
    k = upload(key);
    v = upload(value);
    out = upload(std::vector<float>(tokens() * kRow, kUntouched));
    lse = upload(std::vector<float>(tokens() * kHeads, kUntouched));
  }
  std::size_t tokens() const { return static_cast<std::size_t>(query_starts.back()); }
  std::size_t keys() const { return static_cast<std::size_t>(key_starts.back()); }

  /// Over a refilled output.
  AttentionArguments call() const {
    for (const clattn::Buffer& written : {out, lse})
      queue.fill(written, std::bit_cast<std::uint32_t>(kUntouched), 0, written.size_bytes());
    return {.query = {q.handle()},
            .key = {k.handle()},
            .value = {v.handle()},
            .output = {out.handle()},
            .query_start_loc = query_starts,
            .key_start_loc = key_starts,
            .lse = {lse.handle()}};
  }
  /// The call as the oracle takes it.
  oracle::AttentionCase exact(const AttentionConfig& layer, bool causal) const {
    oracle::AttentionCase made;
    made.num_heads = kHeads;
    made.num_kv_heads = kKVHeads;
    made.head_size = kDims;
    made.scale = layer.scale.value_or(1 / std::sqrt(float{kDims}));
    made.causal = causal;
    made.query_start_loc = query_starts;
    made.seq_lens = seq_lens;
    made.soft_cap = layer.logits_soft_cap;
    if (layer.sliding_window > 0) {
      made.window_left = layer.sliding_window - 1;
      made.window_right = layer.sliding_window - 1;
    } else {
      made.window_left = layer.window_left;
      made.window_right = layer.window_right;
    }
    made.chunk = layer.attention_chunk_size;
    made.alibi_slopes = widened(layer.alibi_slopes);
    made.sinks = widened(layer.sinks);
    made.key_start_loc = key_starts;
    made.query = widened(query);
    made.key_cache = widened(key);
    made.value_cache = widened(value);
    return made;
  }
  oracle::AttentionResult truth(const AttentionConfig& layer, bool causal,
                                const std::vector<std::uint8_t>& mask = {}) const {
    oracle::AttentionCase made = exact(layer, causal);
    made.custom_mask = mask;
    made.custom_mask_stride = mask.empty() ? 0 : static_cast<std::int64_t>(mask.size() / tokens());
    return oracle::attention(made, oracle::Element::kF32);
  }
  /// Output and LSE as the oracle has them.
  void expect(const oracle::AttentionResult& wanted) const {
    const std::vector<float> got = download(out), got_lse = download(lse);
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], wanted.out[i], wanted.allowed(i, false) + 2e-6) << "element " << i;
    for (std::size_t i = 0; i < got_lse.size(); ++i) {
      if (std::isinf(wanted.lse[i])) {
        ASSERT_EQ(got_lse[i], wanted.lse[i]) << "lse " << i;
      } else {
        ASSERT_NEAR(got_lse[i], wanted.lse[i], 2e-4) << "lse " << i;
      }
    }
  }
};

/// The keys of Sequences in pages of a cache, in an order of their own.
struct Paged {
  clattn::KVCache cache;
  std::vector<std::int32_t> rows, list, list_starts{0};

  explicit Paged(const Sequences& of) {
    AttentionConfig layer = config();
    layer.block_size = kPage;
    const auto backend = clattn::get_attn_backend(layer, &of.context->capabilities());
    std::int32_t pages = 0, widest = 0;
    for (const std::int32_t length : of.seq_lens) {
      pages += (length + kPage - 1) / kPage;
      widest = std::max(widest, (length + kPage - 1) / kPage);
    }
    cache = clattn::make_kv_cache(*of.context, of.queue, *backend, layer, pages);
    std::vector<float> memory(cache.buffer.size_bytes() / sizeof(float),
                              std::numeric_limits<float>::quiet_NaN());
    std::int32_t next = pages;
    for (std::size_t s = 0; s < of.seq_lens.size(); ++s) {
      const auto first = static_cast<std::ptrdiff_t>(list.size());
      for (std::int32_t at = 0; at < of.seq_lens[s]; at += kPage) list.push_back(--next);
      list_starts.push_back(static_cast<std::int32_t>(list.size()));
      rows.insert(rows.end(), list.begin() + first, list.end());
      rows.resize((s + 1) * static_cast<std::size_t>(widest), 1 << 20);
      for (std::int32_t t = 0; t < of.seq_lens[s]; ++t) {
        for (std::size_t e = 0; e < kKVRow; ++e) {
          const auto from = static_cast<std::size_t>(of.key_starts[s] + t) * kKVRow + e;
          const std::int64_t block = list[static_cast<std::size_t>(first + t / kPage)];
          const auto head = static_cast<std::int64_t>(e / kDims);
          const auto dim = static_cast<std::int64_t>(e % kDims);
          memory[static_cast<std::size_t>(cache.key_at(block, t % kPage, head, dim))] =
              of.key[from];
          memory[static_cast<std::size_t>(cache.value_at(block, t % kPage, head, dim))] =
              of.value[from];
        }
      }
    }
    of.queue.write(cache.buffer, std::as_bytes(std::span(memory)));
  }
  AttentionArguments call(const Sequences& of) const {
    AttentionArguments made = of.call();
    made.key = made.value = {};
    made.key_start_loc = {};
    made.seq_lens = of.seq_lens;
    made.block_table = rows;
    return made;
  }
};

/// Of sequences whose tokens are all in the cache.
inline const std::vector<Lengths> kCached = {{5, 5}, {1, 70}, {3, 9}, {0, 6}, {20, 33}};

}  // namespace call_test
