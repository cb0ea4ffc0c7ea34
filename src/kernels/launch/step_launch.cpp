#include "kernels/launch/step_launch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>

#include "base/checked.hpp"
#include "base/environment.hpp"
#include "base/log.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

/// Work-groups for that many tasks: as many, or fewer where groups stay for several.
std::size_t groups_for(const AttentionKernels& kernels, const BuiltKernel& stage, std::size_t tasks,
                       std::int32_t planned) {
  const KernelTraits& traits = stage.variant->kernel();
  if (traits.tasks == Tasks::kOneEach) return tasks;
  if (planned > 0) return std::min(tasks, to_size(planned));
  const std::int32_t units = std::max(kernels.runtime->capabilities().compute_units, 1);
  return std::min(tasks, to_size(units * traits.groups));
}

/// Two launches at once: the second goes to the step's side queue, after what the call's
/// queue held when this began. Without a side queue all go to the call's.
class SideBySide {
 public:
  SideBySide(cl_command_queue queue, const AttentionKernels& kernels, const PagedStepView& step)
      : queue_(queue), side_queue_(step.side_queue) {
    if (side_queue_ != nullptr && groups_stay(kernels, step)) held_ = flush_marked(queue);
  }
  ~SideBySide() {
    if (open_) drain(side_queue_);  // an error came before join()
  }
  SideBySide(const SideBySide&) = delete;
  SideBySide& operator=(const SideBySide&) = delete;

  /// Where the step's next stage goes.
  cl_command_queue next_queue() {
    if (!held_ || std::exchange(is_first_, false)) return queue_;
    open_ = true;
    enqueue_wait(side_queue_, held_);
    return side_queue_;
  }
  /// What comes to the call's queue from now on waits for the second launch, too. `event`, if
  /// given, completes with both.
  void join(Event* event) {
    enqueue_wait(queue_, flush_marked(side_queue_), event);
    open_ = false;
  }

 private:
  /// A layer may run the plan on kernels that are not those it was made for.
  static bool groups_stay(const AttentionKernels& kernels, const PagedStepView& step) {
    for (std::size_t i = 0; i < step.kernels->stages.size(); ++i) {
      if (step.counts.num_items.at(i) == 0) continue;
      const BuiltKernel& stage = kernels.stages[kernels.stage_for(*step.kernels, i)];
      if (stage.variant->kernel().tasks != Tasks::kDealt) return false;
    }
    return true;
  }

  cl_command_queue queue_, side_queue_;
  Event held_;
  bool is_first_ = true, open_ = false;
};

/// Whether a launch has counters, tensor maps or partial results.
bool uses_workspace(const PagedStepView& step, const KernelTraits& traits) {
  return step.recordable || step.planned.num_partial_rows > 0 || traits.tensor_maps ||
         traits.tasks == Tasks::kQueue;
}

/// The record of a launch that is about to be enqueued.
LaunchRecord& add_record(std::vector<LaunchRecord>& launches, const Variant& variant,
                         std::size_t tasks, std::size_t groups) {
  LaunchRecord& record = launches.emplace_back();
  record.kernel = variant.name;
  record.tasks = static_cast<std::int64_t>(tasks);
  record.work_groups = static_cast<std::int64_t>(groups);
  record.work_group_size = variant.work_group_size;
  record.rounds_probabilities = variant.unit().rounds_probabilities;
  record.multiplies_fp8 = variant.unit().fp8_products;
  return record;
}

