#include <algorithm>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/checked.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kv_cache/op_kernel.hpp"
#include "kv_cache/planes.hpp"
#include "opencl/call_memory.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::CachePlanes, detail::kMaxPlanes, detail::Plane;
using detail::PlaneLayout, detail::throw_invalid_if, detail::to_size;

constexpr std::size_t kSlotBytes = sizeof(std::int64_t), kStartBytes = sizeof(std::int32_t);

/// Caches as rows of tokens.
struct TokenPlanes {
  PlaneLayout token;  ///< of one token; its blocks are those of the cache
  std::int64_t block_size = 0;
  std::int64_t token_stride = 0;  ///< bytes
  std::vector<Plane> planes;
  std::int64_t num_slots() const { return token.num_blocks * block_size; }
  bool is_like(const TokenPlanes& other) const {
    return token == other.token && block_size == other.block_size &&
           token_stride == other.token_stride;
  }
};

std::int64_t stride_of(const KVCache& cache) {
  return cache.token_stride * static_cast<std::int64_t>(element_size_bytes(cache.dtype));
}
std::int64_t stride_of(const MLACache& cache) {
  return (std::int64_t{cache.kv_lora_rank} + cache.rope_dim) *
         static_cast<std::int64_t>(element_size_bytes(cache.dtype));
}

template <typename Cache>
TokenPlanes tokens_of(const Cache& cache) {
  CachePlanes whole = detail::planes_of(cache);  // checks fields and extents
  Cache one = cache;
  one.block_size = 1;
  TokenPlanes tokens{detail::planes_of(one).layout, cache.block_size, stride_of(cache),
                     std::move(whole.planes)};
  tokens.token.block_stride = whole.layout.block_stride;
  return tokens;
}

template <typename Cache>
TokenPlanes tokens_of(std::span<const Cache> caches) {
  TokenPlanes all = tokens_of(caches[0]);
  for (std::size_t layer = 1; layer < caches.size(); ++layer) {
    TokenPlanes each = tokens_of(caches[layer]);
    throw_invalid_if(!each.is_like(all) || caches[layer].dtype != caches[0].dtype,
                     "move_tokens: layer {} has other strides, blocks or types than layer 0, "
                     "legal: the same",
                     layer);
    std::ranges::move(each.planes, std::back_inserter(all.planes));
  }
  // Twice the same moves are not once the same.
  std::set<std::pair<cl_mem, std::int64_t>> seen;
  for (const Plane& plane : all.planes)
    throw_invalid_if(!seen.emplace(plane.buffer.handle(), plane.offset).second,
                     "move_tokens: two caches lie in the same memory, legal: each named once");
  return all;
}

void check_starts(std::span<const std::int32_t> starts, std::int64_t pairs) {
  throw_invalid_if(starts.empty() || starts[0] != 0,
                   "move_tokens: starts begins with {}, legal: 0 (num_requests + 1 elements)",
                   starts.empty() ? "nothing" : std::to_string(starts[0]));
  for (std::size_t r = 1; r < starts.size(); ++r)
    throw_invalid_if(starts[r] < starts[r - 1] || starts[r] > pairs,
                     "move_tokens: starts[{}] is {}, legal: {} … {} (pairs)", r, starts[r],
                     starts[r - 1], pairs);
  throw_invalid_if(starts.back() != pairs, "move_tokens: starts ends with {}, legal: {} (pairs)",
                   starts.back(), pairs);
}

