#pragma once

#include <algorithm>
#include <vector>

#include "host/metadata/plan_checker.hpp"

namespace test {

/// What a device makes of a plan by bounds, once it has the lengths of `batch`: without the items
/// and merges that these do not need, partial rows numbered anew.
inline Plan plan_of_lengths(const PlannerConfig& config, const Batch& batch, Plan plan) {
  const ClaSight sight = clattn::detail::sight_of(config, batch.causal);
  std::vector<std::int32_t> rows;
  for (const ClaSplit& split : plan.splits) {
    const std::int32_t length = batch.seq_lens[static_cast<std::size_t>(split.request)];
    const std::int32_t q_pos = length - split.behind;
    const ClaTileKeys keys = cla_tile_keys(&sight, q_pos, split.q_count, length);
    const int splits = cla_num_splits(&split, cla_pages_of(keys.count, config.block_size));
    ClaWorkItem item = cla_item_of(&split, q_pos, keys, config.block_size, splits);
    if (split.split >= splits) item.q_count = 0;
    for (int i = 0; item.partial_row >= 0 && i < item.q_count; ++i)
      rows.push_back(item.partial_row + i);
    plan.items[split.item_at >> 27].at(static_cast<std::size_t>(split.item_at % (1 << 27) / 8)) =
        item;
    for (int i = 0; split.merge_at >= 0 && split.split == 0 && i < split.q_count; ++i) {
      plan.merges.at(static_cast<std::size_t>(split.merge_at / 4 + i)) =
          cla_merge_of(&split, i, splits);
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
