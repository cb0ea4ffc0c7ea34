#include "metadata/page_list.hpp"

#include "base/checked.hpp"
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

}  // namespace clattn
