#include "kv_cache/planes.hpp"

#include <bit>
#include <numeric>
#include <utility>

#include "base/checked.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kv_cache/spec.hpp"

namespace clattn::detail {

namespace {

struct Dimension {
  std::int64_t count, stride;
};

std::int64_t bytes(std::int64_t elements, DType dtype) {
  check_at_least("cache: an offset or stride", elements, 0);
  return checked_mul(elements, static_cast<std::int64_t>(element_size_bytes(dtype)),
                     "cache: offset or stride");
}

/// Lengthens the row by dimensions that continue it.
PlaneLayout collapse(std::int64_t num_blocks, std::int64_t block_stride, std::int64_t row,
                     Dimension a, Dimension b) {
  if (a.stride < b.stride || b.count == 1) std::swap(a, b);  // a is the outer one
  if (b.count == 1 || b.stride == row) {
    row = checked_mul(row, b.count, "cache: bytes of a block");
    b = {1, 0};
    if (a.count == 1 || a.stride == row) {
      row = checked_mul(row, a.count, "cache: bytes of a block");
      a = {1, 0};
    }
  }
  return {num_blocks, block_stride, row, b.count, b.stride, a.count, a.stride};
}

/// Bytes from a block's first to one past its last.
std::int64_t block_extent(const PlaneLayout& layout) {
  constexpr std::string_view kWhat = "cache: bytes of a block";
  const std::int64_t inner = checked_mul(layout.inner_count - 1, layout.inner_stride, kWhat);
  const std::int64_t outer = checked_mul(layout.outer_count - 1, layout.outer_stride, kWhat);
  return checked_add(checked_add(inner, outer, kWhat), layout.row, kWhat);
}

CachePlanes checked(const PlaneLayout& layout, std::vector<Plane> planes) {
  check_at_least("cache: num_blocks", layout.num_blocks, 0);
  for (const Plane& plane : planes) {
    if (!plane.buffer) throw_invalid("cache: no buffer");
    if (layout.num_blocks == 0) continue;
    constexpr std::string_view kWhat = "cache: bytes";
    const std::int64_t last = checked_add(
        plane.offset, checked_mul(layout.num_blocks - 1, layout.block_stride, kWhat), kWhat);
    const std::int64_t end = checked_add(last, block_extent(layout), kWhat);
    throw_invalid_if(std::cmp_greater(end, plane.buffer.size_bytes()),
                     "cache: {} blocks end at byte {}, legal: the buffer's {} bytes",
                     layout.num_blocks, end, plane.buffer.size_bytes());
  }
  return {layout, std::move(planes)};
}

/// Blocks of rows without gaps.
PlaneLayout dense_layout(std::int64_t num_blocks, std::int64_t rows, std::int64_t width,
                         DType dtype) {
  const std::int64_t block = bytes(checked_mul(rows, width, "cache: bytes of a block"), dtype);
  return {.num_blocks = num_blocks, .block_stride = block, .row = block};
}

/// Pages of codes and their scales, which move as one.
CachePlanes whole_pages_of(const KVCache& cache) {
  const KVCache::RowScales& scales = *cache.row_scales;
  constexpr std::int64_t kScale = sizeof(float);
  constexpr std::string_view kWhat = "cache: bytes of a block";
  const std::int64_t rows =
      checked_mul(std::int64_t{cache.block_size}, std::int64_t{cache.num_kv_heads}, kWhat);
  const std::int64_t row = cache.key_elements();  // of a byte each
  const RowPage page = row_page(rows, row, load_elements(cache.dtype));
  const PlaneLayout codes =
      collapse(cache.num_blocks, cache.block_stride, row, {cache.block_size, cache.token_stride},
               {cache.num_kv_heads, cache.head_stride});
  const PlaneLayout of_scales =
      collapse(cache.num_blocks, scales.block_stride, 1, {cache.block_size, scales.token_stride},
               {cache.num_kv_heads, scales.head_stride});
  throw_unsupported_if(
      cache.scales.handle() != cache.buffer.handle() || !codes.contiguous() ||
          !of_scales.contiguous() || cache.v_offset != cache.k_offset + page.values ||
          scales.k_offset * kScale != cache.k_offset + page.key_scales ||
          scales.v_offset * kScale != cache.k_offset + page.value_scales ||
          scales.block_stride * kScale != cache.block_stride,
      "cache: row_scales elsewhere than in its pages, supported for operations on blocks: as "
      "reshape_kv_cache() lays them out");
  return checked({.num_blocks = cache.num_blocks,
                  .block_stride = cache.block_stride,
                  .row = checked_add(page.value_scales, checked_mul(rows, kScale, kWhat), kWhat)},
                 {{cache.buffer, bytes(cache.k_offset, cache.dtype)}});
}

/// Throws unless every extent of a cache's blocks is at least 1.
template <typename Cache>
void check_extents(const Cache& cache) {
  check_at_least("cache: block_size", cache.block_size, 1);
  check_at_least("cache: num_kv_heads", cache.num_kv_heads, 1);
  check_at_least("cache: head_size", cache.head_size, 1);
}

void check_block(std::size_t pair, std::string_view side, std::int64_t block,
                 std::int64_t num_blocks) {
  throw_invalid_if(block < 0 || block >= num_blocks,
                   "block_mapping: pair {}: {} block {}, legal: 0 … {}", pair, side, block,
                   num_blocks - 1);
}

/// Which pair of a mapping writes a block. A flat table: maps of nodes took longer than copying.
class Writers {
 public:
  static constexpr std::size_t kNone = SIZE_MAX;

