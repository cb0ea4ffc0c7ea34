#include "metadata/validate.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "metadata/page_list.hpp"

namespace clattn::detail {
namespace {

/// Of a sequence: kernels look some tiles past its end, in 32 bits.
constexpr std::int32_t kMaxSeqLen = std::numeric_limits<std::int32_t>::max() - 1023;

std::string legal_range(std::int64_t low, std::int64_t high) {
  if (high < low) return "none";
  if (high == low) return fmt::format("{}", low);
  return fmt::format("{} … {}", low, high);
}

template <typename... Args>
[[noreturn]] void throw_request(std::size_t request, std::string_view field, std::int64_t value,
                                fmt::format_string<Args...> legal, Args&&... args) {
  throw_invalid("request {}: {} is {}, legal: {}", request, field, value,
                fmt::format(legal, std::forward<Args>(args)...));
}

/// Throws if the longest request has more than `most` tokens.
void check_longest(const CommonAttentionMetadata& batch, const BatchSummary& summary,
                   std::int32_t most, std::string_view why) {
  if (summary.max_seq_len <= most) return;
  const auto longest = std::ranges::find(batch.seq_lens, summary.max_seq_len);
  throw_request(to_size(longest - batch.seq_lens.begin()), "seq_lens", *longest, "{} ({})",
                legal_range(0, most), why);
}

void check_seq_lens_size(const CommonAttentionMetadata& batch) {
  check_size("seq_lens", batch.seq_lens.size(), batch.num_reqs, "num_reqs");
}

/// Prefix sums over the requests.
void check_starts(std::string_view field, std::span<const std::int32_t> starts,
                  std::int32_t num_reqs) {
  check_size(field, starts.size(), std::int64_t{num_reqs} + 1, "num_reqs + 1");
  if (starts[0] != 0) throw_invalid("{}[0] is {}, legal: 0", field, starts[0]);
}

/// Tokens that a row of the block table can address.
std::int64_t check_table(const CommonAttentionMetadata& batch, std::int32_t block_size) {
  check_at_least("num_reqs", batch.num_reqs, 0);
  check_at_least("block_size", block_size, 1);
  check_at_least("block_table_stride", batch.block_table_stride, 0);
  check_seq_lens_size(batch);
  const auto entries = checked_mul<std::int64_t>(batch.num_reqs, batch.block_table_stride,
                                                 "num_reqs x block_table_stride");
  throw_invalid_if(
      batch.block_table.size() < to_size(entries),
      "block_table holds {} elements, legal: at least {} (num_reqs {} x block_table_stride {})",
      batch.block_table.size(), entries, batch.num_reqs, batch.block_table_stride);
  return checked_mul<std::int64_t>(batch.block_table_stride, block_size,
                                   "block_table_stride x block_size");
}

[[noreturn]] void throw_bad_seq_len(const CommonAttentionMetadata& batch, std::int32_t block_size,
                                    std::size_t request, std::int32_t query_len) {
  const std::int32_t seq_len = batch.seq_lens[request];
  const auto capacity = std::min(batch.block_table_stride * block_size, kMaxInt32);
  const std::string legal = legal_range(query_len, capacity);
  if (seq_len < query_len)
    throw_request(request, "seq_lens", seq_len, "{} (at least the query length)", legal);
  throw_request(request, "seq_lens", seq_len,
                "{} (its {} pages of {} hold {} tokens, it needs {} pages)", legal,
                batch.block_table_stride, block_size, capacity,
                ceil_div<std::int64_t>(seq_len, block_size));
}

/// key_start_loc: prefix sums of seq_lens. Empty where the keys are the queries' own tokens.
BatchSummary check_key_starts(const CommonAttentionMetadata& batch) {
  check_seq_lens_size(batch);
  const bool own = batch.key_start_loc.empty();
  const auto& starts = own ? batch.query_start_loc : batch.key_start_loc;
  const std::string_view name = own ? "query_start_loc" : "key_start_loc";
  check_starts(name, starts, batch.num_reqs);
  BatchSummary summary;
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int64_t keys = std::int64_t{starts[r + 1]} - starts[r];
    if (batch.seq_lens[r] < 0 || batch.seq_lens[r] != keys) {
      throw_request(r, "seq_lens", batch.seq_lens[r], "{} ({}[{}] - {}[{}])",
                    std::max<std::int64_t>(keys, 0), name, r + 1, name, r);
    }
    summary.max_seq_len = std::max(summary.max_seq_len, batch.seq_lens[r]);
  }
  return summary;
}

void check_computed_tokens(const CommonAttentionMetadata& batch) {
  if (batch.num_computed_tokens.empty()) return;
  check_size("num_computed_tokens", batch.num_computed_tokens.size(), batch.num_reqs, "num_reqs");
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t query_len = query_len_of(batch, r);
    const std::int32_t computed = batch.seq_lens[r] - query_len;
    if (batch.num_computed_tokens[r] != computed) {
      throw_request(r, "num_computed_tokens", batch.num_computed_tokens[r],
                    "{} (seq_lens {} - query length {})", computed, batch.seq_lens[r], query_len);
    }
  }
}

}  // namespace

