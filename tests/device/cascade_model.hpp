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
    if (c.causal && level + 1 == levels.size()) {
      keys.resize(keys.size() - index(levels[level].qo_indptr[s + 1] - 1 - token));
    }
    return keys;
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
  }
  clattn::CommonAttentionMetadata batch() const {
    return clattn::CommonAttentionMetadata::of(starts, lens, table);
  }
};

struct Outcome {
  std::vector<std::string> kernels;
  std::vector<std::int64_t> tasks;
};

/// Runs the cascade on a device, with and without an LSE buffer, and compares with the oracle.
Outcome run(const std::shared_ptr<clattn::Context>& context, const Cascade& c);

}  // namespace cascade_test