/// The arguments that all launches of a step share and that do not depend on the layer.
void bind_step(ClaCall& args, const KernelShape& shape, const PagedStepView& step,
               const AttentionTensors& tensors) {
  args.q_offset = tensors.query.offset;
  args.q_token_stride = token_stride(tensors.query, shape.query_row());
  args.out_offset = tensors.output.offset;
  args.out_token_stride = token_stride(tensors.output, shape.output_row());
  args.pages_at = step.pages_at;
  args.tensor_maps_at = step.workspace_layout.tensor_maps_at;
  args.partial_lse2_at = step.workspace_layout.partial_lse2_at;
  args.partial_out_at = step.workspace_layout.partial_out_at;
  args.merge_counts_at = step.merge_counts_at;
  args.most_splits = step.counts.most_splits;
  args.num_kv_heads = shape.num_kv_heads;
  args.causal = step.causal;
  args.write_lse = tensors.lse != nullptr ? 1 : 0;
}

}  // namespace

void check_current(const AttentionMetadata& metadata, cl_command_queue queue) {
  const PagedStepView* const step = metadata.step();
  if (!environment().debug || step == nullptr) return;
  throw_invalid_if(!step->is_last,
                   "attn_metadata: its builder has built since, legal: what its last build() gave");
  throw_invalid_if(step->kernels != nullptr && step->queue != queue,
                   "queue: another than the one that attn_metadata was built on, legal: that one");
}

const PagedStepView& checked_step(const AttentionMetadata& metadata, cl_command_queue queue,
                                  const AttentionKernels& kernels) {
  check_current(metadata, queue);
  const PagedStepView* step = metadata.step();
  throw_invalid_if(
      step == nullptr || step->kernels == nullptr,
      "attn_metadata: built for another configuration: its backend is not one of this library's");
  const std::string why = kernels.why_not_plan_of(*step->kernels);
  throw_invalid_if(!why.empty(), "attn_metadata: built for another configuration: {}", why);
  return *step;
}

std::int64_t num_rows(const PagedStepView& step, cl_command_queue queue) {
  if (Recorder::of(queue) != nullptr) return step.most_tokens;
  return step.batch.query_start_loc.empty() ? 0 : step.batch.query_start_loc.back();
}

void check_recordable(cl_command_queue queue, const PagedStepView& step) {
  if (!step.recordable) refuse_recording(queue, "metadata of a builder without graph_batch_size");
}

Recorder* recorder_for(cl_command_queue queue, const PagedStepView& step) {
  check_recordable(queue, step);
  Recorder* const recorder = Recorder::of(queue);
  if (recorder != nullptr) recorder->require(step.prepared);
  return recorder;
}

void check_step_call(cl_command_queue queue, const AttentionKernels& kernels,
                     const PagedStepView& step, const AttentionTensors& tensors) {
  if (kernels.stages.back().variant->kernel().tasks == Tasks::kQueue) require_in_order(queue);
  check_recordable(queue, step);
  const KernelShape& shape = kernels.shape;
  const std::int64_t tokens = num_rows(step, queue);
  bounded_token_stride(tensors.query, {tokens, shape.query_row(), shape.dtype}, "query");
  throw_invalid_if(tokens > 0 && tensors.output.buffer == nullptr,
                   "Output tensor must be provided.");
  bounded_token_stride(tensors.output, {tokens, shape.output_row(), shape.dtype}, "output");
  if (tensors.lse != nullptr)
    check_rows({tensors.lse, DType::kF32}, {0, tokens, shape.num_heads, shape.num_heads}, "lse");
  require_context(
      {{"query", tensors.query.buffer}, {"output", tensors.output.buffer}, {"lse", tensors.lse}},
      kernels.runtime->context());
}

