#include "kv_cache/planes.hpp"

#include <bit>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn::detail {

namespace {

struct Dimension {
  std::int64_t count, stride;
};

void require_positive(std::int64_t value, std::string_view field) {
  if (value < 1) throw_invalid("cache: {} is {}, legal: >= 1", field, value);
}

std::int64_t bytes(std::int64_t elements, DType dtype) {
  if (elements < 0) throw_invalid("cache: offset or stride {}, legal: >= 0", elements);
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
  throw_invalid_if(layout.num_blocks < 0, "cache: num_blocks is {}, legal: >= 0",
                   layout.num_blocks);
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

/// Keys by dim are copied as what they are then: as many bytes as the values, without gaps.
void check_keys_by_dim(const KVCache& cache, const PlaneLayout& layout) {
  if (!cache.keys_by_dim()) return;
  const bool heads_meet =
      cache.num_kv_heads == 1 || cache.head_stride == cache.key_dim_stride * cache.head_size;
  if (layout.contiguous() && cache.key_dim_stride == cache.block_size && heads_meet) return;
  throw_invalid(
      "cache: keys by dim with key_dim_stride {}, token_stride {} and head_stride {}, legal where "
      "blocks are copied: pages without gaps ({}, {} and {})",
      cache.key_dim_stride, cache.token_stride, cache.head_stride, cache.block_size,
      cache.head_size, std::int64_t{cache.block_size} * cache.head_size);
}

/// Blocks of rows without gaps.
PlaneLayout dense_layout(std::int64_t num_blocks, std::int64_t rows, std::int64_t width,
                         DType dtype) {
  const std::int64_t block = bytes(checked_mul(rows, width, "cache: bytes of a block"), dtype);
  return {.num_blocks = num_blocks, .block_stride = block, .row = block};
}

void check_ids(std::span<const BlockPair> mapping, std::int64_t source_blocks,
               std::int64_t destination_blocks) {
  const auto check = [](std::size_t pair, const char* side, std::int64_t block,
                        std::int64_t blocks) {
    throw_invalid_if(block < 0 || block >= blocks,
                     "block_mapping: pair {}: {} block {}, legal: 0 … {}", pair, side, block,
                     blocks - 1);
  };
  for (std::size_t i = 0; i < mapping.size(); ++i) {
    check(i, "source", mapping[i].source, source_blocks);
    check(i, "destination", mapping[i].destination, destination_blocks);
  }
}

/// Which pair of a mapping writes a block. A flat table: maps of nodes took longer than copying.
class WrittenBlocks {
 public:
  static constexpr std::size_t kNone = SIZE_MAX;
  explicit WrittenBlocks(std::span<const BlockPair> mapping)
      : mapping_(mapping), pairs_(std::bit_ceil(2 * mapping.size() + 2), kNone) {}

  /// The first pair that add() was told of for this destination, or kNone.
  std::size_t pair_of(std::int64_t block) const { return pairs_[place_of(block)]; }
  void add(std::size_t pair) {
    std::size_t& known = pairs_[place_of(mapping_[pair].destination)];
    if (known == kNone) known = pair;
  }

 private:
  std::size_t place_of(std::int64_t block) const {
    constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;  // 2^64 / the golden ratio
    const int bits = std::countr_zero(pairs_.size());
    auto place = to_size((static_cast<std::uint64_t>(block) * kGolden) >> (64 - bits));
    while (pairs_[place] != kNone && mapping_[pairs_[place]].destination != block) {
      place = (place + 1) % pairs_.size();
    }
    return place;
  }
  std::span<const BlockPair> mapping_;
  std::vector<std::size_t> pairs_;  // at most half of them taken
};

}  // namespace

CachePlanes planes_of(const KVCache& cache) {
  require_positive(cache.block_size, "block_size");
  require_positive(cache.num_kv_heads, "num_kv_heads");
  require_positive(cache.head_size, "head_size");
  const PlaneLayout layout = collapse(cache.num_blocks, bytes(cache.block_stride, cache.dtype),
                                      bytes(cache.head_size, cache.dtype),
                                      {cache.block_size, bytes(cache.token_stride, cache.dtype)},
                                      {cache.num_kv_heads, bytes(cache.head_stride, cache.dtype)});
  check_keys_by_dim(cache, layout);
  std::vector<Plane> planes = {{cache.buffer, bytes(cache.k_offset, cache.dtype)}};
  // Latent rows are K and V at once.
  if (cache.v_offset != cache.k_offset) {
    planes.push_back({cache.buffer, bytes(cache.v_offset, cache.dtype)});
  }
  return checked(layout, std::move(planes));
}

CachePlanes planes_of(const PackedKVCache& cache) {
  require_positive(cache.block_size, "block_size");
  require_positive(cache.num_kv_heads, "num_kv_heads");
  require_positive(cache.head_size, "head_size");
  const std::int64_t rows = std::int64_t{cache.block_size} * cache.num_kv_heads;
  return checked(dense_layout(cache.num_blocks, rows, cache.head_size, cache.dtype),
                 {{Buffer::adopt(cache.key), bytes(cache.key_offset, cache.dtype)},
                  {Buffer::adopt(cache.value), bytes(cache.value_offset, cache.dtype)}});
}

CachePlanes planes_of(const MLACache& cache) {
  require_positive(cache.block_size, "block_size");
  require_positive(cache.kv_lora_rank, "kv_lora_rank");
  if (cache.rope_dim < 0) throw_invalid("cache: rope_dim is {}, legal: >= 0", cache.rope_dim);
  const std::int64_t width = std::int64_t{cache.kv_lora_rank} + cache.rope_dim;
  return checked(dense_layout(cache.num_blocks, cache.block_size, width, cache.dtype),
                 {{cache.buffer, 0}});
}

void check_mapping(std::span<const BlockPair> mapping, std::int64_t source_blocks,
                   std::int64_t destination_blocks) {
  check_ids(mapping, source_blocks, destination_blocks);
  WrittenBlocks written(mapping);
  for (std::size_t i = 0; i < mapping.size(); ++i) {
    const std::size_t first = written.pair_of(mapping[i].destination);
    throw_invalid_if(first != WrittenBlocks::kNone,
                     "block_mapping: pair {}: destination block {} is pair {}'s too, legal: once",
                     i, mapping[i].destination, first);
    written.add(i);
  }
}

void require_one_role(std::span<const BlockPair> mapping) {
  WrittenBlocks written(mapping);
  for (std::size_t i = 0; i < mapping.size(); ++i) written.add(i);
  for (std::size_t i = 0; i < mapping.size(); ++i) {
    const std::size_t writer = written.pair_of(mapping[i].source);
    if (writer == WrittenBlocks::kNone) continue;
    throw_invalid(
        "block_mapping: block {} is the source of pair {} and the destination of pair {}, legal: "
        "one of the two",
        mapping[i].source, i, writer);
  }
}

}  // namespace clattn::detail
