#pragma once

// For engines that compute slots a request at a time, as vLLM V0 did; compute_slot_mapping()
// (metadata.hpp) does the whole batch.

#include <clattn/types.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

// Slots as vLLM's first engine computed them, one request at a time; compute_slot_mapping() of
// metadata.hpp computes those of a whole batch.

/// Whether no request has a block table (embedding models): vLLM's is_block_tables_empty.
bool is_v0_block_tables_empty(
    std::span<const std::optional<std::vector<std::int32_t>>> block_tables);

/// What a request's step computes: its prompt, or one token.
enum class V0Phase : std::uint8_t { kPrompt, kDecode };

/// The first token whose key is worth storing: of a prompt with a sliding window (0 = none) the
/// tokens before the last `window` are not. vLLM: compute_slot_mapping_start_idx.
std::int32_t compute_v0_slot_mapping_start_idx(V0Phase phase, std::int32_t query_len,
                                               std::int32_t window);

/// One request of a step.
struct V0SlotMappingRequest {
  std::int32_t seq_len = 0;      ///< tokens in the cache including this step's
  std::int32_t context_len = 0;  ///< tokens in the cache before this step
  std::int32_t start_idx = 0;    ///< tokens before it are not stored
  std::int32_t block_size = 16;  ///< tokens per block
  bool is_profile_run = false;   ///< store nothing; needs no block table
  /// Physical block ids; a block may be there several times, as when a window reuses blocks.
  std::span<const std::int32_t> block_table = {};
};

/// Appends kPadSlotId for the tokens from context_len up to start_idx, then the slots of those up
/// to seq_len; in a profile run seq_len times kPadSlotId. Throws if a token lies past the table.
/// vLLM v0: compute_slot_mapping.
void append_v0_slot_mapping(const V0SlotMappingRequest& request,
                            std::vector<std::int64_t>& slot_mapping);

}  // namespace clattn
