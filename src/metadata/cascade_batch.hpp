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
  /// tokens, which need not share them. Slots, causality and directions are the batch's, whose
  /// arrays must outlive the use; spans and trees are those behind the prefix. Throws
  /// kInvalidArgument for requests whose tree, or first key, hides keys of the prefix.
  void set_suffix(const CommonAttentionMetadata& batch, std::int32_t block_size,
                  std::int32_t prefix_len);

  /// Over this object's arrays, and those given to set_suffix().
  CommonAttentionMetadata batch() const;
  std::int32_t num_tokens() const { return query_start_loc_.back(); }
  bool causal() const { return causal_; }

 private:
  void take_lists(const CommonAttentionMetadata& batch, std::int32_t prefix_len);
  template <typename PagesOf>
  void take_pages(std::int32_t block_size, const PagesOf& pages_of);

  std::vector<std::int32_t> query_start_loc_ = {0}, seq_lens_, block_table_;
  std::int64_t stride_ = 0;
  std::span<const std::int64_t> slots_;
  std::span<const Direction> direction_;
  std::vector<std::int32_t> span_start_loc_, spans_, tree_start_loc_, tree_parents_;
  bool causal_ = false;
};

}  // namespace clattn::detail