  explicit Writers(std::span<const BlockPair> mapping)
      : mapping_(mapping), pairs_(std::bit_ceil(2 * mapping.size() + 2), kNone) {}
  /// The place of the pair with this destination; kNone stands there until one is set.
  std::size_t& of(std::int64_t block) {
    constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;  // 2^64 / the golden ratio
    const int bits = std::countr_zero(pairs_.size());
    auto place = to_size((static_cast<std::uint64_t>(block) * kGolden) >> (64 - bits));
    while (pairs_[place] != kNone && mapping_[pairs_[place]].destination != block) {
      place = (place + 1) % pairs_.size();
    }
    return pairs_[place];
  }

 private:
  std::span<const BlockPair> mapping_;
  std::vector<std::size_t> pairs_;  // at most half of them taken
};

}  // namespace

std::int64_t copy_unit(const PlaneLayout& layout, std::span<const Plane> planes,
                       std::int64_t stride) {
  std::int64_t common = std::gcd(std::gcd(layout.block_stride, layout.row),
                                 std::gcd(layout.inner_stride, layout.outer_stride));
  common = std::gcd(common, stride);
  for (const Plane& plane : planes) common = std::gcd(common, plane.offset);
  for (const std::int64_t unit : {16, 4}) {
    if (common % unit == 0) return unit;
  }
  return 1;
}

CachePlanes planes_of(const KVCache& cache) {
  check_extents(cache);
  check_value_place(cache);
  if (cache.row_scales) {
    check_cache(cache);
    return whole_pages_of(cache);
  }
  const bool one_row = cache.value_size() != cache.head_size;  // of a key and its value
  const std::int64_t row = cache.key_elements() + (one_row ? cache.value_elements() : 0);
  const PlaneLayout layout =
      collapse(cache.num_blocks, bytes(cache.block_stride, cache.dtype), bytes(row, cache.dtype),
               {cache.block_size, bytes(cache.token_stride, cache.dtype)},
               {cache.num_kv_heads, bytes(cache.head_stride, cache.dtype)});
  std::vector<Plane> planes = {{cache.buffer, bytes(cache.k_offset, cache.dtype)}};
  // Latent rows are K and V at once.
  if (cache.v_offset != cache.k_offset && !one_row) {
    planes.push_back({cache.buffer, bytes(cache.v_offset, cache.dtype)});
  }
  return checked(layout, std::move(planes));
}

CachePlanes planes_of(const PackedPages& cache) {
  check_extents(cache);
  const std::int64_t rows = std::int64_t{cache.block_size} * cache.num_kv_heads;
  return checked(dense_layout(cache.num_blocks, rows, cache.head_size, cache.dtype),
                 {{Buffer::adopt(cache.key), bytes(cache.key_offset, cache.dtype)},
                  {Buffer::adopt(cache.value), bytes(cache.value_offset, cache.dtype)}});
}

CachePlanes planes_of(const MLACache& cache) {
  check_at_least("cache: block_size", cache.block_size, 1);
  check_at_least("cache: kv_lora_rank", cache.kv_lora_rank, 1);
  check_at_least("cache: rope_dim", cache.rope_dim, 0);
  const std::int64_t width = std::int64_t{cache.kv_lora_rank} + cache.rope_dim;
  return checked(dense_layout(cache.num_blocks, cache.block_size, width, cache.dtype),
                 {{cache.buffer, 0}});
}

void check_mapping(std::span<const BlockPair> mapping, std::int64_t source_blocks,
                   std::int64_t destination_blocks, CopyWithin caches) {
  Writers writers(mapping);
  for (std::size_t i = 0; i < mapping.size(); ++i) {
    const auto& [source, destination] = mapping[i];
    check_block(i, "source", source, source_blocks);
    check_block(i, "destination", destination, destination_blocks);
    std::size_t& writer = writers.of(destination);
    throw_invalid_if(writer != Writers::kNone,
                     "block_mapping: pair {}: destination block {} is pair {}'s too, legal: once",
                     i, destination, writer);
    writer = i;
  }
  if (caches == CopyWithin::kTwoCaches) return;
  for (std::size_t i = 0; i < mapping.size(); ++i) {
    const std::size_t writer = writers.of(mapping[i].source);
    throw_invalid_if(writer != Writers::kNone,
                     "block_mapping: block {} is the source of pair {} and the destination of pair "
                     "{}, legal: one of the two",
                     mapping[i].source, i, writer);
  }
}

}  // namespace clattn::detail