void check_moves(const TokenMoves& moves, std::int64_t num_slots) {
  throw_invalid_if(moves.src_slots.size() != moves.dst_slots.size(),
                   "move_tokens: src_slots and dst_slots hold {} and {} elements, legal: as many",
                   moves.src_slots.size(), moves.dst_slots.size());
  throw_invalid_if(moves.starts.size() > INT32_MAX || moves.src_slots.size() > INT32_MAX,
                   "move_tokens: {} requests and {} pairs, legal: at most {} each",
                   moves.starts.size(), moves.src_slots.size(), INT32_MAX);
  check_starts(moves.starts, std::ssize(moves.src_slots));
  std::unordered_map<std::int64_t, std::size_t> writers;  // request by slot
  const auto each = [&](const auto& visit) {
    for (std::size_t r = 0; r + 1 < moves.starts.size(); ++r)
      for (auto i = to_size(moves.starts[r]); i < to_size(moves.starts[r + 1]); ++i) visit(r, i);
  };
  const auto meet = [&](std::size_t request, std::int64_t slot) {
    const auto writer = writers.find(slot);
    throw_invalid_if(writer != writers.end() && writer->second != request,
                     "move_tokens: slot {} is moved to by request {} and used by request {}, "
                     "legal: one request",
                     slot, writer->second, request);
  };
  each([&](std::size_t request, std::size_t pair) {
    const std::pair<const char*, std::int64_t> ends[] = {{"src_slots", moves.src_slots[pair]},
                                                         {"dst_slots", moves.dst_slots[pair]}};
    for (const auto& [field, slot] : ends)
      throw_invalid_if(slot < 0 || slot >= num_slots,
                       "move_tokens: {}[{}] is {}, legal: 0 … {} (the caches' slots)", field, pair,
                       slot, num_slots - 1);
    meet(request, moves.dst_slots[pair]);
    writers.emplace(moves.dst_slots[pair], request);
  });
  each([&](std::size_t request, std::size_t pair) { meet(request, moves.src_slots[pair]); });
}

/// Where the lists are on the device.
struct ListsAt {
  cl_mem src = nullptr, dst = nullptr, starts = nullptr;
  std::int64_t num_pairs = 0;
  std::int32_t num_requests = 0;
};

/// A launch that only has to be enqueued.
struct PlannedMove {
  detail::KernelLease lease;
  std::size_t groups, group_size;
};

/// Of up to kMaxPlanes planes.
PlannedMove plan_move(const Context& context, const TokenPlanes& tokens,
                      std::span<const Plane> planes, const ListsAt& lists) {
  const std::int64_t unit = detail::copy_unit(tokens.token, planes, tokens.token_stride);
  const PlaneLayout& token = tokens.token;
  ClaTokenMoves moves{};
  for (std::size_t i = 0; i < planes.size(); ++i) moves.offsets[i] = planes[i].offset / unit;
  moves.num_slots = tokens.num_slots();
  moves.block_stride = token.block_stride / unit;
  moves.token_stride = tokens.token_stride / unit;
  moves.head_stride = (token.outer_count > 1 ? token.outer_stride : token.inner_stride) / unit;
  moves.block_size = static_cast<int>(tokens.block_size);
  moves.row_units = static_cast<int>(token.row / unit);
  moves.num_units = moves.row_units * static_cast<int>(token.inner_count * token.outer_count);
  moves.num_pairs = static_cast<int>(std::min<std::int64_t>(lists.num_pairs, INT32_MAX));
  moves.num_requests = lists.num_requests;
  const detail::OpKernel kernel =
      detail::op_kernel(context, "clattn_move_tokens", "cache/move_tokens.cl",
                        fmt::format("-DCLA_COPY_BYTES={}", unit));
  const auto group = static_cast<int>(kernel.group_size);
  // A CPU's group moves 16 KiB of a token, if it has as much.
  const int of_group = group == 1 ? static_cast<int>((std::int64_t{16} << 10) / unit) : group;
  moves.num_splits = (moves.num_units - 1) / of_group + 1;
  detail::KernelLease lease = kernel.pool->acquire();
  for (std::size_t i = 0; i < kMaxPlanes; ++i)
    lease.arg(planes[i < planes.size() ? i : 0].buffer.handle());
  const std::size_t groups = detail::checked_mul(
      detail::checked_mul(planes.size(), to_size(moves.num_requests), "move_tokens: work"),
      to_size(moves.num_splits), "move_tokens: work");
  lease.args(moves, lists.src, lists.dst, lists.starts);
  return {std::move(lease), groups, kernel.group_size};
}