void check_size(std::string_view field, std::size_t size, std::int64_t needed,
                std::string_view why) {
  throw_invalid_if(size < to_size(needed), "{} holds {} elements, legal: at least {} ({})", field,
                   size, needed, why);
}

std::int32_t last_block_id(std::int64_t num_blocks) {
  return static_cast<std::int32_t>(num_blocks < 0 ? kMaxInt32
                                                  : std::min(num_blocks - 1, kMaxInt32));
}

std::int32_t validate_queries(const CommonAttentionMetadata& batch) {
  check_at_least("num_reqs", batch.num_reqs, 0);
  check_at_least("num_actual_tokens", batch.num_actual_tokens, 0);
  check_at_least("max_query_len", batch.max_query_len, 0);
  const auto& starts = batch.query_start_loc;
  check_starts("query_start_loc", starts, batch.num_reqs);

  const std::int32_t bound =
      batch.max_query_len > 0 ? batch.max_query_len : batch.num_actual_tokens;
  std::int32_t max_query_len = 0;
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t begin = starts[r], end = starts[r + 1];
    if (end < begin || end > batch.num_actual_tokens) {
      throw_request(r, fmt::format("query_start_loc[{}]", r + 1), end,
                    "{} (query_start_loc[{}] … num_actual_tokens)",
                    legal_range(begin, batch.num_actual_tokens), r);
    }
    if (end - begin > bound) {
      throw_request(r, "query length", end - begin, "{} (max_query_len)", legal_range(0, bound));
    }
    max_query_len = std::max(max_query_len, end - begin);
  }
  return max_query_len;
}

BatchSummary validate_tables(const CommonAttentionMetadata& batch, std::int32_t block_size,
                             std::span<const std::int32_t> starts) {
  const std::int64_t capacity = check_table(batch, block_size);
  BatchSummary summary;
  std::int64_t num_pages = 0;
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t query_len = starts.empty() ? 0 : starts[r + 1] - starts[r];
    const std::int32_t seq_len = batch.seq_lens[r];
    if (seq_len < query_len || seq_len > capacity) {
      throw_bad_seq_len(batch, block_size, r, query_len);
    }
    summary.max_query_len = std::max(summary.max_query_len, query_len);
    summary.max_seq_len = std::max(summary.max_seq_len, seq_len);
    num_pages += page_count(seq_len, block_size);
  }
  throw_invalid_if(num_pages > kMaxInt32, "the requests use {} pages, legal: at most {}", num_pages,
                   kMaxInt32);
  summary.num_pages = static_cast<std::int32_t>(num_pages);
  return summary;
}

BatchSummary validate_lengths(const CommonAttentionMetadata& batch, std::int32_t block_size,
                              KeySource source) {
  const std::int32_t max_query_len = validate_queries(batch);
  check_at_least("max_seq_len", batch.max_seq_len, 0);
  BatchSummary summary;
  if (source == KeySource::kContiguous) {
    summary = check_key_starts(batch);
  } else {
    const bool own = source == KeySource::kOwnPages;
    summary = validate_tables(batch, block_size,
                              own ? batch.query_start_loc : std::span<const std::int32_t>());
    if (own) check_computed_tokens(batch);
  }
  summary.max_query_len = max_query_len;
  if (batch.max_seq_len > 0) check_longest(batch, summary, batch.max_seq_len, "max_seq_len");
  return summary;
}

