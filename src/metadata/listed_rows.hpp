#pragma once

#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>

#include "metadata/key_window.hpp"
#include "metadata/tree_rows.hpp"
#include "shared/sight.h"

namespace clattn::detail {

/// Which lists of a batch a layer uses, by its configuration. The rows that they concern are listed
/// for kernels (ClaListedRow).
struct ListRules {
  bool spans = false;
  bool directions = false;
  bool first_keys = false;
  bool keep_keys = false;
  bool trees = false;
  SpanRule span_rule = SpanRule::kWhole;
  /// What of these only the device knows (attention/list_rows.cl).
  ///@{
  bool device_directions = false;
  bool device_trees = false;  ///< a batch's tree_start_loc says how many nodes there are at most
  ///@}
  bool any() const { return spans || directions || first_keys || gaps(); }
  /// Whether rows may see keys with gaps between (ClaGapRow).
  bool gaps() const { return keep_keys || trees; }
  bool operator==(const ListRules&) const = default;
};

/// What a batch says of one request, as far as the rules look at it.
struct RequestRows : ClaRequestRows {
  std::span<const std::int32_t> spans = {};  ///< [number, 2]
  DraftTree tree = {};                       ///< empty for a chain, too
  bool is_listed = false;                    ///< all rows are, for another reason than a span

  std::int32_t first_new() const { return seq_len - query_len; }  ///< position
  /// Whether the rows of the tile of `count` query tokens from the position on must be listed.
  bool lists(std::int32_t position, std::int32_t count) const;
  bool has_gaps() const { return kept_end > 0 || !tree.empty(); }
};
/// What the rows of a request see as far as the host knows it: where the device decides, they are
/// as `causal` says and drafts are chains.
RequestRows rows_of(const ListRules& rules, const CommonAttentionMetadata& batch,
                    std::int32_t request);
/// The same for `query_len` query tokens, and what rows see at most where the device decides: a
/// canvas sees what other directions let a row see, and roots alone have the widest window.
RequestRows widest_rows_of(const ListRules& rules, const CommonAttentionMetadata& batch,
                           std::int32_t request, std::int32_t query_len);

/// The span that holds the position.
ClaSpan span_at(const RequestRows& request, std::int64_t position);

/// Throws kInvalidArgument naming request, field, value and legal range for what the rules do not
/// allow, and for spans that overlap or do not ascend from position 0 on. Spans and keep_keys that
/// the rules ignore are checked, too: another layer may use them. The lengths must have been
/// checked.
void check_lists(const CommonAttentionMetadata& batch, const ListRules& rules);

/// Throws kUnsupported naming the call and the field, if the batch has one of these.
void refuse_lists(std::string_view call, const CommonAttentionMetadata& batch);

}  // namespace clattn::detail
