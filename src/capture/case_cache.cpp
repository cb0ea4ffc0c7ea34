#include "capture/case_cache.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <concepts>
#include <set>
#include <utility>

#include "base/error.hpp"

namespace clattn::detail {
namespace {

using npy::NpyArray;

/// Each page once. Throws unless the cache has all of them.
std::set<std::int32_t> distinct(const std::vector<std::int32_t>& pages, std::int64_t num_blocks) {
  std::set<std::int32_t> each(pages.begin(), pages.end());
  if (!each.empty() && (*each.begin() < 0 || *each.rbegin() >= num_blocks)) {
    throw_invalid("block_table: page {}, legal: 0 … {} (the cache's num_blocks - 1)",
                  *each.begin() < 0 ? *each.begin() : *each.rbegin(), num_blocks - 1);
  }
  return each;
}

/// One of the two functions that say where a cache's elements lie.
template <typename Cache>
using ElementAt = std::int64_t (Cache::*)(std::int64_t block, std::int64_t token, std::int64_t head,
                                          std::int64_t dim) const;

/// Keys or values in logical order, [num_blocks, block_size, num_kv_heads, head_size]: `pages` as
/// they are, zeros elsewhere. A page's first element is that of lowest place in `memory`.
template <typename Cache>
NpyArray read_pages(const Queue& queue, const Cache& cache, cl_mem memory,
                    ElementAt<Cache> element_at, const std::set<std::int32_t>& pages) {
  const std::size_t element = element_size_bytes(cache.dtype);
  const auto at = [&](std::int64_t page, std::int64_t token, std::int64_t head, std::int64_t dim) {
    return to_size((cache.*element_at)(page, token, head, dim)) * element;
  };
  const std::size_t page_bytes =
      to_size(cache.block_size) * to_size(cache.num_kv_heads) * to_size(cache.head_size) * element;
  NpyArray array{std::string(npy::descr_of(cache.dtype)),
                 {cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size},
                 std::vector<std::byte>(
                     checked_mul(to_size(cache.num_blocks), page_bytes, "captured kv_cache"))};
  std::vector<std::size_t> places;  // in logical order, from a page's first element on
  places.reserve(page_bytes / element);
  for (std::int64_t token = 0; token < cache.block_size; ++token) {
    for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
      for (std::int64_t dim = 0; dim < cache.head_size; ++dim)
        places.push_back(at(0, token, head, dim) - at(0, 0, 0, 0));
    }
  }
  const std::size_t span = std::ranges::max(places) + element;
  for (const std::int32_t page : pages) {
    const std::vector<std::byte> stored = read(queue, memory, at(page, 0, 0, 0), span);
    std::byte* to = array.data.data() + to_size(page) * page_bytes;
    for (const std::size_t place : places) {
      std::memcpy(to, &stored[place], element);
      to += element;
    }
  }
  return array;
}

template <typename Cache>
void read_planes(const Queue& queue, const Cache& cache, cl_mem key, cl_mem value,
                 const std::vector<std::int32_t>& pages, const TakeArray& take) {
  const std::set<std::int32_t> read = distinct(pages, cache.num_blocks);
  take("key_cache", read_pages(queue, cache, key, &Cache::key_at, read));
  take("value_cache", read_pages(queue, cache, value, &Cache::value_at, read));
}

std::string_view layout_of(const KVCache& cache) {
  if (cache.keys_by_dim()) return to_string(KVCacheLayout::kHDN);
  return to_string(cache.head_stride > cache.token_stride ? KVCacheLayout::kHND
                                                          : KVCacheLayout::kNHD);
}

std::string_view layout_of(const PackedKVCache&) {
  return "packed";
}

}  // namespace

std::vector<std::byte> read(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                            std::size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  if (size_bytes > 0) queue.read(Buffer::adopt(memory), bytes, offset_bytes);
  return bytes;
}

std::vector<std::byte> read_rows(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                                 std::int64_t count, std::size_t row_bytes,
                                 std::size_t stride_bytes) {
  if (count == 0) return {};
  const std::vector<std::byte> span =
      read(queue, memory, offset_bytes, to_size(count - 1) * stride_bytes + row_bytes);
  std::vector<std::byte> rows;
  rows.reserve(to_size(count) * row_bytes);
  for (std::size_t i = 0; i < to_size(count); ++i) {
    const auto row = span.begin() + static_cast<std::ptrdiff_t>(i * stride_bytes);
    rows.insert(rows.end(), row, row + static_cast<std::ptrdiff_t>(row_bytes));
  }
  return rows;
}

