#pragma once

#include <clattn/cache_ops.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace clattn::detail {

/// The keys or the values of one layer.
struct Plane {
  Buffer buffer;
  std::int64_t offset = 0;
};

/// Where a plane's blocks lie, in bytes: `outer_count` times `inner_count` contiguous rows, with as
/// few rows as the strides allow.
struct PlaneLayout {
  std::int64_t num_blocks = 0;
  std::int64_t block_stride = 0;
  std::int64_t row = 0;
  std::int64_t inner_count = 1, inner_stride = 0;
  std::int64_t outer_count = 1, outer_stride = 0;
  bool operator==(const PlaneLayout&) const = default;
  bool contiguous() const { return inner_count == 1 && outer_count == 1; }
};

/// What is copied with a block: K and V, or one latent plane.
struct CachePlanes {
  PlaneLayout layout;
  std::vector<Plane> planes;
};

/// The planes of a cache. Throws kInvalidArgument for illegal fields and unless every block lies
/// inside its buffer.
CachePlanes planes_of(const KVCache& cache);
CachePlanes planes_of(const PackedKVCache& cache);
CachePlanes planes_of(const MLACache& cache);

/// Throws kInvalidArgument unless all ids are inside the caches and no destination is named twice.
void check_mapping(std::span<const BlockPair> mapping, std::int64_t source_blocks,
                   std::int64_t destination_blocks);
/// Throws kInvalidArgument for a block that is both source and destination.
void require_one_role(std::span<const BlockPair> mapping);

}  // namespace clattn::detail
