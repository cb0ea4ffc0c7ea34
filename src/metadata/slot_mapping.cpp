#include "metadata/slot_mapping.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

/// Slots of `count` > 0 tokens from position `first` on, a run of neighbours per page: one division
/// a request instead of one a token.
std::int64_t* write_run(const std::int32_t* row, std::int32_t block_size, std::int32_t first,
                        std::int32_t count, std::int64_t* slots) {
  const std::int32_t* page = row + first / block_size;
  std::int32_t offset = first % block_size;
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

}  // namespace

void write_slot_mapping(const CommonAttentionMetadata& batch, std::int32_t block_size,
                        std::span<std::int64_t> slots) {
  std::int64_t* next = slots.data();
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const auto request = static_cast<std::size_t>(r);
    const std::int32_t query_len =
        batch.query_start_loc[request + 1] - batch.query_start_loc[request];
    if (query_len == 0) continue;
    next = write_run(batch.block_table.data() + r * batch.block_table_stride, block_size,
                     batch.seq_lens[request] - query_len, query_len, next);
  }
  std::fill(next, slots.data() + slots.size(), kPadSlotId);
}

}  // namespace clattn::detail

namespace clattn {

void compute_slot_mapping(const CommonAttentionMetadata& batch, std::int32_t block_size,
                          std::span<std::int64_t> slots) {
  validate_batch(batch, block_size, -1);
  if (slots.size() < static_cast<std::size_t>(batch.num_actual_tokens)) {
    detail::throw_invalid("slots holds {} elements, legal: at least {} (num_actual_tokens)",
                          slots.size(), batch.num_actual_tokens);
  }
  detail::write_slot_mapping(batch, block_size, slots);
}

void pad_slot_mapping(std::span<std::int64_t> slot_mapping, std::int32_t num_actual_tokens) {
  if (num_actual_tokens < 0 || slot_mapping.size() < static_cast<std::size_t>(num_actual_tokens)) {
    detail::throw_invalid("num_actual_tokens is {}, legal: 0 … {} (elements of slot_mapping)",
                          num_actual_tokens, slot_mapping.size());
  }
  const auto padding = slot_mapping.subspan(static_cast<std::size_t>(num_actual_tokens));
  std::fill(padding.begin(), padding.end(), kPadSlotId);
}

}  // namespace clattn
