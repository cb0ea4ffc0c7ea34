#include "kernels/step_launch.hpp"

#include "base/error.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

void launch_stage(const StepCall& call, const StageArguments& arguments, std::size_t index,
                  std::size_t groups, Event* event) {
  const PagedStepView& step = call.step;
  const BuiltKernel& stage = call.kernels.stages[call.kernels.stage_for(*step.kernels, index)];
  KernelLease lease = stage.pool->acquire();
  lease.arg(step.meta)
      .arg(step.items_at.at(index))
      .arg(step.num_items.at(index))
      .arg(step.pages_at)
      .arg(call.query.buffer)
      .arg<cl_long>(call.query.offset)
      .arg(call.query_stride);
  arguments.bind_cache(lease);
  lease.arg(call.output.buffer)
      .arg<cl_long>(call.output.offset)
      .arg(call.output_stride)
      .arg(call.lse)
      .arg(step.partial_out)
      .arg(step.partial_lse2)
      .arg<cl_int>(call.kernels.shape.num_kv_heads)
      .arg<cl_float>(call.scale * kLog2E)
      .arg(step.causal)
      .arg<cl_int>(call.lse != nullptr ? 1 : 0);
  arguments.bind_options(lease);
  lease.enqueue(call.queue, groups, static_cast<std::size_t>(stage.variant->work_group_size),
                event);
}

void launch_merge(const StepCall& call, std::size_t groups, Event* event) {
  const BuiltKernel& merge = call.kernels.merge;
  KernelLease lease = merge.pool->acquire();
  lease.arg(call.step.meta)
      .arg(call.step.merges_at)
      .arg(call.step.num_merges)
      .arg(call.step.partial_out)
      .arg(call.step.partial_lse2)
      .arg(call.output.buffer)
      .arg<cl_long>(call.output.offset)
      .arg(call.output_stride)
      .arg(call.lse)
      .arg<cl_int>(call.kernels.shape.num_heads)
      .arg<cl_int>(call.lse != nullptr ? 1 : 0);
  lease.enqueue(call.queue, groups, static_cast<std::size_t>(merge.variant->work_group_size),
                event);
}

KernelInfo describe(const BuiltKernel& kernel) {
  const Variant& v = *kernel.variant;
  return {std::string(v.name), std::string(to_string(v.role)), v.work_group_size, v.block_rows,
          v.block_kv};
}

}  // namespace

const PagedStepView& checked_step(const AttentionMetadata& metadata,
                                  const AttentionKernels& kernels, std::int64_t num_blocks) {
  const PagedStepView* step = metadata.step();
  if (step == nullptr || step->kernels == nullptr || !kernels.runs_plan_of(*step->kernels)) {
    throw_invalid(
        "attn_metadata: built for another configuration; legal: metadata of a builder with this "
        "layer's heads, sizes, block_size, dtypes and context");
  }
  if (step->num_blocks > num_blocks) {
    throw_invalid("attn_metadata: its block ids reach up to {}, legal: below the cache's {} blocks",
                  step->num_blocks - 1, num_blocks);
  }
  return *step;
}

void launch_step(const StepCall& call, const StageArguments& arguments, Event* event,
                 std::vector<LaunchRecord>* launches) {
  if (!call.step.recordable) refuse_recording(call.queue, kFixedMetadata);
  if (launches != nullptr) launches->clear();
  if (event != nullptr) event->reset();  // stays empty when there is nothing to do
  const auto record = [&](const BuiltKernel& kernel, std::size_t groups, auto&& launch) {
    if (groups == 0) return;
    if (launches == nullptr) return launch(groups, event);
    LaunchRecord& entry = launches->emplace_back();
    entry.kernel = kernel.variant->name;
    entry.work_groups = static_cast<std::int64_t>(groups);
    entry.work_group_size = kernel.variant->work_group_size;
    launch(groups, &entry.event);
    if (event != nullptr) *event = entry.event;
  };
  const AttentionKernels& kernels = call.kernels;
  for (std::size_t i = 0; i < call.step.kernels->stages.size(); ++i) {
    const BuiltKernel& stage = kernels.stages[kernels.stage_for(*call.step.kernels, i)];
    const std::size_t groups = static_cast<std::size_t>(call.step.num_items.at(i)) *
                               static_cast<std::size_t>(kernels.shape.num_kv_heads) *
                               static_cast<std::size_t>(stage.tiling.head_chunks);
    record(stage, groups,
           [&](std::size_t count, Event* done) { launch_stage(call, arguments, i, count, done); });
  }
  record(kernels.merge,
         static_cast<std::size_t>(call.step.num_merges) *
             static_cast<std::size_t>(kernels.shape.num_heads),
         [&](std::size_t count, Event* done) { launch_merge(call, count, done); });
}

std::vector<KernelInfo> describe_kernels(const AttentionKernels& kernels) {
  std::vector<KernelInfo> infos;
  for (const BuiltKernel& stage : kernels.stages) infos.push_back(describe(stage));
  infos.push_back(describe(kernels.merge));
  return infos;
}

}  // namespace clattn::detail
