#pragma once

#include <clattn/attention.hpp>
#include <cstdint>
#include <span>

namespace clattn {

/// What the XFORMERS backend's builder makes (its build() returns one). Host arrays, valid until
/// the next build().
class XFormersMetadata : public AttentionMetadata {
 public:
  /// One side of the batch: rows of the whole batch's arrays, nothing copied. Empty when the side
  /// has no request.
  struct View {
    std::span<const std::int32_t> query_start_loc;  ///< [num_reqs + 1], not rebased
    std::span<const std::int32_t> seq_lens;         ///< [num_reqs]
    std::span<const std::int32_t> block_table;      ///< [num_reqs, block_table_stride]
    std::int32_t num_tokens = 0;
  };
  std::span<const std::int32_t> query_start_loc;  ///< [num_reqs + 1]
  std::span<const std::int32_t> seq_lens;         ///< [num_reqs]
  std::span<const std::int32_t>
      block_table;  ///< [num_reqs, block_table_stride]; 0 past a request's last page
  std::int64_t block_table_stride = 0;  ///< most pages of any request of the batch

  View decode_metadata() const { return view(0, split().num_decodes, split().num_decode_tokens); }
  View prefill_metadata() const {
    return view(split().num_decodes, split().num_prefills, split().num_prefill_tokens);
  }

 private:
  View view(std::int32_t first, std::int32_t count, std::int32_t tokens) const {
    if (count == 0) return {};
    const auto at = static_cast<std::size_t>(first);
    const auto n = static_cast<std::size_t>(count);
    const auto width = static_cast<std::size_t>(block_table_stride);
    return {query_start_loc.subspan(at, n + 1), seq_lens.subspan(at, n),
            block_table.subspan(at * width, n * width), tokens};
  }
};

}  // namespace clattn
