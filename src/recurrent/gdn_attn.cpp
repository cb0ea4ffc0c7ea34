#include <algorithm>
#include <clattn/gdn_attn.hpp>
#include <numeric>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {

namespace {

using detail::ceil_div, detail::throw_invalid_if, detail::to_size;

constexpr std::int32_t kGdnChunk = 64;  // FLA_CHUNK_SIZE
constexpr std::string_view kGdnBuild = "GDNAttentionMetadataBuilder::build";

KVCacheSpec checked_gdn_spec(KVCacheSpec spec) {
  throw_invalid_if(spec.kind != KVCacheKind::kMamba,
                   "GDNAttentionMetadataBuilder: spec is of kind {}, legal: mamba",
                   to_string(spec.kind));
  throw_invalid_if(spec.mamba_cache_mode == MambaCacheMode::kAll,
                   "GDNAttentionMetadataBuilder: mamba_cache_mode is all, legal: none, align");
  static_cast<void>(spec.page_size_bytes());  // checks the other fields
  return spec;
}

/// A step, request by request.
struct GdnStep {
  const CommonAttentionMetadata& batch;
  std::span<const std::int32_t> accepted, drafts;
  bool any_draft = false;

  std::size_t num_reqs() const { return to_size(batch.num_reqs); }
  std::int32_t tokens(std::size_t r) const {
    return batch.query_start_loc[r + 1] - batch.query_start_loc[r];
  }
  /// Whether its state is that after the accepted tokens of its last step.
  bool was_spec(std::size_t r) const {
    return !drafts.empty() && !accepted.empty() && drafts[r] >= 0;
  }
  bool is_spec(std::size_t r) const { return any_draft && drafts[r] >= 0; }
  bool has_state(std::size_t r) const {
    return batch.num_computed_tokens.empty() ? batch.seq_lens[r] > tokens(r)
                                             : batch.num_computed_tokens[r] > 0;
  }
};

void check_gdn_length(std::string_view field, std::size_t length, std::size_t legal) {
  throw_invalid_if(length != legal, "{}: {} has {} elements, legal: {}", kGdnBuild, field, length,
                   legal);
}

void check_gdn_step(const GdnStep& step, const KVCacheSpec& spec) {
  const CommonAttentionMetadata& batch = step.batch;
  throw_invalid_if(batch.num_reqs < 0, "{}: num_reqs is {}, legal: >= 0", kGdnBuild,
                   batch.num_reqs);
  check_gdn_length("query_start_loc", batch.query_start_loc.size(), step.num_reqs() + 1);
  check_gdn_length("seq_lens", batch.seq_lens.size(), step.num_reqs());
  if (!batch.num_computed_tokens.empty())
    check_gdn_length("num_computed_tokens", batch.num_computed_tokens.size(), step.num_reqs());
  if (!step.drafts.empty())
    check_gdn_length("num_decode_draft_tokens", step.drafts.size(), step.num_reqs());
  if (step.any_draft || !step.accepted.empty())
    check_gdn_length("num_accepted_tokens", step.accepted.size(), step.num_reqs());
  for (std::size_t r = 0; r < step.num_reqs(); ++r) {
    throw_invalid_if(step.tokens(r) < 0 || step.tokens(r) > batch.seq_lens[r],
                     "{}: request {} has {} query tokens, legal: 0 … {} (seq_len)", kGdnBuild, r,
                     step.tokens(r), batch.seq_lens[r]);
    if (step.drafts.empty() || step.drafts[r] < 0) continue;
    throw_invalid_if(
        step.drafts[r] > spec.num_speculative_blocks || step.drafts[r] != step.tokens(r) - 1,
        "{}: num_decode_draft_tokens[{}] is {}, legal: {} (its query tokens but one), at most {} "
        "(num_speculative_blocks); or -1",
        kGdnBuild, r, step.drafts[r], step.tokens(r) - 1, spec.num_speculative_blocks);
  }
}

/// Pages of a request's states, column after column: all that drafts may need, or one.
std::span<const std::int32_t> state_pages(const GdnStep& step, const KVCacheSpec& spec,
                                          std::size_t r) {
  const CommonAttentionMetadata& batch = step.batch;
  const std::int64_t first = spec.mamba_cache_mode == MambaCacheMode::kAlign
                                 ? std::max(batch.seq_lens[r] - 1, 0) / spec.block_size
                                 : 0;
  const std::int64_t count = step.was_spec(r) ? 1 + spec.num_speculative_blocks : 1;
  throw_invalid_if(batch.block_table_stride < first + count,
                   "{}: block_table has {} columns, legal: at least {} (request {})", kGdnBuild,
                   batch.block_table_stride, first + count, r);
  const std::size_t at = r * to_size(batch.block_table_stride) + to_size(first);
  throw_invalid_if(batch.block_table.size() < at + to_size(count),
                   "{}: block_table has {} elements, legal: [num_reqs, {}]", kGdnBuild,
                   batch.block_table.size(), batch.block_table_stride);
  return batch.block_table.subspan(at, to_size(count));
}

void append_rows(std::vector<std::int32_t>& rows, std::int32_t first, std::int32_t count) {
  rows.resize(rows.size() + to_size(count));
  std::iota(rows.end() - count, rows.end(), first);
}

/// The lists of both classes. Requests that drafts stand beside are prefills.
GDNAttentionMetadata gdn_lists(const GdnStep& step, const KVCacheSpec& spec) {
  GDNAttentionMetadata made;
  made.non_spec_query_start_loc = {0};
  if (step.any_draft) made.spec_query_start_loc = {0};
  for (std::size_t r = 0; r < step.num_reqs(); ++r) {
    const auto pages = state_pages(step, spec, r);
    const bool is_spec = step.is_spec(r);
    auto& starts = is_spec ? made.spec_query_start_loc : made.non_spec_query_start_loc;
    starts.push_back(starts.back() + step.tokens(r));
    auto& indices = is_spec ? made.spec_state_indices_tensor : made.non_spec_state_indices_tensor;
    indices.insert(indices.end(), pages.begin(), is_spec ? pages.end() : pages.begin() + 1);
    if (is_spec) made.num_accepted_tokens.push_back(step.accepted[r]);
    if (!is_spec) made.has_initial_state.push_back(step.has_state(r) ? 1 : 0);
    if (!step.any_draft) continue;
    made.spec_sequence_masks.push_back(is_spec ? 1 : 0);
    append_rows(is_spec ? made.spec_token_indx : made.non_spec_token_indx,
                step.batch.query_start_loc[r], step.tokens(r));
    if (!is_spec && step.tokens(r) > 0) ++made.num_prefills;
  }
  made.num_actual_tokens = step.batch.query_start_loc.back();
  return made;
}

void count_gdn_tokens(GDNAttentionMetadata& made, const GdnStep& step) {
  if (step.any_draft) {
    made.num_spec_decodes = static_cast<std::int32_t>(made.num_accepted_tokens.size());
    made.num_spec_decode_tokens = made.spec_query_start_loc.back();
    made.num_prefill_tokens = made.non_spec_query_start_loc.back();
    return;
  }
  CommonAttentionMetadata own = step.batch;
  own.num_actual_tokens = made.num_actual_tokens;
  own.max_query_len = 0;
  const BatchSplit split = split_decodes_and_prefills(own);
  made.num_decodes = split.num_decodes;
  made.num_decode_tokens = split.num_decode_tokens;
  made.num_prefills = split.num_prefills;
  made.num_prefill_tokens = split.num_prefill_tokens;
}

/// What only prefills need, the last of the requests without drafts.
void list_prefills(GDNAttentionMetadata& made) {
  if (made.num_prefills == 0) {
    made.has_initial_state.clear();
    return;
  }
  const std::size_t first = to_size(made.num_decodes);
  const auto behind = [&](const auto& list) {
    return std::vector(list.begin() + made.num_decodes, list.end());
  };
  made.prefill_query_start_loc = behind(made.non_spec_query_start_loc);
  for (std::int32_t& start : made.prefill_query_start_loc)
    start -= made.non_spec_query_start_loc[first];
  made.prefill_state_indices = behind(made.non_spec_state_indices_tensor);
  made.prefill_has_initial_state = behind(made.has_initial_state);
  made.chunk_offsets = {0};
  for (std::size_t r = 0; r + 1 < made.prefill_query_start_loc.size(); ++r) {
    const std::int32_t chunks =
        ceil_div(made.prefill_query_start_loc[r + 1] - made.prefill_query_start_loc[r], kGdnChunk);
    for (std::int32_t chunk = 0; chunk < chunks; ++chunk)
      made.chunk_indices.insert(made.chunk_indices.end(), {static_cast<std::int32_t>(r), chunk});
    made.chunk_offsets.push_back(made.chunk_offsets.back() + chunks);
  }
}

}  // namespace