void move_by(const Context& context, cl_command_queue queue, const TokenPlanes& tokens,
             const ListsAt& lists, Event* event) {
  std::vector<PlannedMove> launches;  // all of them before the first: moving twice moves wrongly
  for (std::size_t first = 0; first < tokens.planes.size(); first += kMaxPlanes) {
    const std::size_t count = std::min(kMaxPlanes, tokens.planes.size() - first);
    launches.push_back(
        plan_move(context, tokens, std::span(tokens.planes).subspan(first, count), lists));
  }
  for (PlannedMove& launch : launches)
    launch.lease.enqueue(queue, launch.groups, launch.group_size,
                         &launch == &launches.back() ? event : nullptr);
}

/// Writes a case of each layer, if calls are captured.
template <typename Cache>
std::vector<detail::AddResults> capture_moves(cl_command_queue queue, std::span<const Cache> caches,
                                              const TokenMoves& moves) {
  std::vector<detail::AddResults> results;
  if (!detail::capturing()) return results;
  for (const Cache& cache : caches)
    results.push_back(detail::capture_move_tokens(queue, &cache, moves));
  return results;
}

/// Lists on the device as those of the host that move the same.
struct ReadMoves {
  std::vector<std::int64_t> src, dst;
  std::vector<std::int32_t> starts = {0};
  TokenMoves view() const { return {src, dst, starts}; }
};
ReadMoves read_moves(cl_command_queue handle, const DeviceTokenMoves& moves, std::int64_t pairs,
                     std::int64_t num_slots) {
  const Queue queue = Queue::adopt(handle);
  const auto read = [&]<typename T>(const Buffer& buffer, std::int64_t count, T) {
    std::vector<T> values(to_size(count));
    queue.read(buffer, std::as_writable_bytes(std::span(values)));
    return values;
  };
  const auto src = read(moves.src_slots, pairs, std::int64_t{});
  const auto dst = read(moves.dst_slots, pairs, std::int64_t{});
  const auto starts = read(moves.starts, std::int64_t{moves.num_requests} + 1, std::int32_t{});
  const auto is_slot = [&](std::int64_t slot) { return slot >= 0 && slot < num_slots; };
  ReadMoves made;
  for (std::size_t r = 0; r + 1 < starts.size(); ++r) {
    const std::int64_t end = std::min<std::int64_t>(starts[r + 1], pairs);
    for (std::int64_t i = std::max(starts[r], 0); i < end; ++i) {
      if (!is_slot(src[to_size(i)]) || !is_slot(dst[to_size(i)])) continue;
      made.src.push_back(src[to_size(i)]);
      made.dst.push_back(dst[to_size(i)]);
    }
    made.starts.push_back(static_cast<std::int32_t>(made.src.size()));
  }
  return made;
}

template <typename Cache>
void move_by_host(const Context& context, cl_command_queue queue, std::span<const Cache> caches,
                  const TokenMoves& moves, Event* event) {
  detail::clear(event);
  detail::refuse_recording(queue, "move_tokens");
  detail::require_in_order(queue);
  if (caches.empty()) return;
  const TokenPlanes tokens = tokens_of(caches);
  check_moves(moves, tokens.num_slots());
  if (moves.src_slots.empty()) return;
  const std::vector<detail::AddResults> results = capture_moves(queue, caches, moves);
  const auto upload = [&](const auto& list) {
    return context.runtime().call_memory().upload(queue, std::as_bytes(list));
  };
  detail::CallMemory::Lease src = upload(moves.src_slots), dst = upload(moves.dst_slots);
  detail::CallMemory::Lease starts = upload(moves.starts);
  Event done;
  move_by(context, queue, tokens,
          {src.buffer().handle(), dst.buffer().handle(), starts.buffer().handle(),
           std::ssize(moves.src_slots), static_cast<std::int32_t>(moves.starts.size()) - 1},
          &done);
  src.used_until(done, nullptr);
  dst.used_until(done, nullptr);
  starts.used_until(done, event);
  for (const detail::AddResults& add : results) detail::add_results(add, queue);
}

