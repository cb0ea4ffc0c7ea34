#include "capture/case_cache.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "capture/read.hpp"

namespace clattn::detail {
namespace {

using npy::NpyArray;

/// Each page once. Throws unless the cache has all of them.
std::vector<std::int32_t> distinct(std::vector<std::int32_t> pages, std::int64_t num_blocks) {
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  if (!pages.empty() && (pages.front() < 0 || pages.back() >= num_blocks)) {
    throw_invalid("block_table: page {}, legal: 0 … {} (the cache's num_blocks - 1)",
                  pages.front() < 0 ? pages.front() : pages.back(), num_blocks - 1);
  }
  return pages;
}

/// One of the two functions that say where a cache's elements lie.
template <typename Cache>
using ElementAt = std::int64_t (Cache::*)(std::int64_t block, std::int64_t token, std::int64_t head,
                                          std::int64_t dim) const;

/// Keys or values in logical order, [num_blocks, block_size, num_kv_heads, head_size]: `pages` as
/// they are, zeros elsewhere. A page's first element is that of lowest place in `memory`.
template <typename Cache>
NpyArray read_pages(const Queue& queue, const Cache& cache, cl_mem memory,
                    ElementAt<Cache> element_at, std::span<const std::int32_t> pages) {
  const std::size_t element = element_size_bytes(cache.dtype);
  const auto at = [&](std::int64_t page, std::int64_t token, std::int64_t head, std::int64_t dim) {
    return size_of((cache.*element_at)(page, token, head, dim)) * element;
  };
  const std::size_t page_bytes =
      size_of(cache.block_size) * size_of(cache.num_kv_heads) * size_of(cache.head_size) * element;
  NpyArray array{std::string(npy::descr_of(cache.dtype)),
                 {cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size},
                 std::vector<std::byte>(
                     checked_mul(size_of(cache.num_blocks), page_bytes, "captured kv_cache"))};
  std::size_t highest = 0;  // place, from the page's first element on
  for (std::int64_t token = 0; token < cache.block_size; ++token) {
    for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
      for (std::int64_t dim = 0; dim < cache.head_size; ++dim)
        highest = std::max(highest, at(0, token, head, dim) - at(0, 0, 0, 0));
    }
  }
  for (const std::int32_t page : pages) {
    const std::size_t begin = at(page, 0, 0, 0);
    const std::vector<std::byte> stored = read(queue, memory, begin, highest + element);
    std::byte* to = array.data.data() + size_of(page) * page_bytes;
    for (std::int64_t token = 0; token < cache.block_size; ++token) {
      for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
        for (std::int64_t dim = 0; dim < cache.head_size; ++dim, to += element)
          std::memcpy(to, &stored[at(page, token, head, dim) - begin], element);
      }
    }
  }
  return array;
}

template <typename Cache>
void add_pages(const CaseWriter& writer, const Queue& queue, const Cache& cache, cl_mem key,
               cl_mem value, std::vector<std::int32_t> pages) {
  pages = distinct(std::move(pages), cache.num_blocks);
  writer.add("key_cache", read_pages(queue, cache, key, &Cache::key_at, pages));
  writer.add("value_cache", read_pages(queue, cache, value, &Cache::value_at, pages));
}

std::string_view layout_of(const KVCache& cache) {
  if (cache.keys_by_dim()) return to_string(KVCacheLayout::kHDN);
  return to_string(cache.head_stride > cache.token_stride ? KVCacheLayout::kHND
                                                          : KVCacheLayout::kNHD);
}

std::string_view layout_of(const PackedKVCache&) {
  return kPackedLayout;
}

template <typename Cache>
std::string storage_of(const Cache& cache) {
  return fmt::format(",\n  \"kv_cache_dtype\": \"{}\",\n  \"layout\": \"{}\"",
                     to_string(cache.dtype), layout_of(cache));
}

/// The keys of a cache of K and V.
template <typename Cache>
std::string keys_of(const Queue& queue, const Cache& cache) {
  std::array<std::string, 2> scales = {"1", "1"};
  if (cache.scales) {
    const std::int64_t heads = cache.scales_per_head ? cache.num_kv_heads : 1;
    std::vector<std::string> factors;
    for (const float scale : read_as<float>(queue, cache.scales.handle(), 0, 2 * heads)) {
      factors.push_back(number(scale));
    }
    const auto middle = factors.begin() + heads;
    const bool list = cache.scales_per_head;
    const auto text = [&](auto begin, auto end) {
      return list ? fmt::format("[{}]", fmt::join(begin, end, ", ")) : *begin;
    };
    scales = {text(factors.begin(), middle), text(middle, factors.end())};
  }
  return storage_of(cache) +
         fmt::format(",\n  \"k_scale\": {},\n  \"v_scale\": {}", scales[0], scales[1]);
}

}  // namespace

std::string number(float value) {
  return std::isfinite(value) ? fmt::format("{}", value) : fmt::format("\"{}\"", value);
}

void add_cache(const CaseWriter& writer, const Queue& queue, const KVCache& cache,
               std::vector<std::int32_t> pages) {
  add_pages(writer, queue, cache, cache.buffer.handle(), cache.buffer.handle(), std::move(pages));
}

void add_cache(const CaseWriter& writer, const Queue& queue, const PackedKVCache& cache,
               std::vector<std::int32_t> pages) {
  add_pages(writer, queue, cache, cache.key, cache.value, std::move(pages));
}

/// Latent rows stand without gaps: [num_blocks, block_size, kv_lora_rank + rope_dim].
void add_cache(const CaseWriter& writer, const Queue& queue, const MLACache& cache,
               std::vector<std::int32_t> pages) {
  const std::int64_t width = std::int64_t{cache.kv_lora_rank} + cache.rope_dim;
  const std::size_t page_bytes =
      size_of(cache.block_size) * size_of(width) * element_size_bytes(cache.dtype);
  NpyArray array{std::string(npy::descr_of(cache.dtype)),
                 {cache.num_blocks, cache.block_size, width},
                 std::vector<std::byte>(
                     checked_mul(size_of(cache.num_blocks), page_bytes, "captured kv_cache"))};
  for (const std::int32_t page : distinct(std::move(pages), cache.num_blocks)) {
    const std::size_t at = size_of(page) * page_bytes;
    const std::vector<std::byte> rows = read(queue, cache.buffer.handle(), at, page_bytes);
    std::copy(rows.begin(), rows.end(), array.data.begin() + static_cast<std::ptrdiff_t>(at));
  }
  writer.add("kv_cache", array);
}

std::string storage_keys(const KVCache& cache) {
  return storage_of(cache);
}

std::string storage_keys(const PackedKVCache& cache) {
  return storage_of(cache);
}

std::string cache_keys(const Queue& queue, const KVCache& cache) {
  return keys_of(queue, cache);
}

std::string cache_keys(const Queue& queue, const PackedKVCache& cache) {
  return keys_of(queue, cache);
}

std::string cache_keys(const Queue& queue, const MLACache& cache) {
  const float scale = cache.scale ? read_as<float>(queue, cache.scale.handle(), 0, 1).front() : 1;
  return fmt::format(",\n  \"kv_cache_dtype\": \"{}\",\n  \"k_scale\": {}", to_string(cache.dtype),
                     number(scale));
}

}  // namespace clattn::detail
