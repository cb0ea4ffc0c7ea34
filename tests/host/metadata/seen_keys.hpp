#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "host/metadata_batch.hpp"
#include "metadata/plan/planner.hpp"

namespace test {

/// The query at a position of a request, and which keys it sees by what the batch's lists say: the
/// rules one by one, of each key by itself.
class LookingRow {
 public:
  LookingRow(const clattn::detail::PlannerConfig& config, const Batch& batch, std::int32_t request,
             std::int64_t position)
      : config_(config), batch_(batch), r_(static_cast<std::size_t>(request)), p_(position) {
    const bool all_back = batch.causal && !config.bidirectional;
    direction_ = all_back ? clattn::Direction::kCausal : clattn::Direction::kBothWays;
    if (config.lists.directions && !batch.direction.empty()) direction_ = batch.direction[r_];
    const std::int32_t queries = batch.query_start_loc[r_ + 1] - batch.query_start_loc[r_];
    first_new_ = batch.seq_lens[r_] - queries;
  }

  bool sees(std::int64_t key) const {
    using clattn::SpanRule;
    if (key < 0 || key >= batch_.seq_lens[r_]) return false;
    if (config_.lists.first_keys && !batch_.first_keys.empty() && key < batch_.first_keys[r_])
      return false;
    const bool span = config_.lists.spans && share_span(key);
    const SpanRule rule = config_.lists.span_rule;
    if (span && rule == SpanRule::kWhole) return true;
    if (chunks_back(key) < 0) return false;
    if (!left_reaches(key) || chunks_back(key) > config_.window.chunk_lookback) {
      if (!is_kept(key)) return false;
    }
    if (direction_ != clattn::Direction::kCausal) return right_reaches(key);
    const bool ahead = rule == SpanRule::kClipLeft || right_reaches(key);
    return key <= p_ || (span && ahead);
  }

 private:
  bool is_canvas() const { return direction_ == clattn::Direction::kCanvas; }
  bool left_reaches(std::int64_t key) const {
    return config_.window.left < 0 || (is_canvas() ? first_new_ : p_) - key <= config_.window.left;
  }
  bool right_reaches(std::int64_t key) const {
    return config_.window.right < 0 || is_canvas() || key - p_ <= config_.window.right;
  }
  bool is_kept(std::int64_t key) const {
    return config_.lists.keep_keys && !batch_.keep_keys.empty() && key < batch_.keep_keys[r_];
  }
  std::int64_t chunks_back(std::int64_t key) const {
    return config_.window.chunk == 0 ? 0 : p_ / config_.window.chunk - key / config_.window.chunk;
  }
  bool share_span(std::int64_t key) const {
    if (batch_.spans.empty()) return false;
    for (auto i = static_cast<std::size_t>(batch_.span_start_loc[r_]);
         i < static_cast<std::size_t>(batch_.span_start_loc[r_ + 1]); ++i) {
      const std::int32_t first = batch_.spans[2 * i], end = batch_.spans[2 * i + 1];
      if (first <= p_ && p_ < end && first <= key && key < end) return true;
    }
    return false;
  }

  const clattn::detail::PlannerConfig& config_;
  const Batch& batch_;
  std::size_t r_;
  std::int64_t p_, first_new_ = 0;
  clattn::Direction direction_ = clattn::Direction::kCausal;
};

/// Positions of keys that a query sees; without any, where those of the query before it end. Behind
/// kept keys there may be a gap.
struct Keys {
  std::int64_t begin = 0, end = 0;
  std::int64_t gap_begin = 0, gap_end = 0;
  /// Where the keys behind the gap begin.
  std::int64_t rest() const { return gap_end > 0 ? gap_end : begin; }
  bool none() const { return end <= begin; }
  bool operator==(const Keys&) const = default;
};

/// The keys that a query at `position` sees without lists, by the definition.
inline Keys plain_keys(const clattn::detail::PlannerConfig& config, bool causal,
                       std::int64_t position, std::int64_t seq_len) {
  const auto& window = config.window;
  Keys keys{0, seq_len};
  if (causal && !config.bidirectional) keys.end = std::min(keys.end, position + 1);
  if (window.left >= 0) keys.begin = std::max(keys.begin, position - window.left);
  if (window.right >= 0) keys.end = std::min(keys.end, position + window.right + 1);
  if (window.chunk > 0) {
    keys.begin =
        std::max(keys.begin, (position / window.chunk - window.chunk_lookback) * window.chunk);
    keys.end = std::min(keys.end, (position / window.chunk + 1) * window.chunk);
  }
  return keys;
}

/// The same with lists. Appends to `problem` if they are not next to each other, but for one gap
/// where keys are kept.
inline Keys listed_keys(const LookingRow& row, std::int64_t seq_len, bool keeps,
                        std::string& problem) {
  Keys seen;
  for (std::int64_t key = 0; key < seq_len; ++key) {
    if (!row.sees(key)) continue;
    if (seen.none()) seen = {key, key};
    if (seen.end != key) {
      if (!keeps || seen.gap_end > 0) problem += "a query sees keys with a gap between them; ";
      seen.gap_begin = seen.end;
      seen.gap_end = key;
    }
    seen.end = key + 1;
  }
  return seen;
}

/// Of each query token of a batch. Appends to `problem` if an end falls within a request.
inline std::vector<Keys> seen_keys(const clattn::detail::PlannerConfig& config, const Batch& batch,
                                   std::string& problem) {
  std::vector<Keys> all;
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const auto row = static_cast<std::size_t>(r);
    const std::int64_t seq_len = batch.seq_lens[row];
    const std::int64_t queries = batch.query_start_loc[row + 1] - batch.query_start_loc[row];
    Keys before;
    for (std::int64_t p = seq_len - queries; p < seq_len; ++p) {
      if (!config.lists.any()) {
        all.push_back(plain_keys(config, batch.causal, p, seq_len));
        continue;
      }
      Keys seen =
          listed_keys(LookingRow(config, batch, r, p), seq_len, config.lists.keep_keys, problem);
      if (seen.none()) seen = {before.end, before.end};
      if (seen.rest() < before.rest() || seen.end < before.end)
        problem += "a query sees less than the one before it; ";
      before = seen;
      all.push_back(seen);
    }
  }
  return all;
}

}  // namespace test
