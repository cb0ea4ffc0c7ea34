#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "program/common/attention_call.hpp"

namespace clattn::cli {

/// A kind of batch, named for what it makes the kernels do.
struct BatchFamily {
  std::string_view name;
  std::vector<RequestShape> requests;
  std::int32_t num_splits = 0;
  bool causal = true;
  bool scales_per_head = false;  ///< quantized caches: a factor per KV head, else per tensor
  /// Tokens, whole pages, that the histories of all requests begin with, in the same pages.
  std::int32_t common_prefix_len = 0;
  std::int32_t padding = 0;  ///< rows of the query behind the requests' tokens
  double size = 1;           ///< standard deviation of keys and values, times what int8 holds
};
std::vector<BatchFamily> batch_families();

/// A layer of these sizes and types.
AttentionConfig make_config(std::int32_t heads, std::int32_t kv_heads, std::int32_t head_size,
                            std::int32_t block_size, DType dtype, DType cache);

/// A value for each query head: falling slopes; or, where -inf is legal, logits small and large
/// against those of the keys, of which every fourth is -inf ("no sink").
std::vector<float> per_head_values(std::int32_t num_heads, bool minus_infinity);

/// A call with random tensors over shuffled pages: the history is in the cache, the new tokens are
/// to be stored, every slot that belongs to no token or to one before the request's first key is
/// NaN until then, every unused table entry out of range. Quantized caches have factors that are
/// powers of two, masks are random. Cross attention finds all of its keys in the cache, encoders
/// have no cache and as many keys as queries.
AttentionCall make_call(const BatchFamily& family, const AttentionConfig& config,
                        std::uint32_t seed);

/// The same of latent rows, whatever backend and layout are forced by the environment.
AttentionCall make_latent_call(const BatchFamily& family, const AttentionConfig& config,
                               std::uint32_t seed);

/// Types of queries and of a cache that has kernels of its own.
inline constexpr std::pair<DType, DType> kCacheTypes[] = {{DType::kF32, DType::kF32},
                                                          {DType::kF16, DType::kF16},
                                                          {DType::kBF16, DType::kBF16},
                                                          {DType::kF16, DType::kFp8E4M3},
                                                          {DType::kBF16, DType::kInt8}};
/// Those that most layers have.
constexpr bool is_representative(DType dtype, DType cache_dtype) {
  return dtype == cache_dtype && dtype != DType::kF32;
}

}  // namespace clattn::cli
