#include <clattn/compat/packed_cache.hpp>
#include <vector>

#include "base/checked.hpp"
#include "compat/packed_cache.hpp"
#include "kv_cache/planes.hpp"
#include "kv_cache/spec.hpp"

namespace clattn {

namespace {

using detail::checked_mul, detail::pages_of, detail::throw_invalid_if;

detail::SwapEnd swap_end(const PackedSwapSpace& space) {
  if (const auto* const image = std::get_if<detail::HostImage>(&space)) return *image;
  const detail::PackedPages cache = pages_of(std::get<PackedKVCache>(space));
  return detail::DeviceCache{detail::planes_of(cache),
                             cache.dtype,
                             {{{"block_size", cache.block_size},
                               {"num_kv_heads", cache.num_kv_heads},
                               {"head_size", cache.head_size},
                               {"x-packed", 1}}}};
}

}  // namespace

detail::PackedPages detail::pages_of(const PackedKVCache& cache) {
  return {.key = cache.key,
          .value = cache.value,
          .dtype = cache.dtype,
          .num_blocks = cache.num_blocks,
          .block_size = cache.block_size,
          .num_kv_heads = cache.num_kv_heads,
          .head_size = cache.head_size,
          .scales = cache.scales,
          .scales_per_head = cache.scales_per_head,
          .key_offset = cache.key_offset,
          .value_offset = cache.value_offset};
}

std::int64_t PackedKVCache::key_at(std::int64_t block, std::int64_t token, std::int64_t head,
                                   std::int64_t dim) const {
  return pages_of(*this).key_at(block, token, head, dim);
}

std::int64_t PackedKVCache::value_at(std::int64_t block, std::int64_t token, std::int64_t head,
                                     std::int64_t dim) const {
  return pages_of(*this).value_at(block, token, head, dim);
}

std::array<std::int64_t, 3> get_packed_kv_cache_shape(std::int64_t num_blocks,
                                                      std::int32_t block_size,
                                                      std::int32_t num_kv_heads,
                                                      std::int32_t head_size) {
  const std::int64_t rows = checked_mul(std::int64_t{block_size}, std::int64_t{num_kv_heads},
                                        "KV cache: elements of a page");
  return {2, num_blocks,
          checked_mul(rows, std::int64_t{head_size}, "KV cache: elements of a page")};
}

PackedKVCache split_kv_cache(const Buffer& raw, const KVCacheSpec& spec) {
  detail::throw_unsupported_if(spec.use_mla,
                               "KV cache: use_mla is set, supported: false (x-packed pages)");
  detail::throw_unsupported_if(spec.page_size_padded != 0,
                               "KV cache: page_size_padded is {}, supported: 0 (x-packed pages)",
                               spec.page_size_padded);
  detail::throw_unsupported_if(spec.value_size() != spec.head_size,
                               "KV cache: head_size_v is {}, supported: 0 or {} (x-packed pages)",
                               spec.head_size_v, spec.head_size);
  detail::throw_unsupported_if(
      spec.kv_quant_mode != KVQuantMode::kNone,
      "KV cache: kv_quant_mode is kPerTokenHead, supported: kNone (x-packed pages)");
  PackedKVCache cache;
  cache.num_blocks = detail::whole_pages(raw, spec);
  const auto x = static_cast<std::int32_t>(16 / element_size_bytes(spec.dtype));
  throw_invalid_if(spec.head_size % x != 0,
                   "cache: head_size is {}, legal in an x-packed cache of {}: multiples of {}",
                   spec.head_size, to_string(spec.dtype), x);
  cache.key = cache.value = raw.handle();
  cache.dtype = spec.dtype;
  cache.block_size = spec.block_size;
  cache.num_kv_heads = spec.num_kv_heads;
  cache.head_size = spec.head_size;
  const auto shape = get_packed_kv_cache_shape(cache.num_blocks, spec.block_size, spec.num_kv_heads,
                                               spec.head_size);
  cache.value_offset = shape[1] * shape[2];
  return cache;
}

void reshape_and_cache(const Context& context, cl_command_queue queue, TensorRef key,
                       TensorRef value, DType dtype, const PackedKVCache& cache,
                       cl_mem slot_mapping, std::size_t slot_offset_bytes, std::int64_t num_tokens,
                       Event* event) {
  detail::write_pages(context, queue, key, value, dtype, pages_of(cache),
                      {slot_mapping, slot_offset_bytes, num_tokens},
                      detail::Role::kCacheWritePacked, event);
}

void copy_blocks(const Context& context, cl_command_queue queue,
                 std::span<const PackedKVCache> caches, std::span<const BlockPair> mapping,
                 Event* event) {
  std::vector<detail::PackedPages> pages;
  pages.reserve(caches.size());
  for (const PackedKVCache& cache : caches) pages.push_back(pages_of(cache));
  detail::copy_pages(context, queue, std::span<const detail::PackedPages>(pages), mapping, event);
}

void swap_packed_blocks(const Context& /*context*/, cl_command_queue queue,
                        const PackedSwapSpace& source, const PackedSwapSpace& destination,
                        std::span<const BlockPair> mapping, Event* event) {
  detail::swap_ends(queue, swap_end(source), swap_end(destination), mapping, event);
}

}  // namespace clattn
