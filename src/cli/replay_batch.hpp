#pragma once

#include <clattn/metadata.hpp>
#include <cstdint>
#include <span>
#include <vector>

#include "cli/scheduler.hpp"

namespace clattn::cli {

/// A scheduled step as the arrays that a metadata builder reads. Memory is taken once for the
/// largest step.
class StepBatch {
 public:
  StepBatch(std::int32_t max_num_seqs, std::int64_t max_blocks_per_request,
            std::int32_t block_size);

  /// Lays the step's requests out in `order`: order[i] stands at place i.
  void assemble(const ScheduledStep& step, std::span<const std::int32_t> order);
  CommonAttentionMetadata view() const;

  std::int32_t num_reqs() const { return static_cast<std::int32_t>(requests_.size()); }
  std::int32_t num_tokens() const { return query_start_loc_.back(); }
  const ScheduledRequest& request(std::int32_t place) const {
    return requests_[static_cast<std::size_t>(place)];
  }
  std::int32_t first_token(std::int32_t place) const {
    return query_start_loc_[static_cast<std::size_t>(place)];
  }
  std::int32_t seq_len(std::int32_t place) const {
    return seq_lens_[static_cast<std::size_t>(place)];
  }
  /// Where the token at `position` of the request at `place` lies in the cache.
  std::int64_t slot(std::int32_t place, std::int32_t position) const;

 private:
  std::int64_t max_blocks_;
  std::int32_t block_size_;
  std::vector<ScheduledRequest> requests_;
  std::vector<std::int32_t> query_start_loc_;
  std::vector<std::int32_t> seq_lens_;
  std::vector<std::int32_t> num_computed_tokens_;
  std::vector<std::int32_t> block_table_;
};

}  // namespace clattn::cli
