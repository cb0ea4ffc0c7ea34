#include <algorithm>
#include <clattn/compat/paged_bias.hpp>

#include "base/checked.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using detail::throw_invalid, detail::throw_invalid_if, detail::to_size;

/// Pages that each request's row of the block table has.
std::size_t check_sizes(std::span<const std::int32_t> q_seqlen,
                        std::span<const std::int32_t> kv_seqstarts,
                        std::span<const std::int32_t> kv_seqlen,
                        std::span<const std::int32_t> block_tables, std::int32_t page_size) {
  const std::size_t num_reqs = q_seqlen.size();
  throw_invalid_if(kv_seqlen.size() != num_reqs || kv_seqstarts.size() != num_reqs,
                   "kv_seqstarts and kv_seqlen hold {} and {} values, legal: {} each (q_seqlen's)",
                   kv_seqstarts.size(), kv_seqlen.size(), num_reqs);
  detail::check_at_least("page_size", page_size, 1);
  const std::size_t rows = std::max<std::size_t>(num_reqs, 1);
  throw_invalid_if(block_tables.size() % rows != 0,
                   "block_tables holds {} elements, legal: a multiple of the {} requests",
                   block_tables.size(), num_reqs);
  return block_tables.size() / rows;
}

/// Appends a request's lengths, after checking that its keys [start, start + count) lie within
/// [0, slots).
void append(PagedBias& bias, std::int32_t queries, std::int32_t start, std::int32_t count,
            std::int32_t page_size, std::int64_t slots) {
  const std::size_t r = bias.seq_lens.size();
  const std::int64_t end = std::int64_t{start} + count;
  throw_invalid_if(start < 0 || count < 0 || end > slots,
                   "request {}: its keys are [{}, {}), legal: within [0, {}) (pages x page_size)",
                   r, start, end, slots);
  if (queries < 0 || (bias.causal && queries > count)) {
    throw_invalid("request {}: q_seqlen is {}, legal: {}", r, queries,
                  bias.causal ? fmt::format("0 … {} (kv_seqlen)", count) : ">= 0");
  }
  bias.query_start_loc.push_back(
      detail::checked_add(bias.query_start_loc.back(), queries, "sum of q_seqlen"));
  bias.first_keys.push_back(count > 0 ? start % page_size : 0);
  bias.seq_lens.push_back(
      detail::checked_add(bias.first_keys.back(), count, "kv_seqlen and what is hidden before it"));
}

}  // namespace

PagedBias make_paged_bias(std::span<const std::int32_t> q_seqlen,
                          std::span<const std::int32_t> kv_seqstarts,
                          std::span<const std::int32_t> kv_seqlen,
                          std::span<const std::int32_t> block_tables, std::int32_t page_size,
                          bool causal) {
  const std::size_t columns =
      check_sizes(q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size);
  const auto slots = static_cast<std::int64_t>(
      detail::checked_mul(columns, to_size(page_size), "pages x page_size"));
  PagedBias bias;
  bias.causal = causal;
  bias.query_start_loc.push_back(0);
  for (std::size_t r = 0; r < q_seqlen.size(); ++r) {
    append(bias, q_seqlen[r], kv_seqstarts[r], kv_seqlen[r], page_size, slots);
    bias.block_table_stride = std::max<std::int64_t>(
        bias.block_table_stride, detail::page_count(bias.seq_lens.back(), page_size));
  }
  bias.block_table.assign(q_seqlen.size() * to_size(bias.block_table_stride), 0);
  for (std::size_t r = 0; r < q_seqlen.size(); ++r) {
    const auto row = block_tables.subspan(r * columns, columns);
    const std::size_t used = to_size(detail::page_count(bias.seq_lens[r], page_size));
    const std::size_t skipped = used > 0 ? to_size(kv_seqstarts[r] / page_size) : 0;
    std::copy_n(row.begin() + static_cast<std::ptrdiff_t>(skipped), used,
                bias.block_table.begin() +
                    static_cast<std::ptrdiff_t>(r * to_size(bias.block_table_stride)));
  }
  return bias;
}

CommonAttentionMetadata PagedBias::metadata(std::span<const std::int64_t> slot_mapping) const {
  auto batch = CommonAttentionMetadata::of(query_start_loc, seq_lens, block_table);
  batch.slot_mapping = slot_mapping;
  batch.causal = causal;
  if (needs_first_keys()) batch.first_keys = first_keys;
  return batch;
}

bool PagedBias::needs_first_keys() const {
  return std::ranges::any_of(first_keys, [](std::int32_t k) { return k > 0; });
}

template <bool kCausal>
PagedGappyKeysMask<kCausal> GappyKeysMask<kCausal>::make_paged(
    std::span<const std::int32_t> block_tables, std::int32_t page_size,
    std::int32_t notional_padding) const {
  detail::check_at_least("page_size", page_size, 1);
  throw_invalid_if(
      notional_padding < 1 || notional_padding % page_size != 0,
      "Notional padding should be divisible by the page size, but got notional_padding={}, "
      "page_size={}.",
      notional_padding, page_size);
  throw_invalid_if(
      kv_seqstarts.size() != q_seqlen.size() + 1 || kv_seqlen.size() != q_seqlen.size(),
      "kv_seqstarts and kv_seqlen hold {} and {} values, legal: {} and {} (q_seqlen's)",
      kv_seqstarts.size(), kv_seqlen.size(), q_seqlen.size() + 1, q_seqlen.size());
  std::vector<std::int32_t> starts;
  for (std::size_t r = 0; r < q_seqlen.size(); ++r) {
    const std::int64_t run = static_cast<std::int64_t>(r) * notional_padding;
    const std::int64_t start = kv_seqstarts[r] - run;
    throw_invalid_if(start < 0 || start + kv_seqlen[r] > notional_padding,
                     "request {}: its keys are [{}, {}), legal: within [{}, {}), its padding", r,
                     kv_seqstarts[r], std::int64_t{kv_seqstarts[r]} + kv_seqlen[r], run,
                     run + notional_padding);
    starts.push_back(static_cast<std::int32_t>(start));
  }
  return PagedGappyKeysMask<kCausal>::from_seqlens(q_seqlen, starts, kv_seqlen, block_tables,
                                                   page_size);
}

template struct GappyKeysMask<false>;
template struct GappyKeysMask<true>;

}  // namespace clattn
