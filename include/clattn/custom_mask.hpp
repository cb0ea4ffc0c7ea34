#pragma once

#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// Positions [start, end) of a request that attend to one another in both directions, such as the
/// tokens of an image.
struct MMSpan {
  std::int32_t request = 0;  ///< its place in the batch
  std::int32_t start = 0;    ///< first position
  std::int32_t end = 0;      ///< one past the last position
};

/// Each request's ranges, padded with the empty range (0, 0). Ends are exclusive.
struct MMPrefixRanges {
  std::vector<std::int32_t> ranges;  ///< [num_reqs, max_ranges, 2]: start, end
  std::int32_t max_ranges = 0;       ///< 0 = no request has a range
};

/// Groups spans by request, ascending. Spans without a position are dropped; spans of a request
/// that overlap are refused. vLLM: compute_mm_prefix_range_tensor.
MMPrefixRanges compute_mm_prefix_range(std::span<const MMSpan> spans, std::int32_t num_reqs);

/// What ForwardOptions::custom_mask takes, made on the host.
struct CustomMask {
  std::vector<std::uint8_t> rows;  ///< [num_actual_tokens, stride], 1 = the token may attend
  std::int64_t stride = 0;         ///< the batch's longest seq_len: custom_mask_stride
};

/// Causal attention that is bidirectional inside the ranges (prefix-LM, the tokens of an image): a
/// token sees the keys up to its own and, when it stands in a range, the whole of it. Positions of
/// ranges past a request's keys are not there yet and not seen.
///
/// A mask can only hide: `batch.causal` must be false, and the layer's configuration without a
/// sliding_window. A window of `sliding_window` keys, the own one included (0 = none), is part of
/// the mask instead; it does not cut ranges. vLLM: mm_prefix.
CustomMask make_mm_prefix_mask(const CommonAttentionMetadata& batch, const MMPrefixRanges& ranges,
                               std::int32_t sliding_window = 0);

}  // namespace clattn
