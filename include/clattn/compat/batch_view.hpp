#pragma once

// For backends whose metadata shows decodes and prefills apart, as vLLM's FlashInfer and xFormers
// backends do; engines take AttentionMetadata (attention.hpp).

#include <clattn/attention.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>

namespace CLATTN_API clattn {

/// One side of a step's batch, its decodes or its prefills: parts of the whole batch's arrays,
/// nothing copied. Empty when the side has no query token.
struct BatchView {
  std::int32_t num_reqs = 0;       ///< requests
  std::int32_t num_tokens = 0;     ///< query tokens
  std::int32_t max_query_len = 0;  ///< the most of any request
  std::int32_t max_seq_len = 0;    ///< the most of any request, in tokens
  /// [num_reqs + 1], not rebased: query_start_loc[0] is the side's first token in the batch.
  std::span<const std::int32_t> query_start_loc = {};
  std::span<const std::int32_t> seq_lens = {};      ///< [num_reqs]
  std::span<const std::int64_t> slot_mapping = {};  ///< [num_tokens]
};

/// What the built-in backends' metadata classes share. Host arrays, valid until the next build().
class BatchMetadata : public AttentionMetadata {
 public:
  std::span<const std::int32_t> query_start_loc;  ///< [num_reqs + 1]
  std::span<const std::int32_t> seq_lens;         ///< [num_reqs]

 protected:
  /// Throws kUnsupported if decodes and prefills are interleaved.
  BatchView decodes() const {
    return view(decodes_at_, split_.num_decode_tokens, split_.num_decodes);
  }
  /// Throws as decodes().
  BatchView prefills() const {
    return view(prefills_at_, split_.num_prefill_tokens, split_.num_prefills);
  }
  /// Rows [first, first + count) of an array with `width` elements a request.
  template <typename T>
  static std::span<T> rows(std::span<T> array, std::int32_t first, std::int32_t count,
                           std::int64_t width = 1) {
    return array.subspan(static_cast<std::size_t>(first * width),
                         static_cast<std::size_t>(count * width));
  }

 private:
  BatchView view(std::int32_t first, std::int32_t tokens, std::int32_t count) const;
};

}  // namespace clattn
