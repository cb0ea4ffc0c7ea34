#include "metadata/page_list.hpp"

#include <clattn/compat/page.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

constexpr std::uint32_t kSignBit = 0x80000000U;

/// The top bit is set when id is outside [0, last_id]: id has it when negative, last_id - id when
/// id is larger. Unsigned, so that nothing overflows, and without a compare, so that compilers make
/// vectors of the plain loops below.
std::uint32_t range_bits(std::int32_t id, std::int32_t last_id) {
  const auto bits = static_cast<std::uint32_t>(id);
  return bits | (static_cast<std::uint32_t>(last_id) - bits);
}

}  // namespace

bool pages_in_range(const std::int32_t* row, std::size_t count, std::int32_t last_id) {
  std::uint32_t bad = 0;
  for (std::size_t i = 0; i < count; ++i) bad |= range_bits(row[i], last_id);
  return (bad & kSignBit) == 0;
}

bool append_pages(std::int32_t* __restrict dst, const std::int32_t* __restrict row,
                  std::size_t count, std::int32_t last_id) {
  std::uint32_t bad = 0;
#pragma GCC unroll 4  // a long table is bound by the loop's own instructions otherwise
  for (std::size_t i = 0; i < count; ++i) {
    bad |= range_bits(row[i], last_id);
    dst[i] = row[i];
  }
  return (bad & kSignBit) == 0;
}

void write_page_list(const CommonAttentionMetadata& batch, std::int32_t block_size,
                     std::int64_t num_blocks, const PageListOutput& output) {
  const std::int32_t last_id = last_block_id(num_blocks);
  std::int32_t at = 0;
  output.indptr[0] = 0;
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t seq_len = batch.seq_lens[r];
    const std::int32_t pages = page_count(seq_len, block_size);
    if (!append_pages(output.indices.data() + at, table_row(batch, r), to_size(pages), last_id))
      throw_bad_page_id(batch, block_size, num_blocks, r);
    at += pages;
    output.indptr[r + 1] = at;
    if (!output.last_page_len.empty())
      output.last_page_len[r] = pages == 0 ? 0 : seq_len - (pages - 1) * block_size;
  }
}

void check_indptr(std::span<const std::int32_t> indptr, std::string_view name,
                  std::size_t num_reqs) {
  throw_invalid_if(indptr.size() != num_reqs + 1, "{} holds {} elements, legal: {} (num_reqs + 1)",
                   name, indptr.size(), num_reqs + 1);
  if (indptr[0] != 0) throw_invalid("{}[0] is {}, legal: 0", name, indptr[0]);
  for (std::size_t r = 0; r < num_reqs; ++r) {
    throw_invalid_if(indptr[r + 1] < indptr[r], "request {}: {}[{}] is {}, legal: at least {}", r,
                     name, r + 1, indptr[r + 1], indptr[r]);
  }
}

void write_seq_lens(std::span<const std::int32_t> indptr,
                    std::span<const std::int32_t> last_page_len, std::int32_t page_size,
                    std::vector<std::int32_t>& seq_lens) {
  check_at_least("page_size", page_size, 1);
  check_indptr(indptr, "indptr", last_page_len.size());
  seq_lens.clear();
  seq_lens.reserve(last_page_len.size());
  for (std::size_t r = 0; r < last_page_len.size(); ++r) {
    const std::int32_t pages = indptr[r + 1] - indptr[r];
    const std::int32_t low = pages == 0 ? 0 : 1;
    const std::int32_t high = pages == 0 ? 0 : page_size;
    throw_invalid_if(last_page_len[r] < low || last_page_len[r] > high,
                     "request {}: last_page_len is {}, legal: {} … {} ({} pages of {})", r,
                     last_page_len[r], low, high, pages, page_size);
    const std::int32_t full = pages == 0 ? 0 : checked_mul(pages - 1, page_size, "seq_lens");
    seq_lens.push_back(checked_add(full, last_page_len[r], "seq_lens"));
  }
}

}  // namespace clattn::detail

namespace clattn {

PagedKVMetadata build_paged_kv_metadata(const CommonAttentionMetadata& batch,
                                        std::int32_t block_size) {
  const detail::BatchSummary summary = detail::validate_tables(batch, block_size);
  PagedKVMetadata result;
  result.indptr.resize(detail::to_size(batch.num_reqs) + 1);
  result.indices.resize(detail::to_size(summary.num_pages));
  result.last_page_len.resize(detail::to_size(batch.num_reqs));
  detail::write_page_list(batch, block_size, -1,
                          {result.indptr, result.indices, result.last_page_len});
  return result;
}

std::vector<std::int32_t> get_seq_lens(std::span<const std::int32_t> indptr,
                                       std::span<const std::int32_t> last_page_len,
                                       std::int32_t page_size) {
  std::vector<std::int32_t> seq_lens;
  detail::write_seq_lens(indptr, last_page_len, page_size, seq_lens);
  return seq_lens;
}

BatchIndicesPositions get_batch_indices_positions(std::span<const std::int32_t> append_indptr,
                                                  std::span<const std::int32_t> seq_lens,
                                                  std::int64_t nnz) {
  detail::check_indptr(append_indptr, "append_indptr", seq_lens.size());
  detail::throw_invalid_if(nnz < append_indptr.back(),
                           "nnz is {}, legal: at least {} (append_indptr[{}])", nnz,
                           append_indptr.back(), seq_lens.size());
  BatchIndicesPositions result{std::vector<std::int32_t>(detail::to_size(nnz), -1),
                               std::vector<std::int32_t>(detail::to_size(nnz), 0)};
  for (std::size_t r = 0; r < seq_lens.size(); ++r) {
    const std::int32_t count = append_indptr[r + 1] - append_indptr[r];
    detail::throw_invalid_if(seq_lens[r] < count,
                             "request {}: seq_lens is {}, legal: at least {} (its new tokens)", r,
                             seq_lens[r], count);
    for (std::int32_t i = 0; i < count; ++i) {
      const std::size_t token = detail::to_size(append_indptr[r]) + detail::to_size(i);
      result.batch_indices[token] = static_cast<std::int32_t>(r);
      result.positions[token] = seq_lens[r] - count + i;
    }
  }
  return result;
}

}  // namespace clattn
