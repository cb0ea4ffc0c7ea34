#include "kernels/step_launch.hpp"

#include <algorithm>
#include <cmath>
#include <span>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/cache_checks.hpp"
#include "kernels/cache_write.hpp"
#include "kernels/costs.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

void launch_stage(const StepCall& call, const LayerArguments& arguments, std::size_t index,
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
      .arg<cl_long>(call.query.token_stride);
  arguments.bind_cache(lease);
  lease.arg(call.output.buffer)
      .arg<cl_long>(call.output.offset)
      .arg<cl_long>(call.output.token_stride)
      .arg(call.lse)
      .arg(step.partial_out)
      .arg(step.partial_lse2)
      .arg<cl_int>(call.kernels.shape.num_kv_heads)
      .arg<cl_float>(call.scale_log2e)
      .arg<cl_int>(call.bidirectional ? 0 : step.causal)
      .arg<cl_int>(call.lse != nullptr ? 1 : 0);
  if (joins_splits(*stage.variant) || takes_from_queue(*stage.variant)) lease.arg(step.arrivals);
  if (makes_tensor_maps(*stage.variant)) lease.arg(step.tensor_maps);
  arguments.bind_options(lease);
  lease.enqueue(call.queue, groups, static_cast<std::size_t>(stage.variant->work_group_size),
                event);
}

/// Work-groups for that many tasks: as many, or fewer where groups stay for several.
std::size_t groups_for(const AttentionKernels& kernels, const BuiltKernel& stage,
                       std::size_t tasks) {
  const std::int32_t staying = staying_groups(*stage.variant);
  if (staying == 0) return tasks;
  return std::min(tasks, static_cast<std::size_t>(
                             std::max(kernels.runtime->capabilities().compute_units, 1) * staying));
}

void launch_merge(const StepCall& call, const LayerArguments& arguments, std::size_t groups,
                  Event* event) {
  const BuiltKernel& merge = call.kernels.merge;
  KernelLease lease = merge.pool->acquire();
  lease.arg(call.step.meta)
      .arg(call.step.merges_at)
      .arg(call.step.num_merges)
      .arg(call.step.partial_out)
      .arg(call.step.partial_lse2)
      .arg(call.output.buffer)
      .arg<cl_long>(call.output.offset)
      .arg<cl_long>(call.output.token_stride)
      .arg(call.lse)
      .arg<cl_int>(call.kernels.shape.num_heads)
      .arg<cl_int>(call.lse != nullptr ? 1 : 0);
  arguments.bind_merge(lease);
  lease.enqueue(call.queue, groups, static_cast<std::size_t>(merge.variant->work_group_size),
                event);
}

KernelInfo describe(const BuiltKernel& kernel, const DeviceCapabilities& device) {
  const Variant& v = *kernel.variant;
  return {std::string(v.name),
          std::string(to_string(v.role)),
          v.work_group_size,
          v.block_rows,
          v.block_kv,
          rounds_weights(v),
          concurrent_groups(v, device)};
}

}  // namespace

const PagedStepView& checked_step(const AttentionMetadata& metadata,
                                  const AttentionKernels& kernels) {
  const PagedStepView* step = metadata.step();
  if (step == nullptr || step->kernels == nullptr || !kernels.runs_plan_of(*step->kernels)) {
    throw_invalid(
        "attn_metadata: built for another configuration; legal: metadata of a builder with this "
        "layer's heads, sizes, block_size, dtypes and context");
  }
  return *step;
}

void check_block_ids(const PagedStepView& step, std::int64_t num_blocks) {
  if (step.num_blocks > num_blocks) {
    throw_invalid("attn_metadata: its block ids reach up to {}, legal: below the cache's {} blocks",
                  step.num_blocks - 1, num_blocks);
  }
}

std::int64_t num_rows(const PagedStepView& step, cl_command_queue queue) {
  if (Recorder::of(queue) != nullptr) return step.most_tokens;
  return step.batch.query_start_loc.empty() ? 0 : step.batch.query_start_loc.back();
}

void check_tensor(TensorRef& tensor, std::int64_t tokens, std::int64_t row, DType dtype,
                  std::string_view name) {
  tensor.token_stride = checked_token_stride(tensor, row, name);
  check_rows({tensor.buffer, dtype}, {tensor.offset, tokens, tensor.token_stride, row}, name);
}

Recorder* recorder_for(cl_command_queue queue, const PagedStepView& step) {
  Recorder* const recorder = Recorder::of(queue);
  if (recorder == nullptr) return nullptr;
  if (!step.recordable) refuse_recording(queue, "metadata of a builder without graph_batch_size");
  recorder->require(step.prepared);
  return recorder;
}

