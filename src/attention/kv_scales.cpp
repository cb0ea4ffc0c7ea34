#include <algorithm>
#include <clattn/layer.hpp>
#include <cmath>

#include "base/error.hpp"

namespace clattn {

namespace {

/// The one value of a checkpoint's scale times `factor`, -1 when it holds none.
float single(std::span<const float> values, std::string_view name, float factor) {
  detail::throw_invalid_if(
      values.size() > 1,
      "Only support per-tensor scaling factor for fp8 KV cache: {} has {} values", name,
      values.size());
  if (values.empty()) return -1;
  const float value = values.front() * factor;
  detail::throw_invalid_if(!std::isfinite(value) || value == 0,
                           "{} is {}, legal: finite numbers > 0, or < 0 for not loaded", name,
                           value);
  return value;
}

}  // namespace

KVScales load_kv_scales(const LoadedKVScales& loaded, std::optional<DType> kv_cache_dtype) {
  const float factor = loaded.fnuz ? 2 : 1;
  const float k = single(loaded.k_scale, "k_scale", factor);
  const float v = single(loaded.v_scale, "v_scale", factor);
  const float q = single(loaded.q_scale, "q_scale", factor);
  const float prob = single(loaded.prob_scale, "prob_scale", factor);
  KVScales scales;
  if (q > 0) scales.q_scale = q;
  if (prob > 0) scales.prob_scale = prob;
  if (!kv_cache_dtype || !is_quantized(*kv_cache_dtype)) return scales;
  if (k > 0 && v > 0) {
    scales.k_scale = k;
    scales.v_scale = v;
  } else if (k > 0 || v > 0) {
    scales.k_scale = scales.v_scale = std::max(k, v);
  }
  if (scales.k_scale == 1 && scales.v_scale == 1 && kv_cache_dtype == DType::kFp8E4M3) {
    scales.warnings.emplace_back(
        "Using KV cache scaling factor 1.0 for fp8_e4m3. This may cause accuracy issues. Please "
        "make sure k/v_scale is available in the fp8 checkpoint.");
  }
  return scales;
}

}  // namespace clattn
