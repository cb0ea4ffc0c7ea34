#include <algorithm>
#include <clattn/custom_mask.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using detail::throw_invalid, detail::throw_invalid_if, detail::to_size;

void check(const CommonAttentionMetadata& batch, const MMPrefixRanges& ranges,
           std::int32_t sliding_window) {
  throw_invalid_if(batch.is_causal(),
                   "causal is true, legal: false: a mask cannot show keys that causality hides");
  if (sliding_window < 0) throw_invalid("sliding_window is {}, legal: >= 0", sliding_window);
  if (ranges.max_ranges < 0) throw_invalid("max_ranges is {}, legal: >= 0", ranges.max_ranges);
  const std::size_t wanted = to_size(batch.num_reqs) * to_size(ranges.max_ranges) * 2;
  throw_invalid_if(ranges.ranges.size() != wanted,
                   "ranges holds {} elements, legal: {} (num_reqs {} x max_ranges {} x 2)",
                   ranges.ranges.size(), wanted, batch.num_reqs, ranges.max_ranges);
  for (std::size_t i = 0; i < wanted; i += 2) {
    const std::int32_t start = ranges.ranges[i], end = ranges.ranges[i + 1];
    if (start >= 0 && start <= end) continue;
    throw_invalid("request {}: a range is {} … {}, legal: 0 <= start <= end",
                  i / 2 / to_size(ranges.max_ranges), start, end);
  }
}

}  // namespace

MMPrefixRanges compute_mm_prefix_range(std::span<const MMSpan> spans, std::int32_t num_reqs) {
  detail::check_at_least("num_reqs", num_reqs, 0);
  std::vector<std::vector<MMSpan>> rows(to_size(num_reqs));
  for (const MMSpan& span : spans) {
    throw_invalid_if(span.request < 0 || span.request >= num_reqs,
                     "multimodal span of request {}, legal: 0 … {} (num_reqs - 1)", span.request,
                     num_reqs - 1);
    throw_invalid_if(span.start < 0 || span.end < span.start,
                     "request {}: multimodal span [{}, {}), legal: 0 <= start <= end", span.request,
                     span.start, span.end);
    if (span.start < span.end) rows[to_size(span.request)].push_back(span);
  }
  std::size_t max_ranges = 0;
  for (auto& row : rows) {
    std::ranges::sort(row, {}, &MMSpan::start);
    for (std::size_t i = 1; i < row.size(); ++i) {
      if (row[i].start >= row[i - 1].end) continue;
      throw_invalid("request {}: multimodal span [{}, {}) overlaps [{}, {})", row[i].request,
                    row[i].start, row[i].end, row[i - 1].start, row[i - 1].end);
    }
    max_ranges = std::max(max_ranges, row.size());
  }
  MMPrefixRanges result{{}, static_cast<std::int32_t>(max_ranges)};
  for (const auto& row : rows) {
    for (const MMSpan& span : row) {
      result.ranges.insert(result.ranges.end(), {span.start, span.end});
    }
    result.ranges.resize(result.ranges.size() + 2 * (max_ranges - row.size()), 0);
  }
  return result;
}

CustomMask make_mm_prefix_mask(const CommonAttentionMetadata& batch, const MMPrefixRanges& ranges,
                               std::int32_t sliding_window) {
  CustomMask mask;
  mask.stride = detail::validate_sequences(batch);
  check(batch, ranges, sliding_window);
  mask.rows.assign(detail::checked_mul(to_size(batch.num_actual_tokens), to_size(mask.stride),
                                       "custom_mask: bytes"),
                   0);
  auto row = mask.rows.begin();
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int64_t keys = batch.seq_lens[r];
    const auto own =
        std::span(ranges.ranges)
            .subspan(r * to_size(ranges.max_ranges) * 2, to_size(ranges.max_ranges) * 2);
    const std::int64_t query_len = detail::query_len_of(batch, r);
    for (std::int64_t at = keys - query_len; at < keys; ++at, row += mask.stride) {
      const std::int64_t first =
          sliding_window > 0 ? std::max<std::int64_t>(at + 1 - sliding_window, 0) : 0;
      std::fill(row + first, row + at + 1, 1);
      for (std::size_t i = 0; i < own.size(); i += 2) {
        if (at < own[i] || at >= own[i + 1]) continue;
        std::fill(row + own[i], row + std::min<std::int64_t>(own[i + 1], keys), 1);
      }
    }
  }
  return mask;
}

}  // namespace clattn
