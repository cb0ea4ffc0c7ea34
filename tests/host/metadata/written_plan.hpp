#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "host/metadata_batch.hpp"
#include "metadata/plan/planner.hpp"

namespace test {

using clattn::detail::kMaxTileClasses;
using clattn::detail::PlanCounts;
using clattn::detail::PlannerConfig;

/// A written plan, one list of items per tile class.
struct Plan {
  PlanCounts counts;
  clattn::detail::PlanCuts cuts;
  std::vector<ClaWorkItem> items[kMaxTileClasses];
  std::vector<ClaMergeItem> merges;
  std::vector<ClaSplit> splits;  ///< under lengths_are_bounds
  std::vector<ClaListedRow> listed;
  std::vector<std::int32_t> gap_rows;
};

constexpr int kPoisonByte = 0xa5;

template <typename T>
bool is_poison(const T& value) {
  T poison;
  std::memset(&poison, kPoisonByte, sizeof(poison));
  return std::memcmp(&value, &poison, sizeof(poison)) == 0;
}

template <typename T>
void resize_with_poison(std::vector<T>& values, std::int32_t count) {
  values.resize(static_cast<std::size_t>(count) + 1);  // one guard element
  std::memset(values.data(), kPoisonByte, values.size() * sizeof(T));
}

/// False if the guard was written or an element was not.
template <typename T>
bool take_written(std::vector<T>& values) {
  const bool guarded = is_poison(values.back());
  values.pop_back();
  return guarded && std::none_of(values.begin(), values.end(), is_poison<T>);
}

constexpr std::int32_t kFirstPage = 1000;

/// pages_at of a test batch: any distinct numbers do.
inline std::vector<std::int32_t> pages_at_of(std::size_t num_reqs) {
  std::vector<std::int32_t> pages_at(num_reqs);
  std::iota(pages_at.begin(), pages_at.end(), kFirstPage);
  return pages_at;
}
inline std::int32_t request_of(const ClaWorkItem& item) {
  return item.pages_at - kFirstPage;
}

/// Where make_plan() says that item `index` of a class stands in the metadata, in ints.
inline std::int32_t at_of(std::size_t tile_class, std::int32_t index) {
  return static_cast<std::int32_t>(tile_class) << 27 | index * 8;
}

/// Where make_plan() says that the listed rows begin, counted in rows.
constexpr std::int32_t kListedAt = 77;
constexpr std::int32_t kGapRowsAt = 4321;  ///< the rows with gaps, in ints

/// Counts, then writes into poisoned memory of exactly that size. `problem` says what was wrong.
inline Plan make_plan(const PlannerConfig& config, const Batch& batch, std::string* problem) {
  const auto pages_at = pages_at_of(static_cast<std::size_t>(batch.num_reqs));
  const auto view = batch.view();
  const clattn::detail::AttentionPlan cut(config, view);
  Plan plan;
  plan.counts = cut.counts();
  plan.cuts = cut.cuts();
  clattn::detail::PlanOutput output;
  for (std::size_t c = 0; c < kMaxTileClasses; ++c) {
    resize_with_poison(plan.items[c], plan.counts.num_items[c]);
    output.items[c] = plan.items[c];
    output.items_at[c] = at_of(c, 0);
  }
  resize_with_poison(plan.merges, plan.counts.num_merges);
  output.merges = plan.merges;
  const std::int64_t splits = config.lengths_are_bounds ? plan.counts.all_items() : 0;
  resize_with_poison(plan.splits, static_cast<std::int32_t>(splits));
  output.splits = plan.splits;
  resize_with_poison(plan.listed, plan.counts.num_listed);
  output.listed = plan.listed;
  output.listed_at = kListedAt;
  resize_with_poison(plan.gap_rows, plan.counts.num_gap_ints);
  output.gap_rows = plan.gap_rows;
  output.gap_rows_at = kGapRowsAt;
  cut.write(pages_at, output);
  bool clean = take_written(plan.merges);
  clean = take_written(plan.splits) && clean;
  clean = take_written(plan.listed) && clean;
  clean = take_written(plan.gap_rows) && clean;
  for (auto& items : plan.items) clean = take_written(items) && clean;
  if (!clean) *problem = "an element was left unwritten or one past the end was written";
  return plan;
}

}  // namespace test
