#include "kernels/warm_up.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "opencl/recorder.hpp"

namespace clattn::detail {

IdleMemory::IdleMemory(cl_command_queue queue, const AttentionKernels& kernels) {
  refuse_recording(queue, "warm_up");
  const KernelShape& shape = kernels.shape;
  const std::int32_t width = shape.head_size + shape.rope_dim;
  const auto row = static_cast<std::size_t>(width);
  const std::size_t page = static_cast<std::size_t>(std::max(shape.block_size, 1)) *
                           static_cast<std::size_t>(shape.num_kv_heads) * row;
  const std::size_t token = static_cast<std::size_t>(shape.num_heads) * row;
  const std::vector<std::byte> nothing(std::max(page, token) * sizeof(float));
  zeros = kernels.runtime->allocate_copy(nothing);
  grow_workspace(workspace, *kernels.runtime, {});
  constexpr std::array kNoSlot = {kPadSlotId};
  slots = kernels.runtime->allocate_copy(std::as_bytes(std::span(kNoSlot)));
}

void launch_idle_step(cl_command_queue queue, const AttentionKernels& kernels, LayerCall layer,
                      const IdleMemory& memory) {
  // What recorded steps are padded with: an item without tokens, a merge of nothing. Page 0.
  struct Meta {
    ClaWorkItem item{};
    ClaMergeItem merge{};
    std::array<cl_int, 4> pages{};
  };
  std::array<Meta, 1> meta{};
  meta[0].item.partial_row = -1;
  const Buffer uploaded = kernels.runtime->allocate_copy(std::as_bytes(std::span(meta)));
  PagedStepView step;
  step.kernels = &kernels;
  step.meta = uploaded.handle();
  std::fill_n(step.num_items.begin(), kernels.stages.size(), 1);
  step.merges_at = offsetof(Meta, merge) / sizeof(cl_int);
  step.num_merges = 1;
  step.pages_at = offsetof(Meta, pages) / sizeof(cl_int);
  const cl_mem zeros = memory.zeros.handle();
  step.workspace = memory.workspace.buffer.handle();
  step.workspace_layout = layout_of(memory.workspace);
  launch_step({queue, kernels, step, {zeros}, {zeros}, zeros}, layer, nullptr, nullptr);
}

}  // namespace clattn::detail
