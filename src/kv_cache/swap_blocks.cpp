#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <vector>

#include "base/checked.hpp"
#include "capture/capture.hpp"
#include "kv_cache/op_kernel.hpp"
#include "kv_cache/planes.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::CopyEnd, detail::throw_invalid, detail::throw_invalid_if;
using detail::DeviceCache, detail::HostImage, detail::SwapEnd, detail::SwapTrait;
using detail::to_size;

/// One side of a swap: where block 0 of each plane starts, and how far blocks are apart.
struct Side {
  std::vector<CopyEnd> planes;
  std::int64_t num_blocks = 0;
  std::int64_t block_stride = 0;
  CopyEnd at(std::size_t plane, std::int64_t block) const {
    CopyEnd end = planes[plane];
    end.offset_bytes += to_size(block * block_stride);
    return end;
  }
};

/// A contiguous piece of a swap: a plane of one pair's block, or several that continue each other.
struct Piece {
  CopyEnd source, destination;
  std::size_t size_bytes = 0;
  std::size_t pair = 0;
};

constexpr std::string_view kRowScales = "scales of tokens and heads";

struct DescribeCache {
  SwapEnd operator()(const KVCache& cache) const {
    return DeviceCache{detail::planes_of(cache),
                       cache.dtype,
                       {{{"block_size", cache.block_size},
                         {"num_kv_heads", cache.num_kv_heads},
                         {"head_size", cache.head_size},
                         {"head_size_v", cache.value_size()},
                         {"token_stride", cache.block_size == 1 ? 0 : cache.token_stride},
                         {"head_stride", cache.num_kv_heads == 1 ? 0 : cache.head_stride},
                         {kRowScales, cache.row_scales ? 1 : 0}}}};
  }
  SwapEnd operator()(const MLACache& cache) const {
    return DeviceCache{detail::planes_of(cache),
                       cache.dtype,
                       {{{"block_size", cache.block_size},
                         {"kv_lora_rank", cache.kv_lora_rank},
                         {"rope_dim", cache.rope_dim}}}};
  }
  SwapEnd operator()(HostImage image) const { return image; }
};

const DeviceCache* device_cache(const SwapEnd& end) {
  const auto* const result = std::get_if<DeviceCache>(&end);
  if (result != nullptr && !result->planes.layout.contiguous()) {
    throw_invalid("swap_blocks: blocks of {} x {} rows of {} bytes, legal: blocks without gaps",
                  result->planes.layout.outer_count, result->planes.layout.inner_count,
                  result->planes.layout.row);
  }
  return result;
}

Side device_side(const DeviceCache& cache) {
  Side side;
  side.num_blocks = cache.planes.layout.num_blocks;
  side.block_stride = cache.planes.layout.block_stride;
  for (const detail::Plane& plane : cache.planes.planes) {
    side.planes.push_back({.device = plane.buffer.handle(), .offset_bytes = to_size(plane.offset)});
  }
  return side;
}

/// An image in the order of `like`: K and V of a block side by side if they are so there.
Side host_side(HostImage image, const DeviceCache& like) {
  const detail::PlaneLayout& layout = like.planes.layout;
  const std::vector<detail::Plane>& planes = like.planes.planes;
  const auto count = static_cast<std::int64_t>(planes.size());
  const std::int64_t page = layout.row * count;
  const auto size = static_cast<std::int64_t>(image.size());
  throw_invalid_if(size % page != 0,
                   "swap_blocks: host image of {} bytes, legal: multiples of a block's {}", size,
                   page);
  Side side;
  side.num_blocks = size / page;
  side.block_stride = layout.row;
  const bool one_buffer = planes.front().buffer.handle() == planes.back().buffer.handle();
  const std::int64_t apart = planes.back().offset - planes.front().offset;
  std::int64_t step = layout.row * side.num_blocks;  // from one plane to the other
  if (count == 2 && one_buffer && std::abs(apart) < layout.block_stride) {
    side.block_stride = page;
    step = layout.row;
  }
  const bool last_is_first = one_buffer && apart < 0;
  for (std::int64_t plane = 0; plane < count; ++plane) {
    const std::int64_t place = last_is_first ? count - 1 - plane : plane;
    side.planes.push_back({.host = image.data(), .offset_bytes = to_size(place * step)});
  }
  return side;
}

