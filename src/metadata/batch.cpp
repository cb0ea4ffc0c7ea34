#include "metadata/page_list.hpp"

#include <algorithm>
#include <clattn/metadata.hpp>

#include "base/checked.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

/// Slots of `count` > 0 tokens from position `first` on, a run of neighbours per page: one division
/// a request instead of one a token.
std::int64_t* write_run(const std::int32_t* row, std::int32_t block_size, std::int32_t first,
                        std::int32_t count, std::int64_t* slots) {
  const std::int32_t before = quotient(first, block_size);
  const std::int32_t* page = row + before;
  std::int32_t offset = first - before * block_size;
  while (count > 0) {
    const std::int32_t run = std::min(block_size - offset, count);
    const std::int64_t base = std::int64_t{*page++} * block_size + offset;
    for (std::int32_t i = 0; i < run; ++i) slots[i] = base + i;
    slots += run;
    count -= run;
    offset = 0;
  }
  return slots;
}

/// The first `count` elements of an array that may be left out.
template <typename T>
std::span<const T> first_of(std::span<const T> given, std::int64_t count) {
  return given.first(std::min(given.size(), to_size(count)));
}

/// The first requests' part of a list with prefix sums, `width` elements an entry.
void cut_list(std::span<const std::int32_t>& starts, std::span<const std::int32_t>& list,
              std::int64_t num_reqs, std::int64_t width) {
  starts = first_of(starts, num_reqs + 1);
  if (!starts.empty()) list = first_of(list, width * std::max(starts.back(), 0));
}

}  // namespace

void write_slot_mapping(const CommonAttentionMetadata& batch, std::int32_t block_size,
                        std::span<std::int64_t> slots) {
  std::int64_t* next = slots.data();
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t query_len = query_len_of(batch, r);
    if (query_len == 0) continue;
    next =
        write_run(table_row(batch, r), block_size, batch.seq_lens[r] - query_len, query_len, next);
  }
  std::fill(next, slots.data() + slots.size(), kPadSlotId);
}

}  // namespace clattn::detail

namespace clattn {

CommonAttentionMetadata CommonAttentionMetadata::of(std::span<const std::int32_t> query_start_loc,
                                                    std::span<const std::int32_t> seq_lens,
                                                    std::span<const std::int32_t> block_table) {
  detail::throw_invalid_if(query_start_loc.size() > seq_lens.size() + 1,
                           "query_start_loc holds {} elements, legal: {} (seq_lens and one more)",
                           query_start_loc.size(), seq_lens.size() + 1);
  CommonAttentionMetadata batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.block_table = block_table;
  batch.num_reqs = static_cast<std::int32_t>(seq_lens.size());
  batch.num_actual_tokens = query_start_loc.empty() ? 0 : query_start_loc.back();
  const std::size_t rows = std::max<std::size_t>(seq_lens.size(), 1);
  detail::throw_invalid_if(block_table.size() % rows != 0,
                           "block_table holds {} elements, legal: a multiple of the {} requests "
                           "(rows of equal length: pad the shorter ones with 0)",
                           block_table.size(), rows);
  batch.block_table_stride = static_cast<std::int64_t>(block_table.size() / rows);
  return batch;
}

CommonAttentionMetadata CommonAttentionMetadata::unpadded(std::int32_t num_tokens,
                                                          std::int32_t num_requests) const {
  detail::check_between("num_requests", num_requests, 0, num_reqs);
  detail::check_size("query_start_loc", query_start_loc.size(), std::int64_t{num_requests} + 1,
                     "num_requests + 1");
  detail::check_between("num_tokens", num_tokens, query_start_loc[detail::to_size(num_requests)],
                        num_actual_tokens);
  CommonAttentionMetadata batch = *this;
  batch.num_reqs = num_requests;
  batch.num_actual_tokens = num_tokens;
  const auto cut = [&](auto& per_request, std::int32_t more) {
    per_request = detail::first_of(per_request, std::int64_t{num_requests} + more);
  };
  cut(batch.query_start_loc, 1);
  cut(batch.key_start_loc, 1);
  cut(batch.seq_lens, 0);
  cut(batch.num_computed_tokens, 0);
  cut(batch.direction, 0);
  cut(batch.first_keys, 0);
  cut(batch.keep_keys, 0);
  batch.block_table = detail::first_of(
      block_table, detail::checked_mul<std::int64_t>(num_requests, block_table_stride,
                                                     "num_requests x block_table_stride"));
  detail::cut_list(batch.span_start_loc, batch.spans, num_requests, 2);
  detail::cut_list(batch.tree_start_loc, batch.tree_parents, num_requests, 1);
  return batch;
}

std::vector<std::int32_t> CommonAttentionMetadata::naive_query_lens() const {
  detail::check_at_least("num_reqs", num_reqs, 0);
  detail::check_size("query_start_loc", query_start_loc.size(), std::int64_t{num_reqs} + 1,
                     "num_reqs + 1");
  std::vector<std::int32_t> lens(detail::to_size(num_reqs));
  for (std::size_t r = 0; r < lens.size(); ++r) lens[r] = detail::query_len_of(*this, r);
  return lens;
}

void compute_slot_mapping(const CommonAttentionMetadata& batch, std::int32_t block_size,
                          std::span<std::int64_t> slots) {
  validate_batch(batch, block_size, -1);
  detail::check_size("slots", slots.size(), batch.num_actual_tokens, "num_actual_tokens");
  detail::write_slot_mapping(batch, block_size, slots);
}

void map_to_kernel_blocks(std::span<const std::int32_t> block_table, std::int32_t block_size,
                          std::int32_t kernel_block_size,
                          std::span<std::int32_t> kernel_block_table) {
  detail::throw_invalid_if(
      kernel_block_size < 1 || block_size < 1 || block_size % kernel_block_size != 0,
      "kernel_block_size {} must divide kv_manager_block_size size {} evenly", kernel_block_size,
      block_size);
  const std::int64_t parts = block_size / kernel_block_size;
  detail::throw_invalid_if(
      kernel_block_table.size() % detail::to_size(parts) != 0 ||
          kernel_block_table.size() / detail::to_size(parts) != block_table.size(),
      "kernel_block_table holds {} elements, legal: {} for each of {}", kernel_block_table.size(),
      parts, block_table.size());
  std::int32_t* to = kernel_block_table.data();
  for (const std::int32_t block : block_table) {
    const std::int64_t first = block * parts;
    const bool is_block = block >= 0 && first + parts - 1 <= INT32_MAX;
    for (std::int64_t part = 0; part < parts; ++part) {
      *to++ = is_block ? static_cast<std::int32_t>(first + part) : -1;
    }
  }
}

void pad_slot_mapping(std::span<std::int64_t> slot_mapping, std::int32_t num_actual_tokens) {
  detail::throw_invalid_if(
      num_actual_tokens < 0 || slot_mapping.size() < detail::to_size(num_actual_tokens),
      "num_actual_tokens is {}, legal: 0 … {} (elements of slot_mapping)", num_actual_tokens,
      slot_mapping.size());
  const auto padding = slot_mapping.subspan(detail::to_size(num_actual_tokens));
  std::ranges::fill(padding, kPadSlotId);
}

}  // namespace clattn