std::int32_t validate_sequences(const CommonAttentionMetadata& batch) {
  validate_queries(batch);
  check_seq_lens_size(batch);
  std::int32_t longest = 0;
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t query_len = query_len_of(batch, r);
    if (batch.seq_lens[r] < query_len) {
      throw_request(r, "seq_lens", batch.seq_lens[r], "at least the query length, {}", query_len);
    }
    longest = std::max(longest, batch.seq_lens[r]);
  }
  return longest;
}

std::size_t first_active_request(const CommonAttentionMetadata& batch) {
  std::size_t r = 0;
  while (r < to_size(batch.num_reqs) && batch.query_start_loc[r + 1] == 0) ++r;
  return r;
}

StepSplit split_step(const CommonAttentionMetadata& batch, std::int32_t decode_threshold,
                     KeySource source) {
  validate_queries(batch);
  StepSplit split;
  BatchSplit& counts = split.counts;
  bool decodes = source != KeySource::kContiguous;
  bool decodes_first = decodes;
  int changes = 0;
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t query_len = query_len_of(batch, r);
    const bool before = decodes;
    if (query_len > 0 && source != KeySource::kContiguous) decodes = query_len <= decode_threshold;
    if (r == 0) {
      decodes_first = decodes;
    } else if (decodes != before) {
      ++changes;
    }
    ++(decodes ? counts.num_decodes : counts.num_prefills);
    (decodes ? counts.num_decode_tokens : counts.num_prefill_tokens) += query_len;
  }
  const bool mixed = changes > 1;
  if (mixed || decodes_first) split.prefills_at = mixed ? -1 : counts.num_decodes;
  if (mixed || !decodes_first) split.decodes_at = mixed ? -1 : counts.num_prefills;
  return split;
}

void validate_common_prefix(const CommonAttentionMetadata& batch, std::int32_t block_size,
                            std::int32_t common_prefix_len, KeySource source) {
  if (common_prefix_len == 0) return;
  throw_invalid_if(source == KeySource::kContiguous,
                   "common_prefix_len is {}, legal: 0 (there are no pages)", common_prefix_len);
  throw_invalid_if(common_prefix_len < 0 || common_prefix_len % block_size != 0,
                   "common_prefix_len is {}, legal: multiples of block_size {}, >= 0",
                   common_prefix_len, block_size);
  const auto pages = static_cast<std::ptrdiff_t>(common_prefix_len / block_size);
  const std::size_t first = first_active_request(batch);
  for (std::size_t r = first; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t query_len = query_len_of(batch, r);
    if (query_len == 0) continue;
    const std::int32_t own = source == KeySource::kOwnPages ? query_len : 0;
    const std::int32_t computed = batch.seq_lens[r] - own;
    if (common_prefix_len > computed) {
      throw_request(r, "common_prefix_len", common_prefix_len, "{} (its computed tokens)",
                    legal_range(0, computed));
    }
    const std::int32_t* const row = table_row(batch, first);
    const auto differ = std::mismatch(row, row + pages, table_row(batch, r));
    if (differ.first == row + pages) continue;
    throw_request(r, fmt::format("block_table[{}]", differ.first - row), *differ.second,
                  "{} (request {}'s: common_prefix_len {})", *differ.first, first,
                  common_prefix_len);
  }
}

void validate_page_ids(const CommonAttentionMetadata& batch, std::int32_t block_size,
                       std::int64_t num_blocks) {
  const std::int32_t last = last_block_id(num_blocks);
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const auto pages = to_size(page_count(batch.seq_lens[r], block_size));
    if (!pages_in_range(table_row(batch, r), pages, last))
      throw_bad_page_id(batch, block_size, num_blocks, r);
  }
}

