// Plans for query lengths that only the device knows.
#include <algorithm>

#include "metadata/plan/planner.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

/// The item that will stand there in the metadata.
ClaWorkItem& item_in(const PlanOutput& output, std::int32_t item_at) {
  std::size_t c = 0;
  const auto index = [&] { return (item_at - output.items_at.at(c)) / kItemInts; };
  while (index() < 0 || index() >= std::ssize(output.items.at(c))) ++c;
  return output.items.at(c)[to_size(index())];
}

}  // namespace

ClaQueryBounds QueryBounds::open() {
  const std::int32_t request = request_++;
  const std::int32_t seq_len = batch_.seq_lens[to_size(request)];
  if (request >= run_end_) {
    run_begin_ = run_end_ = request;
    while (run_end_ < batch_.num_reqs && start(run_end_ + 1) - start(run_end_) <= most_) ++run_end_;
  }
  const std::int32_t begin = start(run_begin_), end = start(run_end_);
  return {begin, end, 0, std::min({most_, seq_len, end - begin}), seq_len, 0};
}

void take_query_lens(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                     const PlanCounts& counts, const PlanOutput& output) {
  const ClaSight sight = sight_of(config, batch.is_causal());
  for (const ClaSplit& planned : output.splits.first(to_size(counts.all_items()))) {
    const auto request = to_size(planned.request);
    const ClaSplit split =
        cla_narrow_tile(&planned, batch.query_start_loc[request], query_len_of(batch, request));
    const RequestRows widest =
        split.listed == 0 ? RequestRows{}
                          : widest_rows_of(config.lists, batch, planned.request, planned.query_len);
    const ClaRequestRows& rows = widest;  // what the device keeps of it
    const ClaCut cut = cla_cut_tile(&split, &sight, rows, batch.seq_lens[request]);
    item_in(output, split.item_at) =
        cla_item_of(&split, cut.q_pos, cut.keys, config.block_size, cut.num_splits);
    if (split.split > 0 || split.merge_at < 0) continue;
    const std::int32_t first = (split.merge_at - output.merges_at) / kMergeInts;
    for (std::int32_t token = 0; token < planned.q_count; ++token)
      output.merges[to_size(first + token)] = cla_merge_of(&split, token, cut.num_splits);
  }
}

}  // namespace clattn::detail
