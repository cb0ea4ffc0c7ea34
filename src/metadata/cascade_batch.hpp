#pragma once

#include <clattn/cascade.hpp>
#include <cstdint>
#include <vector>

#include "base/checked.hpp"

namespace clattn::detail {

/// One level of a cascade as the batch that its builder takes: sequences instead of requests, and a
/// block table of their own pages. Allocates only while it grows.
class CascadeBatch {
 public:
  /// Throws kInvalidArgument unless the page lists fit together.
  void set_pages(const CascadeLevel& level, std::int32_t block_size);
  /// One sequence of all query tokens over the first `prefix_len` keys of a request. The batch must
  /// share them (validate_common_prefix).
  void set_prefix(const CommonAttentionMetadata& batch, std::int32_t block_size,
                  std::int32_t prefix_len);
  /// The requests without their first `prefix_len` keys; none left for a request without query
  /// tokens, which need not share them. Slots and causality are the batch's, whose arrays must
  /// outlive the use.
  void set_suffix(const CommonAttentionMetadata& batch, std::int32_t block_size,
                  std::int32_t prefix_len);

  /// Over this object's arrays, and those given to set_suffix().
  CommonAttentionMetadata batch() const;
  std::int32_t num_tokens() const { return query_start_loc_.back(); }
  bool causal() const { return causal_; }

 private:
  template <typename PagesOf>
  void take_pages(std::int32_t block_size, const PagesOf& pages_of);

  std::vector<std::int32_t> query_start_loc_ = {0}, seq_lens_, block_table_;
  std::int64_t stride_ = 0;
  std::span<const std::int64_t> slots_;
  bool causal_ = false;
};

}  // namespace clattn::detail
