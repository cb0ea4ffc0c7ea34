#include "kernels/launch/step_launch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"
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

/// One launch of a step: a stage or the merge.
struct Launch {
  const BuiltKernel& kernel;
  std::size_t part = 0;  ///< of PreparedStep::num_used
  cl_int entries_at = 0;
  cl_int num_entries = 0;
  cl_int tasks_each = 0;     ///< of an entry
  std::int32_t workers = 0;  ///< PlanCounts::workers
};

/// Two launches beside each other: the second goes to the step's side queue, after what the call's
/// queue held when this began. Without a side queue all go to the call's.
class SideBySide {
 public:
  explicit SideBySide(const StepCall& call) : call_(call) {
    if (call.step.side_queue != nullptr && groups_stay()) held_ = flush_marked(call.queue);
  }
  ~SideBySide() {
    if (open_) drain(call_.step.side_queue);  // an error came before join()
  }
  SideBySide(const SideBySide&) = delete;
  SideBySide& operator=(const SideBySide&) = delete;

  /// Where the step's next stage goes.
  cl_command_queue next_queue() {
    if (!held_ || std::exchange(is_first_, false)) return call_.queue;
    open_ = true;
    enqueue_wait(call_.step.side_queue, held_);
    return call_.step.side_queue;
  }
  /// What comes to the call's queue from now on waits for the second launch, too. `event`, if
  /// given, completes with both.
  void join(Event* event) {
    enqueue_wait(call_.queue, flush_marked(call_.step.side_queue), event);
    open_ = false;
  }

 private:
  /// A layer may run the plan on kernels that are not those it was made for.
  bool groups_stay() const {
    for (std::size_t i = 0; i < call_.step.kernels->stages.size(); ++i) {
      if (call_.step.counts.num_items.at(i) == 0) continue;
      const BuiltKernel& stage =
          call_.kernels.stages[call_.kernels.stage_for(*call_.step.kernels, i)];
      if (stage.variant->kernel().tasks != Tasks::kDealt) return false;
    }
    return true;
  }

  const StepCall& call_;
  Event held_;
  bool is_first_ = true, open_ = false;
};

/// Whether a launch has counters, tensor maps or partial results.
bool uses_workspace(const PagedStepView& step, const KernelTraits& traits) {
  return step.recordable || step.planned.num_partial_rows > 0 || traits.tensor_maps ||
         traits.tasks == Tasks::kQueue;
}

/// Buffers that a launch does without are null: drivers take time for each that is given.
void enqueue(const StepCall& call, LayerCall& layer, const Launch& launch, std::size_t groups,
             cl_command_queue queue, Event* event) {
  const bool one_cache = layer.v == layer.k;
  const bool has_workspace = uses_workspace(call.step, launch.kernel.variant->kernel());
  layer.args.entries_at = launch.entries_at;
  layer.args.num_entries = launch.num_entries;
  KernelLease lease = launch.kernel.pool->acquire();
  lease.args(layer.args, call.step.meta, has_workspace ? call.step.workspace : nullptr,
             call.tensors.query.buffer, layer.k, one_cache ? nullptr : layer.v,
             call.tensors.output.buffer, call.tensors.lse);
  for (std::size_t i = 0; i < layer.num_option_tensors; ++i) lease.arg(layer.option_tensors.at(i));
  lease.enqueue(queue, groups, to_size(launch.kernel.variant->work_group_size), event);
}

/// Launches one of the step's kernels, with a record if `launches` is given.
void launch_kernel(const StepCall& call, LayerCall& layer, const Launch& launch,
                   cl_command_queue queue, Recorder* recorder, Event* event,
                   std::vector<LaunchRecord>* launches) {
  if (launch.num_entries == 0) return;
  const Variant& variant = *launch.kernel.variant;
  const std::size_t tasks = to_size(launch.num_entries) * to_size(launch.tasks_each);
  const std::size_t groups = groups_for(call.kernels, launch.kernel, tasks, launch.workers);
  log(LogLevel::kTrace, "{}: {} tasks, {} groups", variant.name, tasks, groups);
  if (launches == nullptr) {
    enqueue(call, layer, launch, groups, queue, event);
  } else {
    LaunchRecord& entry = launches->emplace_back();
    entry.kernel = variant.name;
    entry.tasks = static_cast<std::int64_t>(tasks);
    entry.work_groups = static_cast<std::int64_t>(groups);
    entry.work_group_size = variant.work_group_size;
    entry.rounds_weights = variant.unit().rounds_probabilities;
    entry.multiplies_fp8 = variant.unit().fp8_products;
    enqueue(call, layer, launch, groups, queue, &entry.event);
    if (event != nullptr) *event = entry.event;
  }
  if (recorder != nullptr && variant.kernel().tasks != Tasks::kDealt) {
    recorder->limit_last(call.step.prepared->num_used.at(launch.part), to_size(launch.tasks_each));
  }
}