std::vector<Piece> pieces_of(const Side& source, const Side& destination,
                             std::span<const BlockPair> mapping, std::int64_t size) {
  std::vector<Piece> pieces;
  for (std::size_t plane = 0; plane < source.planes.size(); ++plane) {
    for (std::size_t pair = 0; pair < mapping.size(); ++pair) {
      pieces.push_back({source.at(plane, mapping[pair].source),
                        destination.at(plane, mapping[pair].destination), to_size(size), pair});
    }
  }
  return pieces;
}

bool continues(const CopyEnd& end, std::size_t size_bytes, const CopyEnd& next) {
  return end.device == next.device && end.host == next.host &&
         end.offset_bytes + size_bytes == next.offset_bytes;
}

/// Joins pieces that continue each other on both sides.
void join(std::vector<Piece>& pieces) {
  std::ranges::sort(pieces, [](const Piece& a, const Piece& b) {
    return a.source.device != b.source.device ? std::less<>{}(a.source.device, b.source.device)
                                              : a.source.offset_bytes < b.source.offset_bytes;
  });
  std::size_t kept = 0;
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    Piece& last = pieces[kept];
    if (continues(last.source, last.size_bytes, pieces[i].source) &&
        continues(last.destination, last.size_bytes, pieces[i].destination)) {
      last.size_bytes += pieces[i].size_bytes;
    } else {
      pieces[++kept] = pieces[i];
    }
  }
  if (!pieces.empty()) pieces.resize(kept + 1);
}

/// Bytes of the driver's memory that a pair reads or writes.
struct Range {
  cl_mem memory = nullptr;
  std::size_t begin = 0, end = 0, pair = 0;
  bool written = false;
};

Range range_of(const Piece& piece, bool written) {
  const CopyEnd& end = written ? piece.destination : piece.source;
  const detail::MemoryPlace place = detail::place_of(end.device);
  const std::size_t begin = place.offset_bytes + end.offset_bytes;
  return {place.memory, begin, begin + piece.size_bytes, piece.pair, written};
}

/// Throws if what a pair writes is also read or written, by it or another, through whichever cache
/// or buffer: the copies run in no particular order.
void require_apart(const std::vector<Piece>& pieces, std::span<const BlockPair> mapping) {
  std::vector<Range> ranges;
  for (const Piece& piece : pieces)
    for (const bool written : {false, true}) ranges.push_back(range_of(piece, written));
  std::ranges::sort(ranges, [](const Range& a, const Range& b) {
    return a.memory != b.memory ? std::less<>{}(a.memory, b.memory) : a.begin < b.begin;
  });
  Range reaches[2];  // what reads and what writes furthest so far
  for (const Range& range : ranges) {
    for (const Range& other : reaches) {
      if (!(range.written || other.written) || other.memory != range.memory ||
          range.begin >= other.end) {
        continue;
      }
      const Range& write = range.written ? range : other;
      const Range& second = range.written ? other : range;
      throw_invalid(
          "block_mapping: block {}, the destination of pair {}, shares memory with block {}, the "
          "{} of pair {}; legal: blocks apart",
          mapping[write.pair].destination, write.pair,
          second.written ? mapping[second.pair].destination : mapping[second.pair].source,
          second.written ? "destination" : "source", second.pair);
    }
    Range& reach = reaches[range.written ? 1 : 0];
    if (reach.memory != range.memory || range.end > reach.end) reach = range;
  }
}

void require_alike(const DeviceCache& source, const DeviceCache& destination) {
  constexpr std::string_view kLegal = "equal types, shapes and orders of a block";
  throw_invalid_if(source.dtype != destination.dtype, "swap_blocks: dtype {} and {}, legal: {}",
                   to_string(source.dtype), to_string(destination.dtype), kLegal);
  throw_invalid_if(source.planes.planes.size() != destination.planes.planes.size() ||
                       !std::ranges::equal(source.traits, destination.traits, {}, &SwapTrait::name,
                                           &SwapTrait::name),
                   "swap_blocks: caches of different forms, legal: {}", kLegal);
  for (std::size_t i = 0; i < source.traits.size(); ++i) {
    const auto& [name, from] = source.traits.at(i);
    const std::int64_t to = destination.traits.at(i).value;
    throw_invalid_if(from != to, "swap_blocks: {} {} and {}, legal: {}", name, from, to, kLegal);
  }
}

