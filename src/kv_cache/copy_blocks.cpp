#include <algorithm>
#include <vector>

#include "base/checked.hpp"
#include "capture/capture.hpp"
#include "kv_cache/op_kernel.hpp"
#include "kv_cache/planes.hpp"
#include "opencl/call_memory.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::CachePlanes, detail::checked_mul, detail::kMaxPlanes, detail::Plane;
using detail::PlaneLayout;
using detail::throw_invalid_if;

std::int32_t to_int(std::int64_t value) {
  throw_invalid_if(value > INT32_MAX, "copy_blocks: {} units or pairs, legal: up to {}", value,
                   INT32_MAX);
  return static_cast<std::int32_t>(value);
}

/// One launch: up to kMaxPlanes planes.
void copy_planes(const Context& context, cl_command_queue queue, const PlaneLayout& layout,
                 std::span<const Plane> planes, std::span<const BlockPair> mapping, Event* event) {
  const std::int64_t unit = detail::copy_unit(layout, planes);
  const std::int64_t block_units = checked_mul(
      layout.row / unit, checked_mul(layout.inner_count, layout.outer_count, "copy_blocks: rows"),
      "copy_blocks: bytes of a block");
  // Enough work to outweigh a group's start, and enough groups for one large block. A GPU's group
  // copies 8 KiB in one turn.
  const bool cpu = cache_op_work_group_size(context.capabilities()) == 1;
  const std::int64_t split_bytes = std::int64_t{cpu ? 32 : 8} << 10;
  const std::int64_t splits = detail::ceil_div(block_units * unit, split_bytes);
  std::vector<std::int64_t> meta(kMaxPlanes);
  for (std::size_t i = 0; i < planes.size(); ++i) meta[i] = planes[i].offset / unit;
  for (const BlockPair& pair : mapping) {
    meta.push_back(pair.source);
    meta.push_back(pair.destination);
  }
  const detail::OpKernel kernel =
      detail::op_kernel(context, "clattn_copy_blocks", "cache/copy_blocks.cl",
                        fmt::format("-DCLA_COPY_BYTES={}", unit));
  detail::KernelLease lease = kernel.pool->acquire();
  for (std::size_t i = 0; i < kMaxPlanes; ++i) {
    lease.arg(planes[i < planes.size() ? i : 0].buffer.handle());
  }
  const auto pairs = static_cast<std::int64_t>(mapping.size());
  const std::int64_t groups =
      checked_mul(checked_mul(pairs, splits, "copy_blocks: work"),
                  static_cast<std::int64_t>(planes.size()), "copy_blocks: work");
  detail::CallMemory::Lease device_meta =
      context.runtime().call_memory().upload(queue, std::as_bytes(std::span(meta)));
  Event done;
  lease
      .args(device_meta.buffer(), cl_int{to_int(pairs)}, cl_int{to_int(splits)},
            cl_int{to_int(block_units)}, cl_long{layout.block_stride / unit},
            cl_int{to_int(layout.row / unit)}, cl_int{to_int(layout.inner_count)},
            cl_long{layout.inner_stride / unit}, cl_long{layout.outer_stride / unit})
      .enqueue(queue, static_cast<std::size_t>(to_int(groups)), kernel.group_size, &done);
  device_meta.used_until(done, event);
}

}  // namespace

template <typename Cache>
void detail::copy_pages(const Context& context, cl_command_queue queue,
                        std::span<const Cache> caches, std::span<const BlockPair> mapping,
                        Event* event) {
  detail::clear(event);
  detail::refuse_recording(queue, "copy_blocks");
  if (caches.empty()) return;
  const PlaneLayout layout = detail::planes_of(caches[0]).layout;
  std::vector<Plane> planes;
  for (std::size_t layer = 0; layer < caches.size(); ++layer) {
    const CachePlanes each = detail::planes_of(caches[layer]);
    throw_invalid_if(
        each.layout != layout || caches[layer].dtype != caches[0].dtype,
        "copy_blocks: layer {} has {} blocks of {} x {} x {} bytes ({}), legal: layer 0's {} "
        "blocks of {} x {} x {} bytes ({}) and the same strides",
        layer, each.layout.num_blocks, each.layout.outer_count, each.layout.inner_count,
        each.layout.row, to_string(caches[layer].dtype), layout.num_blocks, layout.outer_count,
        layout.inner_count, layout.row, to_string(caches[0].dtype));
    planes.insert(planes.end(), each.planes.begin(), each.planes.end());
  }
  detail::check_mapping(mapping, layout.num_blocks, layout.num_blocks,
                        detail::CopyWithin::kOneCache);
  if (mapping.empty()) return;
  std::vector<detail::AddResults> results;
  if (detail::capturing()) {
    for (const Cache& cache : caches)
      results.push_back(detail::capture_copy_blocks(queue, &cache, mapping));
  }
  Event before;  // the last event speaks for all
  for (std::size_t first = 0; first < planes.size(); first += kMaxPlanes) {
    if (before) detail::keep_order(queue, before);
    const std::size_t count = std::min(kMaxPlanes, planes.size() - first);
    const bool last = first + count == planes.size();
    copy_planes(context, queue, layout, std::span(planes).subspan(first, count), mapping,
                last ? event : &before);
  }
  for (const detail::AddResults& add : results) detail::add_results(add, queue);
}
template void detail::copy_pages(const Context& context, cl_command_queue queue,
                                 std::span<const PackedPages> caches,
                                 std::span<const BlockPair> mapping, Event* event);

void copy_blocks(const Context& context, cl_command_queue queue, std::span<const KVCache> caches,
                 std::span<const BlockPair> mapping, Event* event) {
  detail::copy_pages(context, queue, caches, mapping, event);
}

void copy_blocks_mla(const Context& context, cl_command_queue queue,
                     std::span<const MLACache> caches, std::span<const BlockPair> mapping,
                     Event* event) {
  detail::copy_pages(context, queue, caches, mapping, event);
}

}  // namespace clattn
