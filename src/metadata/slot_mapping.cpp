#include "metadata/page_list.hpp"

#include <algorithm>
#include <clattn/compat/v0_slot_mapping.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"
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

namespace {

/// The table entries of tokens [first, seq_len).
void check_used_blocks(const V0SlotMappingRequest& request, std::int32_t first) {
  if (first >= request.seq_len) return;
  const auto last = detail::to_size((request.seq_len - 1) / request.block_size);
  detail::throw_invalid_if(
      request.block_table.size() <= last,
      "block_table holds {} elements, legal: at least {} (seq_len {}, block_size {})",
      request.block_table.size(), last + 1, request.seq_len, request.block_size);
  for (auto page = detail::to_size(first / request.block_size); page <= last; ++page) {
    detail::throw_invalid_if(request.block_table[page] < 0,
                             "block_table[{}] is {}, legal: at least 0", page,
                             request.block_table[page]);
  }
}

}  // namespace

bool is_v0_block_tables_empty(
    std::span<const std::optional<std::vector<std::int32_t>>> block_tables) {
  return std::ranges::none_of(block_tables, [](const auto& table) { return table.has_value(); });
}

std::int32_t compute_v0_slot_mapping_start_idx(V0Phase phase, std::int32_t query_len,
                                               std::int32_t sliding_window) {
  detail::check_at_least("query_len", query_len, 0);
  detail::check_at_least("sliding_window", sliding_window, 0);
  if (phase == V0Phase::kDecode || sliding_window == 0) return 0;
  return std::max(0, query_len - sliding_window);
}

void append_v0_slot_mapping(const V0SlotMappingRequest& request,
                            std::vector<std::int64_t>& slot_mapping) {
  detail::check_at_least("seq_len", request.seq_len, 0);
  detail::check_at_least("context_len", request.context_len, 0);
  detail::check_at_least("start_idx", request.start_idx, 0);
  detail::check_at_least("block_size", request.block_size, 1);
  if (request.is_profile_run) {
    slot_mapping.insert(slot_mapping.end(), detail::to_size(request.seq_len), kPadSlotId);
    return;
  }
  const std::int32_t first = std::max(request.start_idx, request.context_len);
  check_used_blocks(request, first);
  slot_mapping.insert(slot_mapping.end(), detail::to_size(first - request.context_len), kPadSlotId);
  for (std::int32_t token = first; token < request.seq_len; ++token) {
    const std::int64_t block = request.block_table[detail::to_size(token / request.block_size)];
    slot_mapping.push_back(block * request.block_size + token % request.block_size);
  }
}

}  // namespace clattn
