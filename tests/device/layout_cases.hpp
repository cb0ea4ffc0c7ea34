#pragma once

#include <gtest/gtest.h>
#include <clattn/attn_utils.hpp>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "device/cache_blocks.hpp"

/// What tests share whose kernels care how the cache lies: decode_ring.cl, tensor maps.
namespace layout_test {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using block_test::backend_named;
using clattn::KVCacheLayout;

/// Decodes and prefills whose lengths end inside vectors of keys, runs of 16, pages and tiles.
inline CaseSpec mixed_batch(KVCacheLayout layout, std::int32_t head_size) {
  CaseSpec spec;
  spec.layout = layout;
  spec.config.num_kv_heads = 2;
  spec.config.num_heads = 8;
  spec.config.head_size = head_size;
  spec.config.block_size = 16;
  spec.requests = {{1, 0}, {1, 130}, {4, 61}, {35, 170}, {19, 0}};
  return spec;
}

/// KV heads and query heads of each.
inline const std::vector<std::pair<std::int32_t, std::int32_t>> kHeads = {
    {1, 5}, {9, 2}, {2, 71}, {129, 1}};

inline std::vector<float> per_head(const CaseSpec& spec, float first) {
  std::vector<float> values;
  for (std::int32_t h = 0; h < spec.config.num_heads; ++h)
    values.push_back(first / static_cast<float>(1 << h));
  return values;
}

struct Option {
  const char* name;
  void (*add)(CaseSpec&);
};
inline void PrintTo(const Option& option, std::ostream* out) {
  *out << option.name;
}

/// Windows and chunks begin inside a vector and a run of keys.
inline const std::vector<Option> kOptions = {
    {"window", [](CaseSpec& s) { s.config.sliding_window = 37; }},
    {"unequal sides",
     [](CaseSpec& s) {
       s.config.window_left = 36;
       s.config.window_right = 5;
       s.causal = false;
     }},
    {"chunks", [](CaseSpec& s) { s.config.attention_chunk_size = 21; }},
    {"lookback",
     [](CaseSpec& s) {
       s.config.attention_chunk_size = 21;
       s.config.chunk_lookback = 1;
     }},
    {"alibi, soft cap, sinks",
     [](CaseSpec& s) {
       s.config.alibi_slopes = per_head(s, 0.5F);
       s.config.logits_soft_cap = 2.5F;
       s.config.sinks = per_head(s, 9.0F);
     }},
    {"mask in a window",
     [](CaseSpec& s) {
       s.config.custom_mask = true;
       s.config.sliding_window = 50;
     }},
    {"the last token overflows",
     [](CaseSpec& s) {
       s.last_token_overflows = true;
       s.requests = {{2, 40}, {7, 20}, {33, 0}, {70, 3}, {200, 150}};
     }},
    {"not causal", [](CaseSpec& s) { s.causal = false; }},
};

/// Adds an option; what no query sees is NaN, unless one token overflows.
inline void apply(const Option& option, std::int32_t splits, CaseSpec& spec) {
  spec.num_splits = splits;
  option.add(spec);
  spec.unseen_is_nan = !spec.last_token_overflows && !spec.first_token_overflows;
}

/// Judges the case on a device that reads its layout.
inline CaseResult expect_right(const std::shared_ptr<clattn::Context>& context, CaseSpec spec) {
  std::uint32_t next = 1;
  for (attention_test::Request& request : spec.requests) request.identity = next++;
  CaseResult result = attention_test::run_case(context, spec);
  EXPECT_EQ(result.fault, "") << describe(spec);
  EXPECT_LE(result.worst_share, 1.0) << describe(spec) << "\n " << result.worst_place;
  return result;
}

/// What a layer with the kernels of GPUs says when such a cache is bound to it, not at its first
/// forward(). It has to take another cache afterwards.
inline std::string bind_refusal(const std::shared_ptr<clattn::Context>& context,
                                KVCacheLayout layout) {
  clattn::LayerRegistry layers;
  clattn::AttentionOptions options;
  options.prefix = "layers.0";
  options.config.num_heads = 2;
  options.config.head_size = 64;
  options.config.block_size = 16;
  options.config.kernel_family = clattn::KernelFamily::kGpu;
  clattn::Attention layer(context, layers, options);
  const clattn::KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
  const clattn::Buffer memory = context->allocate(spec.page_size_bytes());
  const auto bind = [&](KVCacheLayout order) {
    layer.bind_kv_cache(reshape_kv_cache(memory, spec, backend_named("FLASHINFER"), order));
  };
  const std::string text = test::error_text([&] { bind(layout); }, clattn::ErrorCode::kUnsupported);
  EXPECT_EQ(layer.kv_cache(), nullptr);
  bind(KVCacheLayout::kNHD);
  EXPECT_NE(layer.kv_cache(), nullptr);
  return text;
}

}  // namespace layout_test
