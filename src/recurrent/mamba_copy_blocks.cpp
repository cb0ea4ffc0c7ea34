#include <algorithm>
#include <array>
#include <numeric>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kv_cache/op_kernel.hpp"
#include "recurrent/bind.hpp"

namespace clattn {

namespace {

using detail::RecurrentCall, detail::throw_invalid_if;

/// A view in bytes: where pages begin and how far they are apart, and the bytes of a row.
struct ViewBytes {
  std::int64_t offset = 0, stride = 0, row = 0;
};

ViewBytes bytes_of(const RecurrentCall& call, const StateView& view, std::size_t from) {
  const auto element = static_cast<std::int64_t>(element_size_bytes(view.tensor.dtype));
  const std::span sizes = std::span(view.tensor.shape).subspan(from);
  const auto row = std::accumulate(sizes.begin(), sizes.end(), element,
                                   [&](std::int64_t product, std::int64_t size) {
                                     return detail::checked_mul(product, size, call.name);
                                   });
  return {detail::checked_mul(view.offset, element, call.name),
          detail::checked_mul(view.block_stride, element, call.name), row};
}

/// Both views, as the call gives them.
void check_views(const RecurrentCall& call, const StateView& conv_states, const StateView& states) {
  if (conv_states.buffer)
    detail::check_states(call, conv_states, std::array<std::int64_t, 2>{-1, -1}, "conv_states");
  if (states.buffer) {
    const std::vector<std::int64_t> any(states.tensor.shape.size(), -1);
    detail::check_states(call, states, any, "states");
  }
  throw_invalid_if(!conv_states.buffer && !states.buffer,
                   "{}: neither conv_states nor states has a buffer, legal: at least one",
                   call.name);
  throw_invalid_if(
      conv_states.buffer && states.buffer && conv_states.num_blocks != states.num_blocks,
      "{}: conv_states have {} pages, legal: {}, as states", call.name, conv_states.num_blocks,
      states.num_blocks);
}

}  // namespace

void mamba_copy_blocks(const Context& context, cl_command_queue queue, const StateView& conv_states,
                       const StateView& states, const RecurrentMetadata& metadata,
                       const DeviceList& targets, Event* event) {
  const RecurrentCall call{context, queue, "mamba_copy_blocks", metadata};
  detail::begin_call(call, event);
  check_views(call, conv_states, states);
  detail::check_at_least("mamba_copy_blocks: targets: offset", targets.offset, 0);
  if (metadata.num_reqs == 0) return;
  detail::require_size(
      targets.buffer,
      detail::checked_add(targets.offset, std::int64_t{metadata.num_reqs}, call.name),
      sizeof(cl_int), "mamba_copy_blocks: targets");
  const ViewBytes conv = conv_states.buffer ? bytes_of(call, conv_states, 1) : ViewBytes{};
  const ViewBytes state = states.buffer ? bytes_of(call, states, 0) : ViewBytes{};
  const std::int64_t all =
      conv.offset | conv.stride | conv.row | state.offset | state.stride | state.row;
  const std::int64_t unit = all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
  const StateView& pages = states.buffer ? states : conv_states;
  ClaStateCopy terms{};
  terms.lists = detail::bound_lists(metadata, pages.num_blocks);
  terms.targets_at = targets.offset;
  terms.conv_offset = conv.offset / unit;
  terms.conv_stride = conv.stride / unit;
  terms.row_units = conv.row / unit;
  terms.conv_rows =
      conv_states.buffer
          ? static_cast<cl_int>(std::min(conv_states.tensor.shape[0], detail::kMaxInt32))
          : 0;
  terms.state_offset = state.offset / unit;
  terms.state_stride = state.stride / unit;
  terms.state_units = state.row / unit;
  const detail::OpKernel kernel =
      detail::op_kernel(context, "clattn_mamba_copy_blocks", "recurrent/mamba_copy_blocks.cl",
                        fmt::format("-DCLA_COPY_BYTES={}", unit));
  constexpr std::int64_t kUnitsOfItem = 16, kUnitsOfSingle = 2048;  // before another group helps
  const std::int64_t of_group = kernel.group_size == 1
                                    ? kUnitsOfSingle
                                    : kUnitsOfItem * static_cast<std::int64_t>(kernel.group_size);
  const std::int64_t splits =
      std::clamp<std::int64_t>(std::max(terms.row_units, terms.state_units) / of_group, 1, 256);
  terms.num_splits = static_cast<cl_int>(splits);
  detail::KernelLease lease = kernel.pool->acquire();
  lease.arg(terms);
  detail::bind_lists(lease, metadata);
  lease.args(targets.buffer, conv_states.buffer, states.buffer)
      .enqueue(queue,
               detail::checked_mul(detail::to_size(metadata.num_reqs), detail::to_size(splits),
                                   call.name),
               kernel.group_size, event);
}

}  // namespace clattn
