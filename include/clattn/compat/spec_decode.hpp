#pragma once

// For speculative decoding written against vLLM's helpers that reshape queries; CLAttn's forward()
// takes the ragged tensor as it is.

#include <clattn/kv_cache.hpp>
#include <clattn/types.hpp>
#include <cstdint>

namespace CLATTN_API clattn {

/// Rows [batch_size, query_len, heads, head_size] of speculating requests: the same memory as
/// [batch_size * query_len, heads, head_size].
struct SpecDecodeTensor {
  TensorRef tensor = {};        ///< token t of request r is its token r * query_len + t
  std::int64_t batch_size = 0;  ///< requests
  std::int64_t query_len = 0;   ///< tokens of each request
  /// Of all requests.
  std::int64_t num_tokens() const { return batch_size * query_len; }
};

/// Views `num_tokens` tokens of a uniform batch as requests. The tokens must divide evenly. vLLM:
/// reshape_query_for_spec_decode.
SpecDecodeTensor reshape_query_for_spec_decode(const TensorRef& query, std::int64_t num_tokens,
                                               std::int64_t batch_size);

/// The inverse: the tokens as one ragged tensor of tensor.num_tokens() tokens. vLLM:
/// reshape_attn_output_for_spec_decode.
inline TensorRef reshape_attn_output_for_spec_decode(const SpecDecodeTensor& tensor) {
  return tensor.tensor;
}

}  // namespace clattn
