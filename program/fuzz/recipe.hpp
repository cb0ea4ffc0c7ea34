#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "program/check/batches.hpp"
#include "program/common/attention_call.hpp"

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
/// hold their queries and the common prefix, one query token a request for x-packed caches,
/// fp8_products over e4m3 caches only, lists of the batch for layers that take them, in cascades
/// only what these take.
void normalise(Recipe& recipe);

/// The call, with its tensors.
AttentionCall make_call(const Recipe& recipe);

/// In one line, with what differs from the defaults: the layer, and the call of it.
std::string describe_layer(const Recipe& recipe);
std::string describe_batch(const Recipe& recipe);
/// Of what differs from the defaults.
std::vector<std::string_view> names_of_options(const Recipe& recipe);

/// What random cases are drawn from.
struct DrawOptions {
  std::uint32_t seed = 1;
  std::int32_t most_tokens = 400;             ///< keys of a batch, of all its requests together
  KernelFamily family = KernelFamily::kAuto;  ///< kAuto: mostly that, now and then one by name
  /// So many cases in a row are calls of one layer: compiling its kernels takes longer than they
  /// do.
  std::uint64_t layer_calls = 8;
};

/// Case `index`, a function of these arguments alone.
Recipe draw(const DrawOptions& options, std::uint64_t index);

/// A simpler recipe that fails, too: one change after the other is kept if `fails` still holds,
/// until none is or `most_trials` were made. Fewer and shorter requests, options off, smaller
/// heads.
Recipe shrink(Recipe recipe, const std::function<bool(const Recipe&)>& fails, int most_trials);

}  // namespace clattn::cli
