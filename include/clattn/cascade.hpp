#pragma once

#include <clattn/attention.hpp>
#include <clattn/metadata.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace clattn {

/// What the choice between one pass and a shared-prefix cascade depends on.
struct CascadeQuery {
  std::int32_t common_prefix_len = 0;             ///< tokens that all requests share at their start
  std::span<const std::int32_t> query_lens = {};  ///< [num_reqs]
  std::int32_t num_query_heads = 0;               ///< a multiple of num_kv_heads
  std::int32_t num_kv_heads = 0;
  bool use_alibi = false;
  bool use_sliding_window = false;
  bool use_local_attention = false;
  std::int32_t num_sms = 0;  ///< compute units of the device, >= 1
};

/// vLLM's heuristic: no for prefixes below 256 tokens, fewer than 8 requests, ALiBi, windows or
/// chunks; else yes, except that a batch of single tokens with several query heads a KV head takes
/// it only if the waves of 128-key tiles are fewer than those of split decoding.
bool use_cascade_attention(const CascadeQuery& query);

/// Why layers of this configuration cannot cascade, one sentence each; empty = they can. ALiBi,
/// windows, chunks and masks need a key's position in its request, which a level does not know.
/// Soft caps, scales, quantized caches and sinks cascade.
std::vector<std::string> validate_cascade_configuration(const AttentionConfig& config);

}  // namespace clattn
