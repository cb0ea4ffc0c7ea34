#include "kernels/warm_up.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "base/checked.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

IdleMemory::IdleMemory(cl_command_queue queue, const AttentionKernels& kernels) {
  refuse_recording(queue, "warm_up");
  const KernelShape& shape = kernels.shape;
  const std::size_t row = to_size(shape.head_size + shape.rope_dim);
  const std::size_t page = to_size(std::max(shape.block_size, 1)) * to_size(shape.num_kv_heads);
  const std::vector<std::byte> nothing(std::max(page, to_size(shape.num_heads)) * row *
                                       sizeof(float));
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
  std::fill_n(step.counts.num_items.begin(), kernels.stages.size(), 1);
  step.plan.merges_at = offsetof(Meta, merge) / sizeof(cl_int);
  step.counts.num_merges = 1;
  step.pages_at = offsetof(Meta, pages) / sizeof(cl_int);
  const cl_mem zeros = memory.zeros.handle();
  step.workspace = memory.workspace.buffer.handle();
  step.workspace_layout = layout_of(memory.workspace);
  const AttentionTensors tensors{.query = {zeros}, .output = {zeros}, .lse = zeros};
  launch_step({queue, kernels, step, tensors}, layer, nullptr, nullptr);
}

}  // namespace clattn::detail
