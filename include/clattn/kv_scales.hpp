#pragma once

// A checkpoint's scales of quantized caches.

#include <clattn/layer.hpp>
#include <clattn/types.hpp>
#include <optional>
#include <string>
#include <vector>

namespace CLATTN_API clattn {

/// Per-tensor scales on the host: real = stored * scale.
struct KVScales {
  float k_scale = 1;                       ///< of K
  float v_scale = 1;                       ///< of V
  float q_scale = 1;                       ///< of Q
  float prob_scale = 1;                    ///< of the probabilities
  std::vector<std::string> warnings = {};  ///< for the engine's log
  bool operator==(const KVScales&) const = default;
};

/// vLLM's BaseKVCacheMethod: which scales a cache of `kv_cache_dtype` gets from what a checkpoint
/// holds. In caches that are not quantised ("auto" included) K and V get 1. Otherwise both are used
/// as loaded; if only one was, it serves for both; if none was, both are 1. q and prob are as
/// loaded, else 1. FNUZ doubles what was loaded. Throws kInvalidArgument for more than one value,
/// and for values that are 0 or not finite.
KVScales load_kv_scales(const LoadedKVScales& loaded, std::optional<CacheFormat> kv_cache_dtype);

}  // namespace clattn
