#pragma once

#include <array>
#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// How far each request of a batch has got, in batch order; all spans are [num_reqs].
struct RequestProgress {
  std::span<const std::int32_t> num_scheduled_tokens = {};  ///< query tokens of this step
  std::span<const std::int32_t> num_computed_tokens = {};  ///< tokens in the cache before this step
  std::span<const std::int32_t> num_prompt_tokens = {};    ///< of the whole prompt
};

/// Two batch rows that change places.
using RowSwap = std::array<std::int32_t, 2>;

/// Brings a batch into four regions: decodes, short extends, long extends, first-chunk prefills
/// (vLLM since 2026). A request with nothing computed is a prefill; of the others, more than
/// `decode_threshold` scheduled tokens make a long extend, fewer a decode once the prompt is
/// computed and a short extend before. Rows that stand in their region stay; those that move keep
/// their order inside a region. Writes to `order` which old index is at each new place, and to
/// `swaps`, if given, the row swaps that turn the old order into it, as few as reach it. Returns
/// whether anything moved. Allocates only for `swaps`.
bool reorder_batch_to_split_decodes_and_prefills(const RequestProgress& requests,
                                                 std::int32_t decode_threshold,
                                                 std::span<std::int32_t> order,
                                                 std::vector<RowSwap>* swaps = nullptr);

/// Whether draft tokens are computed one after the other or all at once.
enum class Drafting : std::uint8_t { kSequential, kParallel };

/// The decode threshold of a backend that runs speculative tokens as decodes: 1 +
/// num_speculative_tokens, 1 + twice as many where drafting is parallel.
std::int32_t reorder_batch_threshold(std::int32_t num_speculative_tokens,
                                     Drafting drafting = Drafting::kSequential);

/// What split_decodes_and_prefills() takes beyond the batch.
struct SplitOptions {
  std::int32_t decode_threshold = 1;  ///< most query tokens of a request that counts as a decode
  /// All decodes have the query length of the first request that has query tokens: the next one
  /// that differs begins the prefills.
  bool require_uniform = false;
  /// false: requests marked in `is_prefilling` are prefills however short their queries are.
  bool treat_short_extends_as_decodes = true;
  /// [num_reqs], 1 = the prompt is not computed yet; needed unless treat_short_extends_as_decodes.
  std::span<const std::uint8_t> is_prefilling = {};
};

/// Where a batch in the order of the four regions divides: everything from the first prefill on
/// counts as prefill, so short first chunks may stand after long ones (unlike the overload by
/// threshold alone, which refuses them). A request without query tokens (padding of a captured
/// batch) never begins the prefills, whatever is_prefilling says of it: a batch of decodes and of
/// such rows is all decodes. vLLM: split_decodes_and_prefills since 2026. Reads
/// query_start_loc, max_query_len (0 = unknown), num_reqs and num_actual_tokens.
BatchSplit split_decodes_and_prefills(const CommonAttentionMetadata& batch,
                                      const SplitOptions& options);

/// A batch as decodes, then extends (more than the threshold of tokens, with context), then
/// prefills (more than the threshold, without).
struct ExtendSplit {
  std::int32_t num_decodes = 0;         ///< requests
  std::int32_t num_extends = 0;         ///< requests
  std::int32_t num_prefills = 0;        ///< requests
  std::int32_t num_decode_tokens = 0;   ///< query tokens
  std::int32_t num_extend_tokens = 0;   ///< query tokens
  std::int32_t num_prefill_tokens = 0;  ///< query tokens
  bool operator==(const ExtendSplit&) const = default;
};

/// Requests with context that stand after a longer kind are refused by name; requests without
/// context and within the threshold count with the side they stand on. Reads what
/// split_decodes_and_prefills() reads, and seq_lens.
ExtendSplit split_decodes_prefills_and_extends(const CommonAttentionMetadata& batch,
                                               std::int32_t decode_threshold = 1);

/// Requests [begin, end).
struct RequestRange {
  std::int32_t begin = 0;  ///< first request
  std::int32_t end = 0;    ///< one past the last request
  bool operator==(const RequestRange&) const = default;
};

/// Cuts prefills into runs of requests whose seq_lens sum to at most `workspace_size` tokens, each
/// run as long as it can be. `request_offset` is added to all indices. A request longer than the
/// workspace is refused.
std::vector<RequestRange> split_prefill_chunks(std::span<const std::int32_t> seq_lens,
                                               std::int64_t workspace_size,
                                               std::int32_t request_offset = 0);

}  // namespace clattn