GDNAttentionMetadataBuilder::GDNAttentionMetadataBuilder(const Context& context, KVCacheSpec spec,
                                                         std::int32_t null_block_id)
    : lists_(context), spec_(checked_gdn_spec(std::move(spec))), null_block_id_(null_block_id) {}

const GDNAttentionMetadata& GDNAttentionMetadataBuilder::build(
    cl_command_queue queue, const CommonAttentionMetadata& batch,
    std::span<const std::int32_t> num_accepted_tokens,
    std::span<const std::int32_t> num_decode_draft_tokens) {
  const bool any_draft =
      std::ranges::any_of(num_decode_draft_tokens, [](std::int32_t count) { return count > 0; });
  const GdnStep step{batch, num_accepted_tokens, num_decode_draft_tokens, any_draft};
  check_gdn_step(step, spec_);
  GDNAttentionMetadata made = gdn_lists(step, spec_);
  count_gdn_tokens(made, step);

  const std::int32_t columns = num_accepted_tokens.empty() ? 1 : 1 + spec_.num_speculative_blocks;
  std::vector<std::int32_t> indices(step.num_reqs() * to_size(columns), -1), accepted;
  std::vector<std::uint8_t> initial;
  for (std::size_t r = 0; r < step.num_reqs(); ++r) {
    std::ranges::copy(state_pages(step, spec_, r),
                      indices.begin() + static_cast<std::ptrdiff_t>(r * to_size(columns)));
    initial.push_back(step.has_state(r) ? 1 : 0);
    if (!num_accepted_tokens.empty())
      accepted.push_back(step.was_spec(r) ? num_accepted_tokens[r] : -1);
  }
  list_prefills(made);
  made.metadata = lists_.build(queue, {.query_start_loc = batch.query_start_loc,
                                       .state_indices = indices,
                                       .state_columns = columns,
                                       .has_initial_state = initial,
                                       .num_accepted_tokens = accepted,
                                       .null_block_id = null_block_id_});
  built_ = std::move(made);
  return built_;
}

}  // namespace clattn