void throw_bad_page_id(const CommonAttentionMetadata& batch, std::int32_t block_size,
                       std::int64_t num_blocks, std::size_t request, std::size_t first) {
  const std::int32_t last = last_block_id(num_blocks);
  const std::int32_t* const row = table_row(batch, request);
  const std::int32_t* const bad =
      std::find_if(row + first, row + page_count(batch.seq_lens[request], block_size) - 1,
                   [&](std::int32_t id) { return id < 0 || id > last; });
  throw_request(request, fmt::format("block_table[{}]", bad - row), *bad, "{}{}",
                legal_range(0, last),
                num_blocks < 0 ? "" : fmt::format(" (num_blocks {})", num_blocks));
}

void validate_slots(const CommonAttentionMetadata& batch, std::int32_t block_size,
                    std::int64_t num_blocks, KeySource source) {
  if (batch.slot_mapping.empty()) return;
  const bool own = source == KeySource::kOwnPages;
  if (own) {
    check_size("slot_mapping", batch.slot_mapping.size(), token_count(batch),
               "the requests' tokens");
  }
  const std::int64_t last = (std::int64_t{last_block_id(num_blocks)} + 1) * block_size - 1;
  const auto slots =
      own ? batch.slot_mapping.first(to_size(token_count(batch))) : batch.slot_mapping;
  // The top bit of slot + 1 marks a slot below kPadSlotId, that of last - slot one past the last.
  // Unsigned, as hostile values wrap; those that wrap the second term have set the first one's bit.
  std::uint64_t bad = 0;
  for (const std::int64_t slot : slots) {
    const auto bits = static_cast<std::uint64_t>(slot);
    bad |= (bits + 1) | (static_cast<std::uint64_t>(last) - bits);
  }
  if (bad >> 63 == 0) return;
  const auto* const found =
      std::find_if(slots.data(), slots.data() + slots.size(),
                   [&](std::int64_t slot) { return slot < kPadSlotId || slot > last; });
  const auto token = found - slots.data();
  throw_invalid_if(!own, "slot_mapping[{}] is {}, legal: {}", token, *found,
                   legal_range(kPadSlotId, last));
  const auto starts = batch.query_start_loc.first(to_size(batch.num_reqs) + 1);
  const auto owner = std::ranges::upper_bound(starts, token) - starts.begin() - 1;
  throw_request(to_size(owner), fmt::format("slot_mapping[{}]", token), *found, "{}{}",
                legal_range(kPadSlotId, last),
                num_blocks < 0
                    ? ""
                    : fmt::format(" (num_blocks {} x block_size {})", num_blocks, block_size));
}

void validate_limits(const BatchLimits& limits) {
  if (limits.max_num_reqs >= 1 && limits.max_num_batched_tokens >= 1 && limits.max_model_len >= 1)
    return;
  throw_invalid(
      "limits: max_num_reqs {}, max_num_batched_tokens {}, max_model_len {}; legal: >= 1 each",
      limits.max_num_reqs, limits.max_num_batched_tokens, limits.max_model_len);
}

void validate_limits(const CommonAttentionMetadata& batch, const BatchSummary& summary,
                     const BatchLimits& limits) {
  const auto check = [](std::string_view field, std::int32_t value, std::int32_t most,
                        std::string_view limit) {
    if (value <= most) return;
    throw_invalid("{} is {}, legal: {} (BuilderOptions::limits.{})", field, value,
                  legal_range(0, most), limit);
  };
  check("num_reqs", batch.num_reqs, limits.max_num_reqs, "max_num_reqs");
  check("num_actual_tokens", token_count(batch), limits.max_num_batched_tokens,
        "max_num_batched_tokens");
  if (limits.max_model_len <= kMaxSeqLen) {
    check_longest(batch, summary, limits.max_model_len, "max_model_len");
  } else {
    check_longest(batch, summary, kMaxSeqLen, "tiles are counted in 32 bits");
  }
}

}  // namespace clattn::detail

namespace clattn {

void validate_batch(const CommonAttentionMetadata& batch, std::int32_t block_size,
                    std::int64_t num_blocks) {
  detail::validate_lengths(batch, block_size);
  detail::validate_page_ids(batch, block_size, num_blocks);
  detail::validate_slots(batch, block_size, num_blocks);
}

}  // namespace clattn