npy::NpyArray read_tensor(const Queue& queue, const TensorRef& tensor, DType dtype,
                          std::vector<std::int64_t> shape, std::optional<std::int64_t> num_rows) {
  const std::size_t element = element_size_bytes(dtype);
  std::int64_t row = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) row *= shape[i];
  const std::int64_t stride = tensor.token_stride == 0 ? row : tensor.token_stride;
  std::vector<std::byte> rows =
      read_rows(queue, tensor.buffer, to_size(tensor.offset) * element, num_rows.value_or(shape[0]),
                to_size(row) * element, to_size(stride) * element);
  rows.resize(to_size(shape[0] * row) * element);
  return {std::string(npy::descr_of(dtype)), std::move(shape), std::move(rows)};
}

void read_cache(const Queue& queue, const KVCache& cache, const std::vector<std::int32_t>& pages,
                const TakeArray& take) {
  const cl_mem memory = cache.buffer.handle();
  read_planes(queue, cache, memory, memory, pages, take);
}

void read_cache(const Queue& queue, const PackedKVCache& cache,
                const std::vector<std::int32_t>& pages, const TakeArray& take) {
  read_planes(queue, cache, cache.key, cache.value, pages, take);
}

/// Latent rows stand without gaps: [num_blocks, block_size, kv_lora_rank + rope_dim].
void read_cache(const Queue& queue, const MLACache& cache, const std::vector<std::int32_t>& pages,
                const TakeArray& take) {
  const std::int64_t width = std::int64_t{cache.kv_lora_rank} + cache.rope_dim;
  const std::size_t page_bytes =
      to_size(cache.block_size) * to_size(width) * element_size_bytes(cache.dtype);
  NpyArray array{std::string(npy::descr_of(cache.dtype)),
                 {cache.num_blocks, cache.block_size, width},
                 std::vector<std::byte>(
                     checked_mul(to_size(cache.num_blocks), page_bytes, "captured kv_cache"))};
  for (const std::int32_t page : distinct(pages, cache.num_blocks)) {
    const std::size_t at = to_size(page) * page_bytes;
    const std::vector<std::byte> rows = read(queue, cache.buffer.handle(), at, page_bytes);
    std::ranges::copy(rows, array.data.begin() + static_cast<std::ptrdiff_t>(at));
  }
  take("kv_cache", array);
}

template <typename Cache>
void add_storage_keys(CaseKeys& keys, const Cache& cache) {
  keys.text("kv_cache_dtype", to_string(cache.dtype));
  if constexpr (!std::same_as<Cache, MLACache>) keys.text("layout", layout_of(cache));
}
template void add_storage_keys(CaseKeys& keys, const KVCache& cache);
template void add_storage_keys(CaseKeys& keys, const PackedKVCache& cache);
template void add_storage_keys(CaseKeys& keys, const MLACache& cache);

template <typename Cache>
void add_cache_keys(CaseKeys& keys, const Queue& queue, const Cache& cache) {
  add_storage_keys(keys, cache);
  if (!cache.scales) {
    keys.add("k_scale", 1).add("v_scale", 1);
    return;
  }
  const std::int64_t heads = cache.scales_per_head ? cache.num_kv_heads : 1;
  std::vector<std::string> factors;
  for (const float scale : read_as<float>(queue, cache.scales.handle(), 0, 2 * heads)) {
    factors.push_back(CaseKeys::number(scale));
  }
  const auto text = [&](auto begin) {
    return cache.scales_per_head ? fmt::format("[{}]", fmt::join(begin, begin + heads, ", "))
                                 : *begin;
  };
  keys.add("k_scale", text(factors.begin())).add("v_scale", text(factors.begin() + heads));
}
template void add_cache_keys(CaseKeys& keys, const Queue& queue, const KVCache& cache);
template void add_cache_keys(CaseKeys& keys, const Queue& queue, const PackedKVCache& cache);

void add_cache_keys(CaseKeys& keys, const Queue& queue, const MLACache& cache) {
  const float scale = cache.scale ? read_as<float>(queue, cache.scale.handle(), 0, 1).front() : 1;
  add_storage_keys(keys, cache);
  keys.number("k_scale", scale);
}

}  // namespace clattn::detail
