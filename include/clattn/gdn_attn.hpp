#pragma once

#include <clattn/kv_cache_spec.hpp>
#include <clattn/metadata.hpp>
#include <clattn/recurrent.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// A step of gated delta nets as vLLM has it (GDNAttentionMetadata): counts and lists on the host,
/// for engines with kernels of their own. CLAttn's operations take `metadata` alone. A request with
/// drafts, "spec", is one that num_decode_draft_tokens does not name -1, if any request of the step
/// has a draft.
struct GDNAttentionMetadata {
  std::int32_t num_prefills = 0;            ///< beside drafts, decodes count as prefills
  std::int32_t num_prefill_tokens = 0;      ///< of the prefills
  std::int32_t num_decodes = 0;             ///< requests of one token; they stand before prefills
  std::int32_t num_decode_tokens = 0;       ///< of the decodes
  std::int32_t num_spec_decodes = 0;        ///< requests with drafts
  std::int32_t num_spec_decode_tokens = 0;  ///< of these
  std::int32_t num_actual_tokens = 0;       ///< of all requests
  std::vector<std::uint8_t> has_initial_state = {};          ///< [non-spec]; empty without prefills
  std::vector<std::int32_t> spec_query_start_loc = {};       ///< [spec + 1]; empty without spec
  std::vector<std::int32_t> non_spec_query_start_loc = {};   ///< [non-spec + 1]
  std::vector<std::int32_t> spec_state_indices_tensor = {};  ///< pages, [spec, 1 + most drafts]
  std::vector<std::int32_t> non_spec_state_indices_tensor = {};  ///< pages, [non-spec]
  std::vector<std::uint8_t> spec_sequence_masks = {};            ///< [num_reqs]; empty without spec
  std::vector<std::int32_t> spec_token_indx = {};      ///< rows of spec requests, ascending
  std::vector<std::int32_t> non_spec_token_indx = {};  ///< the other rows; empty without spec
  std::vector<std::int32_t> num_accepted_tokens = {};  ///< [spec], of their last step
  /// Of the prefills alone, from token 0 on; empty without any.
  ///@{
  std::vector<std::int32_t> prefill_query_start_loc = {};    ///< [num_prefills + 1]
  std::vector<std::int32_t> prefill_state_indices = {};      ///< [num_prefills]
  std::vector<std::uint8_t> prefill_has_initial_state = {};  ///< [num_prefills]
  std::vector<std::int32_t> chunk_indices = {};  ///< prefill and chunk of 64 tokens, [chunks, 2]
  std::vector<std::int32_t> chunk_offsets = {};  ///< first chunks, [num_prefills + 1]
  ///@}
  RecurrentMetadata metadata = {};  ///< on the device, all requests in the batch's order
};

/// Makes the metadata of gated delta nets from what attention is given (vLLM:
/// GDNAttentionMetadataBuilder). Not thread-safe.
class GDNAttentionMetadataBuilder {
 public:
  /// `spec`: of the layers (kMamba, mode kNone or kAlign). `null_block_id`: a page that stands for
  /// none; negative: there is no such page. Throws kInvalidArgument for other kinds and modes.
  GDNAttentionMetadataBuilder(const Context& context, KVCacheSpec spec,
                              std::int32_t null_block_id = -1);

  /// Of `batch`, query_start_loc, seq_lens, num_computed_tokens and block_table count. A request's
  /// states are in the pages of columns 0 … num_speculative_blocks of its row, with kAlign of those
  /// from the block of its last token on. Both lists, [num_reqs] or empty, are vLLM's: how many
  /// tokens of a request's last step were accepted, its bonus token included; and its drafts in
  /// this step, -1 for requests that are no decodes with drafts, whose accepted tokens are not
  /// read. Asynchronous; the result is valid until the next build(), on one in-order queue. Throws
  /// kInvalidArgument for lists of wrong lengths, drafts that are not the request's tokens but one,
  /// without drafts in any request prefills before decodes, and as RecurrentMetadataBuilder does.
  const GDNAttentionMetadata& build(cl_command_queue queue, const CommonAttentionMetadata& batch,
                                    std::span<const std::int32_t> num_accepted_tokens = {},
                                    std::span<const std::int32_t> num_decode_draft_tokens = {});

 private:
  RecurrentMetadataBuilder lists_;
  KVCacheSpec spec_;
  std::int32_t null_block_id_;
  GDNAttentionMetadata built_;
};

}  // namespace clattn
