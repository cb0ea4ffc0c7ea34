#pragma once

#include <clattn/metadata.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace clattn::detail {

/// Whether all `count` block ids of a row lie in [0, last_id].
bool pages_in_range(const std::int32_t* row, std::size_t count, std::int32_t last_id);

/// Copies `count` block ids and returns whether all of them lie in [0, last_id]: one pass over the
/// table both checks it and packs it, for page lists and dense tables alike. No overlap.
bool append_pages(std::int32_t* dst, const std::int32_t* row, std::size_t count,
                  std::int32_t last_id);

/// compute_slot_mapping() for a batch that is known to be valid. Does not allocate.
void write_slot_mapping(const CommonAttentionMetadata& batch, std::int32_t block_size,
                        std::span<std::int64_t> slots);

/// Throws kInvalidArgument naming `name` unless `indptr` is num_reqs + 1 values from 0 on that
/// never fall.
void check_indptr(std::span<const std::int32_t> indptr, std::string_view name,
                  std::size_t num_reqs);

/// get_seq_lens() into an array that is reused.
void write_seq_lens(std::span<const std::int32_t> indptr,
                    std::span<const std::int32_t> last_page_len, std::int32_t page_size,
                    std::vector<std::int32_t>& seq_lens);

}  // namespace clattn::detail