void launch_step(cl_command_queue queue, const AttentionKernels& kernels, const PagedStepView& step,
                 const AttentionTensors& tensors, LayerCall& layer, Event* event,
                 std::vector<LaunchRecord>* launches) {
  Recorder* const recorder = recorder_for(queue, step);
  if (launches != nullptr) launches->clear();
  if (event != nullptr) event->reset();  // stays empty when there is nothing to do
  bind_step(layer.args, kernels.shape, step, tensors);
  const std::size_t num_stages = step.kernels->stages.size();
  SideBySide side(queue, kernels, step);
  for (std::size_t i = 0; i <= num_stages; ++i) {  // the merge last
    const bool merges = i == num_stages;
    layer.args.entries_at = merges ? step.plan.merges_at : step.plan.items_at.at(i);
    layer.args.num_entries = merges ? step.counts.num_merges : step.counts.num_items.at(i);
    if (layer.args.num_entries == 0) continue;
    const BuiltKernel& kernel =
        merges ? kernels.merge : kernels.stages[kernels.stage_for(*step.kernels, i)];
    const Variant& variant = *kernel.variant;
    const auto tasks_each =
        to_size(merges ? merge_tasks(variant, kernels.shape, step.counts.most_splits)
                       : kernel.tiling.groups_per_item);
    const std::size_t tasks = to_size(layer.args.num_entries) * tasks_each;
    const std::size_t groups =
        groups_for(kernels, kernel, tasks, merges ? 0 : step.planned.workers.at(i));
    log(LogLevel::kTrace, "{}: {} tasks, {} groups", variant.name, tasks, groups);
    Event* const done =
        launches == nullptr ? event : &add_record(*launches, variant, tasks, groups).event;
    const cl_command_queue target = merges ? queue : side.next_queue();
    // Buffers that a launch does without are null: drivers take time for each that is given.
    KernelLease lease = kernel.pool->acquire();
    lease.args(layer.args, step.meta,
               uses_workspace(step, variant.kernel()) ? step.workspace : nullptr,
               tensors.query.buffer, layer.k, layer.v == layer.k ? nullptr : layer.v,
               tensors.output.buffer, tensors.lse);
    for (std::size_t t = 0; t < layer.num_option_tensors; ++t)
      lease.arg(layer.option_tensors.at(t));
    if (layer.row_scales) lease.arg(*layer.row_scales);
    lease.enqueue(target, groups, to_size(variant.work_group_size), done);
    if (done != event && event != nullptr) *event = *done;
    if (recorder != nullptr && variant.kernel().tasks != Tasks::kDealt)
      recorder->limit_last(step.prepared->num_used.at(merges ? kMaxTileClasses : i), tasks_each);
    if (target == queue) continue;
    if (launches != nullptr) launches->back().beside_last = true;
    side.join(event);
  }
}

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
  // One item without tokens, one merge without splits, and page 0.
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
  launch_step(queue, kernels, step, tensors, layer, nullptr, nullptr);
}

float softmax_scale(std::optional<float> chosen, std::int32_t width) {
  return chosen.value_or(1.0F / std::sqrt(static_cast<float>(width)));
}

Buffer make_head_params(const Runtime& runtime, const AttentionConfig& config) {
  if (config.alibi_slopes.empty() && config.sinks.empty()) return {};
  const auto heads = to_size(config.num_heads);
  std::vector<float> params(2 * heads, 0.0F);
  std::ranges::copy(config.alibi_slopes, params.begin());
  std::ranges::copy(config.sinks, params.begin() + static_cast<std::ptrdiff_t>(heads));
  for (float& param : params) param *= kLog2E;
  return runtime.allocate_copy(std::as_bytes(std::span(params)));
}

std::vector<KernelInfo> describe_kernels(const AttentionKernels& kernels) {
  std::vector<KernelInfo> infos;
  const auto add = [&](const BuiltKernel& kernel) {
    const Variant& v = *kernel.variant;
    infos.push_back(
        {std::string(v.name), std::string(to_string(v.role)), v.work_group_size, v.block_rows,
         v.block_kv, v.unit().rounds_probabilities,
         concurrent_groups(v, kernels.shape.cache_dtype, kernels.runtime->capabilities()),
         v.kernel().few_rows});
  };
  for (const BuiltKernel& stage : kernels.stages) add(stage);
  add(kernels.merge);
  if (kernels.cache_write.variant) add(kernels.cache_write);
  return infos;
}

}  // namespace clattn::detail
