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
