#include <algorithm>
#include <clattn/compat/v0_slot_mapping.hpp>
#include <clattn/types.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {
namespace {

using detail::throw_invalid_if, detail::to_size;

/// The table entries of tokens [first, seq_len).
void check_used_blocks(const V0SlotMappingRequest& request, std::int32_t first) {
  if (first >= request.seq_len) return;
  const auto last = to_size((request.seq_len - 1) / request.block_size);
  throw_invalid_if(request.block_table.size() <= last,
                   "block_table holds {} elements, legal: at least {} (seq_len {}, block_size {})",
                   request.block_table.size(), last + 1, request.seq_len, request.block_size);
  for (auto page = to_size(first / request.block_size); page <= last; ++page) {
    throw_invalid_if(request.block_table[page] < 0, "block_table[{}] is {}, legal: at least 0",
                     page, request.block_table[page]);
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
    slot_mapping.insert(slot_mapping.end(), to_size(request.seq_len), kPadSlotId);
    return;
  }
  const std::int32_t first = std::max(request.start_idx, request.context_len);
  check_used_blocks(request, first);
  slot_mapping.insert(slot_mapping.end(), to_size(first - request.context_len), kPadSlotId);
  for (std::int32_t token = first; token < request.seq_len; ++token) {
    const std::int64_t block = request.block_table[to_size(token / request.block_size)];
    slot_mapping.push_back(block * request.block_size + token % request.block_size);
  }
}

}  // namespace clattn
