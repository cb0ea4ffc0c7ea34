#include "cli/replay_batch.hpp"

#include <algorithm>
#include <limits>

namespace clattn::cli {

StepBatch::StepBatch(std::int32_t max_num_seqs, std::int64_t max_blocks_per_request,
                     std::int32_t block_size)
    : max_blocks_(max_blocks_per_request), block_size_(block_size) {
  const auto rows = static_cast<std::size_t>(max_num_seqs);
  requests_.reserve(rows);
  query_start_loc_.reserve(rows + 1);
  seq_lens_.reserve(rows);
  num_computed_tokens_.reserve(rows);
  // Entries past a request's blocks hold no legal block, at first, and stale ones later: nobody may
  // use them.
  block_table_.assign(rows * static_cast<std::size_t>(max_blocks_),
                      std::numeric_limits<std::int32_t>::max());
}

void StepBatch::assemble(const ScheduledStep& step, std::span<const std::int32_t> order) {
  requests_.clear();
  seq_lens_.clear();
  num_computed_tokens_.clear();
  query_start_loc_.assign(1, 0);
  auto row = block_table_.begin();
  for (const std::int32_t index : order) {
    const ScheduledRequest& scheduled = step.requests[static_cast<std::size_t>(index)];
    requests_.push_back(scheduled);
    query_start_loc_.push_back(query_start_loc_.back() + scheduled.num_new);
    seq_lens_.push_back(scheduled.num_computed + scheduled.num_new);
    num_computed_tokens_.push_back(scheduled.num_computed);
    std::ranges::copy(scheduled.request->blocks, row);
    row += max_blocks_;
  }
}

CommonAttentionMetadata StepBatch::view() const {
  CommonAttentionMetadata batch;
  batch.query_start_loc = query_start_loc_;
  batch.seq_lens = seq_lens_;
  batch.num_computed_tokens = num_computed_tokens_;
  batch.num_reqs = num_reqs();
  batch.num_actual_tokens = num_tokens();
  for (const ScheduledRequest& request : requests_) {
    batch.max_query_len = std::max(batch.max_query_len, request.num_new);
  }
  batch.block_table = {block_table_.data(),
                       requests_.size() * static_cast<std::size_t>(max_blocks_)};
  batch.block_table_stride = max_blocks_;
  return batch;
}

std::int64_t StepBatch::slot(std::int32_t place, std::int32_t position) const {
  const auto block = static_cast<std::size_t>(position / block_size_);
  return std::int64_t{request(place).request->blocks[block]} * block_size_ + position % block_size_;
}

}  // namespace clattn::cli
