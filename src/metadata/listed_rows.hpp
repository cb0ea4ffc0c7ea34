#pragma once

#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>

#include "metadata/key_window.hpp"
#include "metadata/tree_rows.hpp"
#include "shared/work_item.h"

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
  bool any() const { return spans || directions || first_keys || gaps(); }
  /// Whether rows may see keys with gaps between (ClaGapRow).
  bool gaps() const { return keep_keys || trees; }
  bool operator==(const ListRules&) const = default;
};

/// What a batch says of one request, as far as the rules look at it.
struct RequestRows {
  std::int32_t first_new = 0;  ///< position of the first query token
  std::int32_t query_len = 0;
  std::int32_t seq_len = 0;
  Direction direction = Direction::kCausal;
  std::int32_t first_key = 0;
  std::int32_t kept_end = 0;                 ///< keys from first_key to here are kept; 0: none
  std::span<const std::int32_t> spans = {};  ///< [number, 2]
  DraftTree tree = {};                       ///< empty for a chain, too
  bool is_listed = false;                    ///< all rows are, for another reason than a span

  /// Whether the rows of the tile of `count` query tokens from the position on must be listed.
  bool lists(std::int32_t position, std::int32_t count) const;
  bool has_gaps() const { return kept_end > 0 || !tree.empty(); }
};
RequestRows rows_of(const ListRules& rules, const CommonAttentionMetadata& batch,
                    std::int32_t request);

/// What the query at a position sees, apart from kept keys and trees. Neither end decreases from
/// one position to the next.
ClaListedRow listed_row(const KeyWindow& window, SpanRule rule, const RequestRows& request,
                        std::int32_t position);

/// Throws kInvalidArgument naming request, field, value and legal range for what the rules do not
/// allow, and for spans that overlap or do not ascend from position 0 on. Spans and keep_keys that
/// the rules ignore are checked, too: another layer may use them. The lengths must have been
/// checked.
void check_lists(const CommonAttentionMetadata& batch, const ListRules& rules);

/// Throws kUnsupported naming the call and the field, if the batch has one of these.
void refuse_lists(std::string_view call, const CommonAttentionMetadata& batch);

}  // namespace clattn::detail
