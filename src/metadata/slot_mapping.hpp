#pragma once

#include <clattn/metadata.hpp>
#include <cstdint>
#include <span>

namespace clattn::detail {

/// compute_slot_mapping() for a batch that is known to be valid. Does not allocate.
void write_slot_mapping(const CommonAttentionMetadata& batch, std::int32_t block_size,
                        std::span<std::int64_t> slots);

}  // namespace clattn::detail
