#pragma once

#include <algorithm>
#include <vector>

#include "host/metadata/plan_checker.hpp"

namespace test {

/// What a device makes of a split, once it has the lengths of `batch`.
struct SplitOfLengths {
  ClaSplit split;
  ClaCut cut;
  SplitOfLengths(const PlannerConfig& config, const Batch& batch, const ClaSplit& planned)
      : split(planned) {
    const auto request = static_cast<std::size_t>(planned.request);
    const ClaSight sight = clattn::detail::sight_of(config, batch.causal);
    if (config.most_query_len > 0) {
      const std::int32_t begin = batch.query_start_loc[request];
      split = cla_narrow_tile(&planned, begin, batch.query_start_loc[request + 1] - begin);
    }
    cut = cla_cut_tile(&split, &sight, {}, batch.seq_lens[request]);
  }
  ClaWorkItem item(std::int32_t block_size) const {
    return cla_item_of(&split, cut.q_pos, cut.keys, block_size, cut.num_splits);
  }
};

/// What a device makes of a plan by bounds, once it has the lengths of `batch`: without the items
/// and merges that these do not need, partial rows numbered anew.
inline Plan plan_of_lengths(const PlannerConfig& config, const Batch& batch, Plan plan) {
  std::vector<std::int32_t> rows;
  for (const ClaSplit& planned : plan.splits) {
    const SplitOfLengths made(config, batch, planned);
    const ClaSplit& split = made.split;
    ClaWorkItem item = made.item(config.block_size);
    if (split.split >= made.cut.num_splits) item.q_count = 0;
    for (int i = 0; item.partial_row >= 0 && i < item.q_count; ++i)
      rows.push_back(item.partial_row + i);
    plan.items[split.item_at >> 27].at(static_cast<std::size_t>(split.item_at % (1 << 27) / 8)) =
        item;
    for (int i = 0; split.merge_at >= 0 && split.split == 0 && i < planned.q_count; ++i) {
      plan.merges.at(static_cast<std::size_t>(split.merge_at / 4 + i)) =
          cla_merge_of(&split, i, made.cut.num_splits);
    }
  }
  std::sort(rows.begin(), rows.end());
  const auto number = [&](std::int32_t row) {
    const auto place = std::lower_bound(rows.begin(), rows.end(), row);
    return static_cast<std::int32_t>(place - rows.begin());
  };
  for (std::size_t c = 0; c < kMaxTileClasses; ++c) {
    auto& items = plan.items[c];
    std::erase_if(items, [](const ClaWorkItem& item) { return item.q_count == 0; });
    for (ClaWorkItem& item : items) {
      if (item.partial_row >= 0) item.partial_row = number(item.partial_row);
    }
    std::sort(items.begin(), items.end(), [&](const ClaWorkItem& a, const ClaWorkItem& b) {
      return place_of(config, c, a) < place_of(config, c, b);
    });
  }
  std::erase_if(plan.merges, [](const ClaMergeItem& merge) { return merge.num_splits == 0; });
  for (ClaMergeItem& merge : plan.merges) merge.partial_row = number(merge.partial_row);
  plan.counts.num_partial_rows = static_cast<std::int64_t>(rows.size());
  return plan;
}

}  // namespace test
