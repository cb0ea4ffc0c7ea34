#pragma once

#include <algorithm>
#include <clattn/metadata.hpp>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "support/error_text.hpp"

namespace test {

/// The arrays behind a CommonAttentionMetadata, for tests to build and to spoil.
struct Batch {
  std::vector<std::int32_t> query_start_loc;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> num_computed_tokens;
  std::vector<std::int32_t> block_table;
  std::vector<std::int64_t> slot_mapping;
  std::int32_t num_reqs = 0;
  std::int32_t num_actual_tokens = 0;
  std::int32_t max_query_len = 0;
  std::int32_t max_seq_len = 0;
  std::int64_t block_table_stride = 0;
  bool causal = true;
  std::vector<clattn::Direction> direction;
  std::vector<std::int32_t> span_start_loc, spans, first_keys, keep_keys;

  clattn::CommonAttentionMetadata view() const {
    return {.query_start_loc = query_start_loc,
            .seq_lens = seq_lens,
            .num_computed_tokens = num_computed_tokens,
            .num_reqs = num_reqs,
            .num_actual_tokens = num_actual_tokens,
            .max_query_len = max_query_len,
            .max_seq_len = max_seq_len,
            .block_table = block_table,
            .block_table_stride = block_table_stride,
            .slot_mapping = slot_mapping,
            .key_start_loc = {},
            .causal = causal,
            .direction = direction,
            .span_start_loc = span_start_loc,
            .spans = spans,
            .first_keys = first_keys,
            .keep_keys = keep_keys};
  }
};

inline constexpr std::int32_t kPoisonBlock = std::numeric_limits<std::int32_t>::min();

struct Request {
  std::int32_t query_len = 0;
  std::int32_t seq_len = 0;
};

/// The `count` numbers from `first` on. They lie ready to be copied: tables of ten thousand random
/// batches, written entry by entry, took nine tenths of the planner's tests.
inline std::span<const std::int32_t> consecutive(std::size_t first, std::size_t count) {
  static thread_local std::vector<std::int32_t> numbers;
  if (const std::size_t known = numbers.size(); known < first + count) {
    numbers.resize(std::max(2 * known, first + count));
    std::iota(numbers.begin() + static_cast<std::ptrdiff_t>(known), numbers.end(),
              static_cast<std::int32_t>(known));
  }
  return std::span(numbers).subspan(first, count);
}

/// A legal batch whose pages are 0, 1, 2, … in order of use. Each row of the table has
/// `spare_columns` more entries than the longest request needs; entries past a request's pages are
/// poison.
inline Batch make_batch(const std::vector<Request>& requests, std::int32_t block_size,
                        std::int64_t spare_columns = 1) {
  Batch batch;
  batch.num_reqs = static_cast<std::int32_t>(requests.size());
  batch.query_start_loc.push_back(0);
  const auto pages = [&](const Request& request) {
    return (std::int64_t{request.seq_len} + block_size - 1) / block_size;
  };
  for (const Request& request : requests) {
    batch.num_actual_tokens += request.query_len;
    batch.query_start_loc.push_back(batch.num_actual_tokens);
    batch.seq_lens.push_back(request.seq_len);
    batch.block_table_stride = std::max(batch.block_table_stride, pages(request));
  }
  batch.block_table_stride += spare_columns;
  const auto row = static_cast<std::size_t>(batch.block_table_stride);
  batch.block_table.reserve(requests.size() * row);
  std::size_t next = 0;
  for (const Request& request : requests) {
    const auto own = consecutive(next, static_cast<std::size_t>(pages(request)));
    batch.block_table.insert(batch.block_table.end(), own.begin(), own.end());
    batch.block_table.insert(batch.block_table.end(), row - own.size(), kPoisonBlock);
    next += own.size();
  }
  return batch;
}

}  // namespace test
