#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/check/batches.hpp"
#include "cli/common/attention_call.hpp"

// Random cases of `clattn fuzz`, as what they are made from: small enough to change one thing and
// make the call again.

namespace clattn::cli {

enum class CacheOrder : std::uint8_t {
  kPages,   ///< keys and values by the backends' layouts, or (encoder types) none at all
  kPacked,  ///< x-packed pairs
  kLatent,  ///< latent rows: config has one KV head of kv_lora_rank + rope_dim
};

/// Everything that decides one call.
struct Recipe {
  CacheOrder order = CacheOrder::kPages;
  AttentionConfig config;
  BatchFamily batch;
  PlanOptions plan;
  std::string backend;                  ///< "" = the selector's choice
  std::optional<KVCacheLayout> layout;  ///< nullopt = the backend's preference
  bool stores = true;    ///< the call writes its tokens; else they are in the cache already
  int repeat = 1;        ///< launches over the same inputs
  std::uint32_t seed{};  ///< of the tensors
};

/// Makes what does not fit fit, after a draw or a change: a value for each head, sequences that
/// hold their queries and the common prefix, one query token a request for x-packed caches.
void normalise(Recipe& recipe);

/// The call, with its tensors.
AttentionCall make_call(const Recipe& recipe);

/// In one line, with what differs from the defaults: the layer, and the call of it.
std::string describe_layer(const Recipe& recipe);
std::string describe_batch(const Recipe& recipe);
/// Of what differs from the defaults.
std::vector<std::string_view> names_of_options(const Recipe& recipe);

}  // namespace clattn::cli
