#pragma once

#include <array>
#include <clattn/cache_ops.hpp>
#include <cstdint>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "capture/capture.hpp"
#include "capture/packed_pages.hpp"
#include "kernels/choose/variants.hpp"
#include "shared/token_moves.h"

// Operations on caches of any form: KVCache, MLACache, PackedPages.

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

/// What is copied with a block: K and V, or one plane of latent rows or of keys with their values.
struct CachePlanes {
  PlaneLayout layout;
  std::vector<Plane> planes;
};

/// The planes of a cache. Throws kInvalidArgument for illegal fields and unless every block lies
/// inside its buffer.
CachePlanes planes_of(const KVCache& cache);
CachePlanes planes_of(const PackedPages& cache);
CachePlanes planes_of(const MLACache& cache);

/// The planes of one launch at most: CLA_MAX_PLANES.
inline constexpr std::size_t kMaxPlanes = CLA_MAX_PLANES;
/// The widest unit, in bytes, that divides all strides, sizes and offsets of a copy, and `stride`.
std::int64_t copy_unit(const PlaneLayout& layout, std::span<const Plane> planes,
                       std::int64_t stride = 0);

/// Inside one cache no block is both source and destination.
enum class CopyWithin : std::uint8_t { kOneCache, kTwoCaches };
/// Throws kInvalidArgument unless all ids are inside the caches and no destination is named twice.
void check_mapping(std::span<const BlockPair> mapping, std::int64_t source_blocks,
                   std::int64_t destination_blocks, CopyWithin caches);

/// copy_blocks() of caches of one form.
template <typename Cache>
void copy_pages(const Context& context, cl_command_queue queue, std::span<const Cache> caches,
                std::span<const BlockPair> mapping, Event* event);

/// reshape_and_cache_flash(), or reshape_and_cache() into PackedPages, by the kernel of `role`.
template <typename Cache>
void write_pages(const Context& context, cl_command_queue queue, const TensorRef& key,
                 const TensorRef& value, DType dtype, const Cache& cache, const SlotSource& slots,
                 Role role, Event* event);

/// What must agree between two caches. Strides that no block of this shape uses are 0.
struct SwapTrait {
  std::string_view name;
  std::int64_t value = 0;
};
/// A cache on the device and what it is made of.
struct DeviceCache {
  CachePlanes planes;
  DType dtype = DType::kF16;
  std::array<SwapTrait, 7> traits{};
};
using HostImage = std::span<std::byte>;
using SwapEnd = std::variant<DeviceCache, HostImage>;
/// swap_blocks() of caches of any form.
void swap_ends(cl_command_queue queue, const SwapEnd& source, const SwapEnd& destination,
               std::span<const BlockPair> mapping, Event* event);

}  // namespace clattn::detail
