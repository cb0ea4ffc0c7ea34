#include <fmt/format.h>

#include <clattn/cache_ops.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/cache_checks.hpp"
#include "kv_cache/op_kernel.hpp"
#include "kv_cache/planes.hpp"
#include "opencl/call_memory.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::checked_mul;
using detail::throw_invalid;

void check_order(const KVCache& cache) {
  if (cache.keys_by_dim()) {
    detail::throw_unsupported(
        "convert_blocks: key_dim_stride is {}, supported: 1 (NHD, HND and tiles)",
        cache.key_dim_stride);
  }
  if (cache.head_size % 8 != 0) {
    detail::throw_unsupported("convert_blocks: head_size is {}, supported: multiples of 8",
                              cache.head_size);
  }
  if (cache.block_size < 1 || cache.num_kv_heads < 1 || cache.head_size < 1) {
    throw_invalid("convert_blocks: {} tokens x {} heads x {}, legal: >= 1 each", cache.block_size,
                  cache.num_kv_heads, cache.head_size);
  }
  detail::check_cache(cache);
}

void check_alike(const KVCache& source, const KVCache& destination) {
  if (source.block_size == destination.block_size &&
      source.num_kv_heads == destination.num_kv_heads &&
      source.head_size == destination.head_size && source.dtype == destination.dtype) {
    return;
  }
  throw_invalid(
      "convert_blocks: from {} tokens x {} heads x {} of {} to {} x {} x {} of {}, legal: equal "
      "shapes and types",
      source.block_size, source.num_kv_heads, source.head_size, to_string(source.dtype),
      destination.block_size, destination.num_kv_heads, destination.head_size,
      to_string(destination.dtype));
}

/// Of latent rows the values are a part: writing both would leave one of the two.
void check_same_form(const KVCache& source, const KVCache& destination) {
  const auto form = [](const KVCache& cache) -> std::string_view {
    return cache.k_offset == cache.v_offset ? "latent rows" : "keys and values";
  };
  if (form(source) == form(destination)) return;
  throw_invalid("convert_blocks: from a cache of {} to one of {}, legal: both of one form",
                form(source), form(destination));
}

void check_apart(const KVCache& source, const KVCache& destination) {
  const detail::MemoryPlace a = detail::place_of(source.buffer.handle());
  const detail::MemoryPlace b = detail::place_of(destination.buffer.handle());
  if (a.context != b.context) throw_invalid("convert_blocks: caches of two contexts, legal: one");
  if (a.memory == b.memory) {
    throw_invalid("convert_blocks: source and destination share memory, legal: buffers apart");
  }
}

/// In the order of convert_blocks.cl's places.
void add_places(const KVCache& cache, std::vector<std::int64_t>& meta) {
  for (const std::int64_t place :
       {cache.k_offset, cache.v_offset, cache.block_stride, cache.token_stride, cache.head_stride,
        std::int64_t{cache.tiles ? 1 : 0}}) {
    meta.push_back(place);
  }
}

}  // namespace

void convert_blocks(const Context& context, cl_command_queue queue, const KVCache& source,
                    const KVCache& destination, std::span<const BlockPair> mapping, Event* event) {
  detail::clear(event);
  detail::refuse_recording(queue, "convert_blocks");
  check_order(source);
  check_order(destination);
  check_alike(source, destination);
  check_same_form(source, destination);
  check_apart(source, destination);
  detail::check_mapping(mapping, source.num_blocks, destination.num_blocks);
  if (mapping.empty()) return;
  const std::int64_t groups =
      checked_mul(static_cast<std::int64_t>(mapping.size()), std::int64_t{2} * source.block_size,
                  "convert_blocks: work");
  detail::check_count(groups, "convert_blocks: tokens of K and V");
  std::vector<std::int64_t> meta;
  add_places(source, meta);
  add_places(destination, meta);
  for (const BlockPair& pair : mapping) {
    meta.push_back(pair.source);
    meta.push_back(pair.destination);
  }
  const detail::OpKernel kernel =
      detail::op_kernel(context, "clattn_convert_blocks", "convert_blocks.cl",
                        fmt::format("-DCLA_HEAD_DIM={} -DCLA_ELEMENT_BYTES={}", source.head_size,
                                    element_size_bytes(source.dtype)));
  detail::CallMemory::Lease device_meta =
      context.runtime().call_memory().upload(queue, std::as_bytes(std::span(meta)));
  Event done;
  kernel.pool->acquire()
      .arg(source.buffer.handle())
      .arg(destination.buffer.handle())
      .arg(device_meta.buffer().handle())
      .arg<cl_int>(source.block_size)
      .arg<cl_int>(source.num_kv_heads)
      .enqueue(queue, static_cast<std::size_t>(groups), kernel.group_size, &done);
  device_meta.used_until(done, event);
}

}  // namespace clattn