template <typename Cache>
void move_by_device(const Context& context, cl_command_queue queue, std::span<const Cache> caches,
                    const DeviceTokenMoves& moves, Event* event) {
  detail::clear(event);
  detail::require_in_order(queue);
  detail::check_at_least("move_tokens: num_requests", moves.num_requests, 0);
  if (caches.empty() || moves.num_requests == 0) return;
  const std::size_t pairs =
      std::min(moves.src_slots.size_bytes(), moves.dst_slots.size_bytes()) / kSlotBytes;
  throw_invalid_if(!moves.src_slots || !moves.dst_slots || !moves.starts,
                   "move_tokens: src_slots, dst_slots or starts is no buffer, legal: all of them");
  throw_invalid_if(moves.starts.size_bytes() < (to_size(moves.num_requests) + 1) * kStartBytes,
                   "move_tokens: starts holds {} elements, legal: at least {} (num_requests + 1)",
                   moves.starts.size_bytes() / kStartBytes, std::int64_t{moves.num_requests} + 1);
  const TokenPlanes tokens = tokens_of(caches);
  std::vector<detail::AddResults> results;
  if (detail::capturing() && detail::Recorder::of(queue) == nullptr) {
    const auto count = static_cast<std::int64_t>(pairs);
    results =
        capture_moves(queue, caches, read_moves(queue, moves, count, tokens.num_slots()).view());
  }
  move_by(context, queue, tokens,
          {moves.src_slots.handle(), moves.dst_slots.handle(), moves.starts.handle(),
           static_cast<std::int64_t>(pairs), moves.num_requests},
          event);
  for (const detail::AddResults& add : results) detail::add_results(add, queue);
}

/// Moves caches, or first their codes and then the scales of tokens and heads: every move of one
/// part is checked before any of the other, since both have the same slots.
void move_parts(std::span<const KVCache> caches, Event* event, const auto& move) {
  const auto has_rows = [](const KVCache& cache) { return cache.row_scales.has_value(); };
  if (std::ranges::none_of(caches, has_rows)) return move(caches, event);
  throw_invalid_if(!std::ranges::all_of(caches, has_rows),
                   "move_tokens: caches with and without a scale for each token and head, legal: "
                   "alike");
  detail::throw_unsupported_if(detail::capturing(),
                               "move_tokens: captured over a cache with a scale for each token "
                               "and head, supported: not captured");
  std::vector<KVCache> codes, scales;
  for (const KVCache& cache : caches) {
    detail::check_cache(cache);
    codes.push_back(cache);
    codes.back().row_scales.reset();
    scales.push_back(detail::row_scale_cache(cache));
  }
  move(codes, nullptr);
  move(scales, event);
}

}  // namespace

void move_tokens(const Context& context, cl_command_queue queue, std::span<const KVCache> caches,
                 const TokenMoves& moves, Event* event) {
  move_parts(caches, event, [&](std::span<const KVCache> part, Event* done) {
    move_by_host(context, queue, part, moves, done);
  });
}
void move_tokens_mla(const Context& context, cl_command_queue queue,
                     std::span<const MLACache> caches, const TokenMoves& moves, Event* event) {
  move_by_host(context, queue, caches, moves, event);
}
void move_tokens(const Context& context, cl_command_queue queue, std::span<const KVCache> caches,
                 const DeviceTokenMoves& moves, Event* event) {
  move_parts(caches, event, [&](std::span<const KVCache> part, Event* done) {
    move_by_device(context, queue, part, moves, done);
  });
}
void move_tokens_mla(const Context& context, cl_command_queue queue,
                     std::span<const MLACache> caches, const DeviceTokenMoves& moves,
                     Event* event) {
  move_by_device(context, queue, caches, moves, event);
}

}  // namespace clattn