/// Elements of a token's row.
struct TokenWidths {
  std::int64_t query = 0, output = 0;
};
TokenWidths widths_of(const KernelShape& shape) {
  const std::int64_t heads = shape.num_heads;
  return {heads * (shape.head_size + shape.rope_dim), heads * shape.value_size()};
}

}  // namespace

const PagedStepView& checked_step(const AttentionMetadata& metadata,
                                  const AttentionKernels& kernels) {
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

void check_step_call(const StepCall& call) {
  const AttentionKernels& kernels = call.kernels;
  if (kernels.stages.back().variant->kernel().tasks == Tasks::kQueue) require_in_order(call.queue);
  check_recordable(call.queue, call.step);
  const std::int64_t heads = kernels.shape.num_heads;
  const std::int64_t tokens = num_rows(call.step, call.queue);
  const auto [query, output] = widths_of(kernels.shape);
  bounded_token_stride(call.tensors.query, {tokens, query, kernels.shape.dtype}, "query");
  throw_invalid_if(tokens > 0 && call.tensors.output.buffer == nullptr,
                   "Output tensor must be provided.");
  bounded_token_stride(call.tensors.output, {tokens, output, kernels.shape.dtype}, "output");
  if (call.tensors.lse != nullptr)
    check_rows({call.tensors.lse, DType::kF32}, {0, tokens, heads, heads}, "lse");
}

void launch_step(const StepCall& call, LayerCall& layer, Event* event,
                 std::vector<LaunchRecord>* launches) {
  const AttentionKernels& kernels = call.kernels;
  const PagedStepView& step = call.step;
  Recorder* const recorder = recorder_for(call.queue, step);
  const auto [query_width, output_width] = widths_of(kernels.shape);
  if (launches != nullptr) launches->clear();
  if (event != nullptr) event->reset();  // stays empty when there is nothing to do

  ClaCall& args = layer.args;
  args.q_offset = call.tensors.query.offset;
  args.q_token_stride = token_stride(call.tensors.query, query_width);
  args.out_offset = call.tensors.output.offset;
  args.out_token_stride = token_stride(call.tensors.output, output_width);
  args.pages_at = step.pages_at;
  args.counters_at = step.workspace_layout.counters_at;
  args.tensor_maps_at = step.workspace_layout.tensor_maps_at;
  args.partial_lse2_at = step.workspace_layout.partial_lse2_at;
  args.partial_out_at = step.workspace_layout.partial_out_at;
  args.merge_counts_at = step.merge_counts_at;
  args.most_splits = step.counts.most_splits;
  args.num_kv_heads = kernels.shape.num_kv_heads;
  args.causal = step.causal;
  args.write_lse = call.tensors.lse != nullptr ? 1 : 0;
  SideBySide side(call);
  for (std::size_t i = 0; i < step.kernels->stages.size(); ++i) {
    if (step.counts.num_items.at(i) == 0) continue;
    const BuiltKernel& stage = kernels.stages[kernels.stage_for(*step.kernels, i)];
    const cl_command_queue queue = side.next_queue();
    const bool is_second = queue != call.queue;
    launch_kernel(call, layer,
                  {stage, i, step.plan.items_at.at(i), step.counts.num_items.at(i),
                   stage.tiling.groups_per_item, step.planned.workers.at(i)},
                  queue, recorder, event, launches);
    if (!is_second) continue;
    if (launches != nullptr) launches->back().beside_last = true;
    side.join(event);
  }
  launch_kernel(call, layer,
                {kernels.merge, kMaxTileClasses, step.plan.merges_at, step.counts.num_merges,
                 merge_tasks(*kernels.merge.variant, kernels.shape, step.counts.most_splits)},
                call.queue, recorder, event, launches);
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
  launch_step({queue, kernels, step, tensors}, layer, nullptr, nullptr);
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
