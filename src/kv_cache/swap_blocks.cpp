#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <optional>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kv_cache/op_kernel.hpp"
#include "kv_cache/planes.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::CachePlanes;
using detail::CopyEnd;
using detail::throw_invalid;

/// One side of a swap: where block b of plane p starts, p_at + b * block_stride.
struct Side {
  CopyEnd base;
  std::int64_t num_blocks = 0;
  std::int64_t block_stride = 0;
  std::vector<std::int64_t> planes;
  std::int64_t at(std::size_t plane, std::int64_t block) const {
    return planes[plane] + block * block_stride;
  }
};

/// A contiguous piece of a swap, bytes.
struct Piece {
  std::int64_t source, destination, size;
};

/// A cache on the device and what it is made of; nothing for a host image.
struct DeviceCache {
  CachePlanes planes;
  DType dtype = DType::kF16;
  std::array<std::int64_t, 5> shape{};  // what must agree between two caches
};

std::optional<DeviceCache> device_cache(const SwapSpace& space) {
  std::optional<DeviceCache> result;
  if (const auto* kv = std::get_if<KVCache>(&space)) {
    result = DeviceCache{
        detail::planes_of(*kv),
        kv->dtype,
        {kv->block_size, kv->num_kv_heads, kv->head_size, kv->token_stride, kv->head_stride}};
  } else if (const auto* mla = std::get_if<MLACache>(&space)) {
    result = DeviceCache{detail::planes_of(*mla),
                         mla->dtype,
                         {mla->block_size, mla->kv_lora_rank, mla->rope_dim, 0, 0}};
  }
  if (result && !result->planes.layout.contiguous()) {
    throw_invalid("swap_blocks: blocks of {} x {} rows of {} bytes, legal: blocks without gaps",
                  result->planes.layout.outer_count, result->planes.layout.inner_count,
                  result->planes.layout.row);
  }
  return result;
}

Side device_side(const DeviceCache& cache) {
  Side side;
  side.base.device = cache.planes.planes[0].buffer.handle();
  side.num_blocks = cache.planes.layout.num_blocks;
  side.block_stride = cache.planes.layout.block_stride;
  for (const detail::Plane& plane : cache.planes.planes) side.planes.push_back(plane.offset);
  return side;
}

/// An image in the order of `like`: K and V of a block side by side if they are so there.
Side host_side(std::span<std::byte> image, const DeviceCache& like) {
  const detail::PlaneLayout& layout = like.planes.layout;
  const std::vector<detail::Plane>& planes = like.planes.planes;
  const auto count = static_cast<std::int64_t>(planes.size());
  const std::int64_t page = layout.row * count;
  const auto size = static_cast<std::int64_t>(image.size());
  if (size % page != 0) {
    throw_invalid("swap_blocks: host image of {} bytes, legal: multiples of a block's {}", size,
                  page);
  }
  Side side;
  side.base.host = image.data();
  side.num_blocks = size / page;
  side.block_stride = layout.row;
  std::int64_t step = layout.row * side.num_blocks;  // from K to V
  if (count == 2 && std::abs(planes[1].offset - planes[0].offset) < layout.block_stride) {
    side.block_stride = page;
    step = layout.row;
  }
  const std::int64_t first = std::min(planes.front().offset, planes.back().offset);
  for (const detail::Plane& plane : planes) {
    side.planes.push_back(plane.offset > first ? step : 0);
  }
  return side;
}

/// The swap in as few pieces as continue each other on both sides.
std::vector<Piece> pieces_of(const Side& source, const Side& destination,
                             std::span<const BlockPair> mapping, std::int64_t size) {
  std::vector<Piece> pieces;
  for (std::size_t plane = 0; plane < source.planes.size(); ++plane) {
    for (const BlockPair& pair : mapping) {
      pieces.push_back(
          {source.at(plane, pair.source), destination.at(plane, pair.destination), size});
    }
  }
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.source < b.source; });
  std::size_t kept = 0;
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    Piece& last = pieces[kept];
    if (last.source + last.size == pieces[i].source &&
        last.destination + last.size == pieces[i].destination) {
      last.size += pieces[i].size;
    } else {
      pieces[++kept] = pieces[i];
    }
  }
  if (!pieces.empty()) pieces.resize(kept + 1);
  return pieces;
}

void require_alike(const DeviceCache& source, const DeviceCache& destination) {
  if (source.dtype == destination.dtype && source.shape == destination.shape &&
      source.planes.layout.row == destination.planes.layout.row &&
      source.planes.planes.size() == destination.planes.planes.size()) {
    return;
  }
  throw_invalid(
      "swap_blocks: from blocks of {} bytes ({}) to blocks of {} bytes ({}), legal: equal shapes, "
      "types and orders of a block",
      source.planes.layout.row, to_string(source.dtype), destination.planes.layout.row,
      to_string(destination.dtype));
}

}  // namespace

void swap_blocks(const Context& /*context*/, cl_command_queue queue, const SwapSpace& source,
                 const SwapSpace& destination, std::span<const BlockPair> mapping, Event* event) {
  detail::clear(event);
  detail::refuse_recording(queue, "swap_blocks");
  const std::optional<DeviceCache> from = device_cache(source);
  const std::optional<DeviceCache> to = device_cache(destination);
  if (!from && !to) throw_invalid("Invalid device combination");
  if (from && to) require_alike(*from, *to);
  const Side read = from ? device_side(*from) : host_side(std::get<2>(source), *to);
  const Side written = to ? device_side(*to) : host_side(std::get<2>(destination), *from);
  const bool same = from && to && read.base.device == written.base.device;
  detail::check_mapping(mapping, read.num_blocks, written.num_blocks,
                        same ? detail::SameMemory::kYes : detail::SameMemory::kNo);
  const std::vector<Piece> pieces =
      pieces_of(read, written, mapping, (from ? *from : *to).planes.layout.row);
  for (const Piece& piece : pieces) {
    CopyEnd source_end = read.base;
    CopyEnd destination_end = written.base;
    source_end.offset_bytes = static_cast<std::size_t>(piece.source);
    destination_end.offset_bytes = static_cast<std::size_t>(piece.destination);
    detail::enqueue_copy(queue, source_end, destination_end, static_cast<std::size_t>(piece.size),
                         &piece == &pieces.back() ? event : nullptr);
  }
}

}  // namespace clattn
