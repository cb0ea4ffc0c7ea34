#pragma once

#include <clattn/cascade.hpp>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "device/step_case.hpp"

/// Cascades made up at random and judged by the oracle: every query token is a request of its own
/// there, whose keys are those of its sequences in all levels, one behind the other.
namespace cascade_test {

using step_test::Elements;
using step_test::index;

struct Sequence {
  std::int32_t query_len = 0;
  std::int32_t keys = 0;
};

struct Cascade {
  std::string backend = "FLASHINFER";
  clattn::KVCacheLayout layout = clattn::KVCacheLayout::kHND;
  clattn::AttentionConfig config;
  std::vector<std::vector<Sequence>> levels;  ///< sequences of a level, all tokens in each level
  bool causal = true;                         ///< the last level
  bool as_batch = false;  ///< through CascadeAttention: levels[0] is one sequence, the prefix
  /// What the batch says of its requests, those of levels[1]: directions, spans, trees. Spans count
  /// positions from the prefix's first. Empty: nothing.
  std::vector<attention_test::Request> said = {};
  std::int32_t num_splits = 0;
  std::int64_t query_padding = 0;
  std::vector<clattn::AttentionConfig> layers = {};  ///< that share the plan; none = config alone
  double cache_scale = 1.0;                          ///< of quantized caches
};

/// Host side of a cascade: page lists per level, the cache's bits, and what each token sees.
struct Model {
  struct Level {
    std::vector<std::int32_t> qo_indptr{0}, indptr{0}, indices, last_page_len;
  };
  std::vector<Level> levels;
  std::int64_t num_blocks = 0;
  std::int32_t num_tokens = 0;
  std::vector<std::vector<std::int64_t>> slots;  ///< of each level's sequences' keys, in order
  std::vector<std::size_t> first_slots;          ///< where a level's sequences begin in `slots`

  explicit Model(const Cascade& c) {
    std::int64_t pages = 1;  // block 0 belongs to nobody
    for (const auto& level : c.levels) {
      for (const Sequence& s : level)
        pages += (s.keys + c.config.block_size - 1) / c.config.block_size;
    }
    num_blocks = pages + 1;
    std::vector<std::int32_t> ids(index(num_blocks - 1));
    std::iota(ids.begin(), ids.end(), 1);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(5));
    auto next = ids.begin();
    for (const auto& level : c.levels) add_level(level, c.config.block_size, next);
    num_tokens = levels.front().qo_indptr.back();
  }

  /// The sequence of `level` that holds a token.
  std::size_t sequence_of(std::size_t level, std::int32_t token) const {
    const auto& starts = levels[level].qo_indptr;
    return index(std::upper_bound(starts.begin(), starts.end(), token) - starts.begin()) - 1;
  }

  /// Slots of the keys that a token sees in a level.
  std::vector<std::int64_t> visible(const Cascade& c, std::size_t level, std::int32_t token) const {
    const std::size_t s = sequence_of(level, token);
    std::vector<std::int64_t> keys = slots[first_slots[level] + s];
    if (!c.causal || level + 1 < levels.size()) return keys;
    if (!c.said.empty()) return listed(c, c.said[s], keys, position(level, token));
    keys.resize(index(position(level, token)) + 1);
    return keys;
  }
  /// Of a query token that stands among the keys of its sequence.
  std::int32_t position(std::size_t level, std::int32_t token) const {
    const std::size_t s = sequence_of(level, token);
    const auto keys = static_cast<std::int32_t>(slots[first_slots[level] + s].size());
    return keys - (levels[level].qo_indptr[s + 1] - token);
  }
  std::int64_t own_slot(std::size_t level, std::int32_t token) const {
    return slots[first_slots[level] + sequence_of(level, token)][index(position(level, token))];
  }

  std::vector<clattn::CascadeLevel> spans(bool causal) const {
    std::vector<clattn::CascadeLevel> all;
    for (const Level& l : levels) {
      all.push_back({l.qo_indptr, l.indptr, l.indices, l.last_page_len,
                     causal && all.size() + 1 == levels.size()});
    }
    return all;
  }

