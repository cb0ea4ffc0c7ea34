#include <algorithm>
#include <clattn/kv_cache.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {

using detail::ceil_div;
using detail::checked_add;
using detail::checked_mul;
using detail::throw_invalid;

namespace {

void require_positive(std::int64_t value, std::string_view field) {
  if (value < 1) throw_invalid("KVCacheSpec: {} is {}, legal: >= 1", field, value);
}

/// Tokens of a request that must stay in the cache at once.
std::int64_t resident_tokens(const KVCacheSpec& spec, std::int64_t max_model_len,
                             std::int64_t max_num_batched_tokens, std::int64_t encoder_len) {
  const auto bounded = [&](std::int64_t tokens) {
    return std::min(checked_add(tokens, max_num_batched_tokens, "max_num_batched_tokens"),
                    max_model_len);
  };
  switch (spec.kind) {
    case KVCacheKind::kFull:
      return max_model_len;
    case KVCacheKind::kSlidingWindow:
      return bounded(spec.sliding_window - 1);
    case KVCacheKind::kChunkedLocal:
      return bounded(spec.attention_chunk_size);
    case KVCacheKind::kCross:
      return encoder_len;
    case KVCacheKind::kEncoderOnly:
      break;
  }
  return 0;
}

}  // namespace

std::size_t KVCacheSpec::page_size_bytes() const {
  require_positive(block_size, "block_size");
  require_positive(num_kv_heads, "num_kv_heads");
  require_positive(head_size, "head_size");
  std::size_t bytes = 2 * element_size_bytes(dtype);
  for (const std::int32_t factor : {block_size, num_kv_heads, head_size}) {
    bytes = checked_mul(bytes, static_cast<std::size_t>(factor), "KVCacheSpec: page_size_bytes");
  }
  return bytes;
}

std::size_t KVCacheSpec::max_memory_usage_bytes(std::int64_t max_model_len,
                                                std::int64_t max_num_batched_tokens,
                                                std::int64_t encoder_len) const {
  const std::size_t page_bytes = page_size_bytes();
  if (kind == KVCacheKind::kSlidingWindow) require_positive(sliding_window, "sliding_window");
  if (kind == KVCacheKind::kChunkedLocal) {
    require_positive(attention_chunk_size, "attention_chunk_size");
  }
  if (max_model_len < 0 || max_num_batched_tokens < 0 || encoder_len < 0) {
    throw_invalid(
        "KVCacheSpec: max_model_len {}, max_num_batched_tokens {}, encoder_len {}; legal: >= 0",
        max_model_len, max_num_batched_tokens, encoder_len);
  }
  const std::int64_t tokens =
      resident_tokens(*this, max_model_len, max_num_batched_tokens, encoder_len);
  std::int64_t pages = ceil_div(tokens, std::int64_t{block_size});
  // A window may begin inside a block, so it can touch one block more than its length needs.
  if (kind == KVCacheKind::kSlidingWindow) ++pages;
  return checked_mul(static_cast<std::size_t>(pages), page_bytes,
                     "KVCacheSpec: max_memory_usage_bytes");
}

}  // namespace clattn