/// Whether two caches have memory in common. Throws unless they are of one context: others have no
/// queue in common.
bool share_memory(const Side& source, const Side& destination) {
  bool shared = false;
  for (const CopyEnd& from : source.planes) {
    for (const CopyEnd& to : destination.planes) {
      const detail::MemoryPlace a = detail::place_of(from.device);
      const detail::MemoryPlace b = detail::place_of(to.device);
      if (a.context != b.context) throw_invalid("src and dst must be on the same GPU");
      shared = shared || a.memory == b.memory;
    }
  }
  return shared;
}

/// What the cases of one swap have in common.
void capture_swap(cl_command_queue queue, const Side& read, const Side& written,
                  const DeviceCache& cache, std::span<const BlockPair> mapping) {
  const bool from_host = read.planes.front().host != nullptr;
  const bool to_host = written.planes.front().host != nullptr;
  const auto& traits = cache.traits;
  detail::throw_unsupported_if(traits.back().value != 0 && traits.back().name == kRowScales,
                               "capture: a cache with {}, supported: without", kRowScales);
  detail::CapturedSwap call{.queue = queue,
                            .direction = from_host ? "host_to_device"
                                         : to_host ? "device_to_host"
                                                   : "device_to_device",
                            .dtype = cache.dtype,
                            .block_shape = {traits[0].value, traits[1].value, traits[2].value},
                            .mapping = mapping,
                            .block_stride = read.block_stride,
                            .source_blocks = read.num_blocks,
                            .destination_blocks = written.num_blocks};
  if (cache.planes.planes.size() == 1) {  // rows of both their parts
    const auto element = static_cast<std::int64_t>(element_size_bytes(cache.dtype));
    call.block_shape = {traits[0].value, 1, cache.planes.layout.row / element / traits[0].value};
  }
  for (const CopyEnd& plane : read.planes) {
    call.device = plane.device;
    call.host = plane.host;
    call.offset_bytes = plane.offset_bytes;
    detail::capture_swap_blocks(call);
  }
}

}  // namespace

void detail::swap_ends(cl_command_queue queue, const SwapEnd& source, const SwapEnd& destination,
                       std::span<const BlockPair> mapping, Event* event) {
  detail::clear(event);
  detail::refuse_recording(queue, "swap_blocks");
  detail::require_in_order(queue);
  const DeviceCache* const from = device_cache(source);
  const DeviceCache* const to = device_cache(destination);
  if (from == nullptr && to == nullptr) throw_invalid("Invalid device combination");
  if (from != nullptr && to != nullptr) require_alike(*from, *to);
  const DeviceCache& device = from != nullptr ? *from : *to;
  const auto side_of = [&](const DeviceCache* cache, const SwapEnd& end) {
    return cache != nullptr ? device_side(*cache) : host_side(std::get<HostImage>(end), device);
  };
  const Side read = side_of(from, source), written = side_of(to, destination);
  const bool shared = from != nullptr && to != nullptr && share_memory(read, written);
  detail::check_mapping(mapping, read.num_blocks, written.num_blocks,
                        detail::CopyWithin::kTwoCaches);
  std::vector<Piece> pieces = pieces_of(read, written, mapping, device.planes.layout.row);
  if (shared) require_apart(pieces, mapping);
  if (detail::capturing() && !mapping.empty()) capture_swap(queue, read, written, device, mapping);
  join(pieces);
  for (const Piece& piece : pieces) {
    detail::enqueue_copy(queue, piece.source, piece.destination, piece.size_bytes,
                         &piece == &pieces.back() ? event : nullptr);
  }
}

void swap_blocks(const Context& /*context*/, cl_command_queue queue, const SwapSpace& source,
                 const SwapSpace& destination, std::span<const BlockPair> mapping, Event* event) {
  detail::swap_ends(queue, std::visit(DescribeCache{}, source),
                    std::visit(DescribeCache{}, destination), mapping, event);
}

}  // namespace clattn