void launch_step(StepCall call, const LayerArguments& arguments, Event* event,
                 std::vector<LaunchRecord>* launches) {
  if (takes_from_queue(*call.kernels.stages.back().variant)) require_in_order(call.queue);
  Recorder* const recorder = recorder_for(call.queue, call.step);
  const KernelShape& shape = call.kernels.shape;
  const std::int64_t heads = shape.num_heads;
  const std::int64_t tokens = num_rows(call.step, call.queue);
  check_tensor(call.query, tokens, heads * (shape.head_size + shape.rope_dim), shape.dtype,
               "query");
  check_tensor(call.output, tokens, heads * shape.head_size, shape.dtype, "output");
  if (call.lse != nullptr) check_rows({call.lse, DType::kF32}, {0, tokens, heads, heads}, "lse");
  if (launches != nullptr) launches->clear();
  if (event != nullptr) event->reset();  // stays empty when there is nothing to do
  const auto finish = [&](const BuiltKernel& kernel, std::size_t tasks, std::size_t groups,
                          auto&& launch) {
    if (launches == nullptr) return launch(groups, event);
    LaunchRecord& entry = launches->emplace_back();
    entry.kernel = kernel.variant->name;
    entry.tasks = static_cast<std::int64_t>(tasks);
    entry.work_groups = static_cast<std::int64_t>(groups);
    entry.work_group_size = kernel.variant->work_group_size;
    entry.rounds_weights = rounds_weights(*kernel.variant);
    launch(groups, &entry.event);
    if (event != nullptr) *event = entry.event;
  };
  // `part`: of the step's launches; it has `entries`, each worth `groups_each` tasks.
  const auto record = [&](const BuiltKernel& kernel, std::size_t part, cl_int entries,
                          std::int64_t groups_each, auto&& launch) {
    if (entries == 0) return;
    const auto tasks = static_cast<std::size_t>(entries * groups_each);
    const std::size_t groups = groups_for(call.kernels, kernel, tasks);
    finish(kernel, tasks, groups, launch);
    // Groups that stride over the tasks meet the padding, too: all of them share it, or stop there.
    const bool strides = staying_groups(*kernel.variant) > 0 && !takes_from_queue(*kernel.variant);
    if (recorder != nullptr && !strides)
      recorder->limit_last(call.step.prepared->num_used.at(part),
                           static_cast<std::size_t>(groups_each));
  };
  const AttentionKernels& kernels = call.kernels;
  for (std::size_t i = 0; i < call.step.kernels->stages.size(); ++i) {
    const BuiltKernel& stage = kernels.stages[kernels.stage_for(*call.step.kernels, i)];
    record(stage, i, call.step.num_items.at(i), stage.tiling.groups_per_item,
           [&](std::size_t count, Event* done) { launch_stage(call, arguments, i, count, done); });
  }
  const BuiltKernel& merge = call.kernels.merge;
  const std::int64_t heads_of_group = merge_heads(*merge.variant, shape.head_size);
  record(merge, kMaxTileClasses, call.step.num_merges, ceil_div(heads, heads_of_group),
         [&](std::size_t count, Event* done) { launch_merge(call, arguments, count, done); });
}

float softmax_scale(std::optional<float> chosen, std::int32_t width) {
  return chosen.value_or(1.0F / std::sqrt(static_cast<float>(width)));
}

Buffer make_head_params(const Runtime& runtime, const AttentionConfig& config) {
  if (config.alibi_slopes.empty() && config.sinks.empty()) return {};
  const auto heads = static_cast<std::size_t>(config.num_heads);
  std::vector<float> params(2 * heads, 0.0F);
  std::copy(config.alibi_slopes.begin(), config.alibi_slopes.end(), params.begin());
  std::copy(config.sinks.begin(), config.sinks.end(),
            params.begin() + static_cast<std::ptrdiff_t>(heads));
  for (float& param : params) param *= kLog2E;
  return runtime.allocate_copy(std::as_bytes(std::span(params)));
}

std::vector<KernelInfo> describe_kernels(const AttentionKernels& kernels) {
  const DeviceCapabilities& device = kernels.runtime->capabilities();
  std::vector<KernelInfo> infos;
  for (const BuiltKernel& stage : kernels.stages) infos.push_back(describe(stage, device));
  infos.push_back(describe(kernels.merge, device));
  if (kernels.cache_write.variant) infos.push_back(describe(kernels.cache_write, device));
  return infos;
}

}  // namespace clattn::detail
