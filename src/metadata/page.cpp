#include <clattn/compat/page.hpp>
#include <string_view>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/page_list.hpp"

namespace clattn {

using detail::check_indptr, detail::throw_invalid_if, detail::to_size;

void detail::check_indptr(std::span<const std::int32_t> indptr, std::string_view name,
                          std::size_t num_reqs) {
  throw_invalid_if(indptr.size() != num_reqs + 1, "{} holds {} elements, legal: {} (num_reqs + 1)",
                   name, indptr.size(), num_reqs + 1);
  if (indptr[0] != 0) throw_invalid("{}[0] is {}, legal: 0", name, indptr[0]);
  for (std::size_t r = 0; r < num_reqs; ++r) {
    throw_invalid_if(indptr[r + 1] < indptr[r], "request {}: {}[{}] is {}, legal: at least {}", r,
                     name, r + 1, indptr[r + 1], indptr[r]);
  }
}

void detail::write_seq_lens(std::span<const std::int32_t> indptr,
                            std::span<const std::int32_t> last_page_len, std::int32_t page_size,
                            std::vector<std::int32_t>& seq_lens) {
  detail::check_at_least("page_size", page_size, 1);
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
    const std::int32_t full =
        pages == 0 ? 0 : detail::checked_mul(pages - 1, page_size, "seq_lens");
    seq_lens.push_back(detail::checked_add(full, last_page_len[r], "seq_lens"));
  }
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
  check_indptr(append_indptr, "append_indptr", seq_lens.size());
  throw_invalid_if(nnz < append_indptr.back(), "nnz is {}, legal: at least {} (append_indptr[{}])",
                   nnz, append_indptr.back(), seq_lens.size());
  BatchIndicesPositions result{std::vector<std::int32_t>(to_size(nnz), -1),
                               std::vector<std::int32_t>(to_size(nnz), 0)};
  for (std::size_t r = 0; r < seq_lens.size(); ++r) {
    const std::int32_t count = append_indptr[r + 1] - append_indptr[r];
    throw_invalid_if(seq_lens[r] < count,
                     "request {}: seq_lens is {}, legal: at least {} (its new tokens)", r,
                     seq_lens[r], count);
    for (std::int32_t i = 0; i < count; ++i) {
      const std::size_t token = to_size(append_indptr[r]) + to_size(i);
      result.batch_indices[token] = static_cast<std::int32_t>(r);
      result.positions[token] = seq_lens[r] - count + i;
    }
  }
  return result;
}

}  // namespace clattn