 private:
  /// What the query at a position of the last level sees of its keys.
  static std::vector<std::int64_t> listed(const Cascade& c, const attention_test::Request& request,
                                          std::vector<std::int64_t> keys, std::int32_t position) {
    const auto size = static_cast<std::int32_t>(keys.size());
    if (!request.parents.empty()) {
      const std::int32_t begin = size - static_cast<std::int32_t>(request.parents.size());
      std::vector<std::int64_t> seen(keys.begin(), keys.begin() + begin);
      for (std::int32_t node = position - begin; node >= 0; node = request.parents[index(node)])
        seen.push_back(keys[index(begin + node)]);
      return seen;
    }
    const bool causal =
        request.direction.value_or(clattn::Direction::kCausal) == clattn::Direction::kCausal;
    std::int32_t end = causal ? position + 1 : size;
    const std::int32_t prefix = c.levels[0][0].keys;
    for (const auto& [first, last] : request.spans)
      if (prefix + position >= first && prefix + position < last)
        end = std::max(end, std::min(last - prefix, size));
    keys.resize(index(end));
    return keys;
  }
  void add_level(const std::vector<Sequence>& sequences, std::int32_t block_size,
                 std::vector<std::int32_t>::iterator& next) {
    Level& level = levels.emplace_back();
    first_slots.push_back(slots.size());
    for (const Sequence& s : sequences) {
      level.qo_indptr.push_back(level.qo_indptr.back() + s.query_len);
      std::vector<std::int64_t>& keys = slots.emplace_back();
      for (std::int32_t p = 0; p < s.keys; ++p) {
        if (p % block_size == 0) level.indices.push_back(*next++);
        keys.push_back(std::int64_t{level.indices.back()} * block_size + p % block_size);
      }
      level.indptr.push_back(static_cast<std::int32_t>(level.indices.size()));
      level.last_page_len.push_back(s.keys == 0 ? 0 : (s.keys - 1) % block_size + 1);
    }
  }
};

/// The batch that a cascade of two levels stands for: rows of shared pages, then own ones, then
/// garbage. Requests without query tokens have garbage only.
struct SharedBatch {
  std::vector<std::int32_t> starts, lens, table;
  std::vector<clattn::Direction> direction;
  std::vector<std::int32_t> span_start_loc, spans, tree_start_loc, tree_parents;
  std::int32_t prefix_len;

  SharedBatch(const Cascade& c, const Model& model) : prefix_len(c.levels[0][0].keys) {
    const Model::Level &prefix = model.levels[0], &own = model.levels[1];
    std::size_t widest = 0;
    for (std::size_t r = 0; r + 1 < own.indptr.size(); ++r) {
      widest = std::max(widest, index(own.indptr[r + 1] - own.indptr[r]));
    }
    starts = own.qo_indptr;
    for (std::size_t r = 0; r + 1 < own.indptr.size(); ++r) {
      const bool idle = starts[r + 1] == starts[r];
      lens.push_back(idle ? c.levels[1][r].keys : prefix_len + c.levels[1][r].keys);
      std::vector<std::int32_t> row;
      if (!idle) row = prefix.indices;
      row.insert(row.end(), own.indices.begin() + own.indptr[r],
                 own.indices.begin() + own.indptr[r + 1]);
      row.resize(prefix.indices.size() + widest + 1, std::numeric_limits<std::int32_t>::max());
      table.insert(table.end(), row.begin(), row.end());
    }
    if (c.said.empty()) return;
    span_start_loc = tree_start_loc = {0};
    for (const attention_test::Request& request : c.said) {
      direction.push_back(request.direction.value_or(clattn::Direction::kCausal));
      for (const auto& [first, end] : request.spans) spans.insert(spans.end(), {first, end});
      span_start_loc.push_back(static_cast<std::int32_t>(spans.size() / 2));
      tree_parents.insert(tree_parents.end(), request.parents.begin(), request.parents.end());
      tree_start_loc.push_back(static_cast<std::int32_t>(tree_parents.size()));
    }
  }
  clattn::CommonAttentionMetadata batch() const {
    auto batch = clattn::CommonAttentionMetadata::of(starts, lens, table);
    batch.direction = direction;
    batch.span_start_loc = span_start_loc;
    batch.spans = spans;
    batch.tree_start_loc = tree_start_loc;
    batch.tree_parents = tree_parents;
    return batch;
  }
};

struct Outcome {
  std::vector<std::string> kernels;
  std::vector<std::int64_t> tasks;
};

/// Runs the cascade on a device, with and without an LSE buffer, and compares with the oracle.
Outcome run(const std::shared_ptr<clattn::Context>& context, const Cascade& c);

}  // namespace cascade_test
