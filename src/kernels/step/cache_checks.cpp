#include "kernels/step/cache_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/checked.hpp"
#include "opencl/runtime.hpp"

namespace clattn::detail {

namespace {

constexpr std::string_view kElements = "kv_cache: elements";

/// Without a scale, int8 would hold whole numbers only, and most keys and values would become 0.
void require_scale(DType dtype, const Buffer& scale, std::string_view name,
                   std::string_view shape) {
  require_whole_bytes(dtype);
  throw_invalid_if(dtype == DType::kInt8 && !scale, "kv_cache: no {}, legal for int8: f32 {}", name,
                   shape);
}

std::array<std::int64_t, 5> places_of(const KVCache& cache) {
  return {cache.k_offset, cache.v_offset, cache.block_stride, cache.token_stride,
          cache.head_stride};
}

/// The buffer's element after the last one of K or V, whose rows are steps of these.
using Steps = std::array<std::pair<std::int64_t, std::int64_t>, 4>;
std::int64_t end_of(std::int64_t offset, const Steps& steps) {
  std::int64_t end = checked_add(offset, std::int64_t{1}, kElements);
  for (const auto& [count, stride] : steps) {
    end = checked_add(end, checked_mul(count - 1, stride, kElements), kElements);
  }
  return end;
}

std::int64_t elements_in(const KVCache& cache) {
  return static_cast<std::int64_t>(cache.buffer.size_bytes() / element_size_bytes(cache.dtype));
}

/// The same of K and V together; 0 without blocks.
std::int64_t end_of_cache(const KVCache& cache) {
  if (cache.num_blocks == 0) return 0;
  Steps steps = {{{cache.num_blocks, cache.block_stride},
                  {cache.num_kv_heads, cache.head_stride},
                  {cache.block_size, cache.token_stride},
                  {cache.key_elements(), 1}}};
  const std::int64_t end_of_keys = end_of(cache.k_offset, steps);
  steps.back().first = cache.value_elements();
  return std::max(end_of_keys, end_of(cache.v_offset, steps));
}

/// The last scale of K and V must lie in their buffer.
void check_row_scales(const KVCache& cache) {
  const std::string why = why_not(cache.format());
  if (!why.empty()) throw_unsupported("kv_cache: row_scales: {}", why);
  throw_invalid_if(!cache.scales, "kv_cache: no scales, legal with row_scales: f32");
  throw_invalid_if(cache.scales_per_head || cache.scales_query,
                   "kv_cache: scales_per_head is {}, scales_query {}, legal with row_scales: false",
                   cache.scales_per_head, cache.scales_query);
  throw_unsupported_if(cache.value_size() != cache.head_size,
                       "kv_cache: head_size_v is {}, supported with row_scales: {} (head_size)",
                       cache.head_size_v, cache.head_size);
  const KVCache scales = row_scale_cache(cache);
  for (const std::int64_t place : places_of(scales))
    if (place < 0)
      throw_invalid("kv_cache: row_scales: an offset or stride is {}, legal: >= 0", place);
  const std::int64_t end = end_of_cache(scales), room = elements_in(scales);
  throw_invalid_if(
      end > room, "kv_cache: row_scales: its last scale is number {}, legal: below the buffer's {}",
      end - 1, room);
}

template <typename Cache>
void check_scales(const Cache& cache) {
  if constexpr (std::is_same_v<Cache, KVCache>)
    if (cache.row_scales) return check_row_scales(cache);
  require_scale(cache.dtype, cache.scales, "scales", "[2][1] or [2][num_kv_heads]");
  if (!cache.scales) return;
  throw_invalid_if(!is_quantized(cache.dtype), "kv_cache: scales given, legal: none for {}",
                   to_string(cache.dtype));
  const auto heads = to_size(cache.scales_per_head ? cache.num_kv_heads : 1);
  bool of_queries = false;
  if constexpr (std::is_same_v<Cache, KVCache>) of_queries = cache.scales_query;
  const std::size_t bytes = (2 * heads + (of_queries ? 1 : 0)) * sizeof(float);
  throw_invalid_if(cache.scales.size_bytes() < bytes,
                   "kv_cache: scales hold {} bytes, legal: at least {} (f32 [2][{}]{})",
                   cache.scales.size_bytes(), bytes, heads,
                   of_queries ? " and one of queries" : "");
}

void check_scale(const MLACache& cache) {
  require_scale(cache.dtype, cache.scale, "scale", "[1]");
  if (!cache.scale) return;
  throw_invalid_if(!is_quantized(cache.dtype), "kv_cache: scale given, legal: none for {}",
                   to_string(cache.dtype));
  throw_invalid_if(cache.scale.size_bytes() < sizeof(float),
                   "kv_cache: scale holds {} bytes, legal: at least {} (f32 [1])",
                   cache.scale.size_bytes(), sizeof(float));
}

void check_num_blocks(std::int64_t num_blocks, std::int64_t fewest) {
  throw_invalid_if(num_blocks < fewest, "kv_cache: num_blocks is {}, legal: >= {}", num_blocks,
                   fewest);
}

/// Throws unless a buffer of `size_bytes` holds num_blocks * block_size * `width` elements from
/// `offset` on.
template <typename Cache>
void check_room(const Cache& cache, std::int64_t width, std::size_t size_bytes,
                std::string_view buffer, std::int64_t offset = 0) {
  if (offset < 0) throw_invalid("kv_cache: {}_offset is {}, legal: >= 0", buffer, offset);
  check_num_blocks(cache.num_blocks, 0);
  const std::int64_t slots =
      checked_mul(cache.num_blocks, std::int64_t{cache.block_size}, kElements);
  const std::int64_t wanted = checked_add(offset, checked_mul(slots, width, kElements), kElements);
  const std::size_t room = size_bytes / element_size_bytes(cache.dtype);
  throw_invalid_if(std::cmp_less(room, wanted),
                   "kv_cache: {} holds {} elements, legal: at least {} (num_blocks {})", buffer,
                   room, wanted, cache.num_blocks);
}

/// Kernels load eight numbers at a time.
void check_aligned(std::span<const std::int64_t> places, DType dtype, std::string_view name) {
  const std::int32_t unit = 8 / codes_per_element(dtype);
  for (const std::int64_t place : places) {
    throw_invalid_if(place < 0 || place % unit != 0,
                     "kv_cache: {} is {}, legal: multiples of {} elements, >= 0", name, place,
                     unit);
  }
}

/// "128", or "192 + 128" of keys and values that differ.
std::string elements_of(std::int32_t key, std::int32_t value) {
  return key == value ? std::to_string(key) : fmt::format("{} + {}", key, value);
}

template <typename Cache>
void check_kv_shape(const Cache& cache, const KernelShape& shape) {
  std::int32_t value_size = cache.head_size;
  CacheFormat format = cache.dtype;
  if constexpr (std::is_same_v<Cache, KVCache>) {
    value_size = cache.value_size();
    format = cache.format();
  }
  throw_invalid_if(
      cache.block_size != shape.block_size || cache.num_kv_heads != shape.num_kv_heads ||
          cache.head_size != shape.head_size || value_size != shape.value_size() ||
          format != shape.cache_format(),
      "kv_cache: {} tokens x {} heads x {} of {}, legal: {} x {} x {} of {} as this layer was "
      "configured",
      cache.block_size, cache.num_kv_heads, elements_of(cache.head_size, value_size),
      to_string(format), shape.block_size, shape.num_kv_heads,
      elements_of(shape.head_size, shape.value_size()), to_string(shape.cache_format()));
}

}  // namespace

void require_whole_bytes(DType dtype) {
  throw_unsupported_if(codes_per_element(dtype) > 1,
                       "kv_cache: dtype is {}, supported in pages with a scale for each token and "
                       "head; here: types of whole bytes",
                       to_string(dtype));
}

ClaRowScales row_scales_of(const KVCache& cache) {
  const KVCache::RowScales at = cache.row_scales.value_or(KVCache::RowScales{});
  return {at.k_offset, at.v_offset, at.block_stride, at.token_stride, at.head_stride};
}

KVCache row_scale_cache(const KVCache& cache) {
  const KVCache::RowScales at = cache.row_scales.value_or(KVCache::RowScales{});
  return {.buffer = cache.scales,
          .dtype = DType::kF32,
          .num_blocks = cache.num_blocks,
          .block_size = cache.block_size,
          .num_kv_heads = cache.num_kv_heads,
          .head_size = 1,
          .k_offset = at.k_offset,
          .v_offset = at.v_offset,
          .block_stride = at.block_stride,
          .token_stride = at.token_stride,
          .head_stride = at.head_stride};
}

void refuse_row_scales(const KVCache& cache, std::string_view call) {
  throw_unsupported_if(cache.row_scales.has_value(),
                       "{}: a cache with a scale for each token and head, supported: types", call);
}

void check_value_place(const KVCache& cache) {
  const std::int32_t value = cache.value_size();
  if (value == cache.head_size) return;
  throw_invalid_if(value < 8 || value > cache.head_size || value % 8 != 0,
                   "kv_cache: head_size_v is {}, legal: 0 (head_size), or 8 … {} in steps of 8",
                   cache.head_size_v, cache.head_size);
  throw_invalid_if(
      cache.v_offset - cache.k_offset != cache.head_size,
      "kv_cache: v_offset is {}, legal: {} (values of {} elements follow their keys of {})",
      cache.v_offset, cache.k_offset + cache.head_size, value, cache.head_size);
}

void check_cache(const KVCache& cache) {
  if (!cache.buffer) throw_invalid("kv_cache: no buffer");
  check_value_place(cache);
  check_scales(cache);
  for (const std::int64_t place : places_of(cache)) {
    if (place < 0) throw_invalid("kv_cache: an offset or stride is {}, legal: >= 0", place);
  }
  check_num_blocks(cache.num_blocks, 0);
  const std::int64_t end = end_of_cache(cache), elems = elements_in(cache);
  throw_invalid_if(end > elems,
                   "kv_cache: its last element is number {}, legal: below the buffer's {} elements",
                   end - 1, elems);
}

void check_cache(const PackedPages& cache) {
  if (cache.key == nullptr || cache.value == nullptr) throw_invalid("kv_cache: no buffer");
  check_scales(cache);
  const std::int64_t width = std::int64_t{cache.num_kv_heads} * cache.head_size;
  check_room(cache, width, size_bytes_of(cache.key), "key", cache.key_offset);
  check_room(cache, width, size_bytes_of(cache.value), "value", cache.value_offset);
}

void check_cache(const MLACache& cache) {
  const std::pair<std::string_view, std::int32_t> widths[] = {{"kv_lora_rank", cache.kv_lora_rank},
                                                              {"rope_dim", cache.rope_dim}};
  for (const auto& [name, value] : widths) {
    throw_invalid_if(value < 8 || value % 8 != 0, "kv_cache: {} is {}, legal: multiples of 8", name,
                     value);
  }
  throw_invalid_if(cache.block_size < 1, "kv_cache: block_size is {}, legal: >= 1",
                   cache.block_size);
  if (!cache.buffer) throw_invalid("kv_cache: no buffer");
  check_scale(cache);
  check_room(cache, checked_add(cache.kv_lora_rank, cache.rope_dim, kElements),
             cache.buffer.size_bytes(), "its buffer");
}

void check_rows(const ElementBuffer& memory, const RowRange& rows, std::string_view name) {
  if (rows.count == 0) return;
  const std::int64_t end =
      checked_add(checked_add(rows.offset, checked_mul(rows.count - 1, rows.stride, name), name),
                  rows.width, name);
  const std::size_t room = size_bytes_of(memory.buffer) / element_size_bytes(memory.dtype);
  throw_invalid_if(std::cmp_greater(end, room),
                   "{}: its {} rows end at element {}, legal: the buffer's {}", name, rows.count,
                   end, room);
}

void require_size(const Buffer& buffer, std::int64_t count, std::size_t element_bytes,
                  std::string_view name) {
  const std::size_t wanted = checked_mul(to_size(count), element_bytes, name);
  throw_invalid_if(!buffer || buffer.size_bytes() < wanted,
                   "{} holds {} bytes, legal: at least {} ({} elements of {})", name,
                   buffer.size_bytes(), wanted, count, element_bytes);
}

void check_layer_cache(const KVCache& cache, const KernelShape& shape) {
  check_kv_shape(cache, shape);
  check_num_blocks(cache.num_blocks, 1);
  check_aligned(places_of(cache), cache.dtype, "an offset or stride");
  throw_invalid_if(cache.num_blocks > 1 && cache.block_stride == 0,
                   "kv_cache: block_stride is 0, legal where there are several blocks: > 0");
  // Kernels find a head by as many blocks and elements, in 32 bits (tile/sm90_tensor_map.clh).
  const std::int64_t most =
      std::numeric_limits<std::int32_t>::max() / 2 / std::max(cache.num_kv_heads, 1);
  const std::int64_t block = std::max<std::int64_t>(cache.block_stride, 1);
  throw_invalid_if(
      cache.num_kv_heads > 1 &&
          (cache.head_stride / block > most || cache.head_stride % block > most),
      "kv_cache: head_stride is {} and block_stride {}, legal: {} blocks and {} elements between "
      "heads at most",
      cache.head_stride, cache.block_stride, most, most);
  check_cache(cache);
}

void check_layer_cache(const PackedPages& cache, const KernelShape& shape) {
  check_kv_shape(cache, shape);
  check_num_blocks(cache.num_blocks, 1);
  check_aligned(std::array{cache.key_offset, cache.value_offset}, cache.dtype, "an offset");
  check_cache(cache);
}

void check_layer_cache(const MLACache& cache, const KernelShape& shape) {
  throw_invalid_if(
      cache.block_size != shape.block_size || cache.kv_lora_rank != shape.head_size ||
          cache.rope_dim != shape.rope_dim || cache.dtype != shape.cache_dtype,
      "kv_cache: {} tokens x ({} + {}) of {}, legal: {} x ({} + {}) of {} as this layer was "
      "configured",
      cache.block_size, cache.kv_lora_rank, cache.rope_dim, to_string(cache.dtype),
      shape.block_size, shape.head_size, shape.rope_dim, to_string(shape.cache_dtype));
  check_num_blocks(cache.num_blocks, 1);
  check_cache(cache);
}

BlockBound::BlockBound(std::int64_t limit, std::span<const std::int32_t> pages)
    : below(limit), stated(limit >= 0) {
  if (!stated) below = pages.empty() ? 0 : std::int64_t{*std::ranges::max_element(pages)} + 1;
}

void check_block_ids(const BlockBound& ids, std::int64_t num_blocks) {
  if (ids.below <= num_blocks) return;
  if (ids.stated) {
    throw_invalid(
        "attn_metadata: limits.num_blocks of its builder is {}, legal: up to the cache's {}",
        ids.below, num_blocks);
  }
  throw_invalid("attn_metadata: its block ids reach up to {}, legal: below the cache's {} blocks",
                ids.below - 1, num_blocks);
}

}  // namespace clattn::detail
