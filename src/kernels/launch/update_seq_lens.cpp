#include "kernels/launch/update_seq_lens.hpp"

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/launch/step_launch.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

std::size_t group_size_of(const detail::AttentionKernels& kernels) {
  return detail::to_size(cache_op_work_group_size(kernels.runtime->capabilities()));
}

detail::KernelLease bind_cut_tiles(const detail::PagedStepView& step, const DeviceLengths& lengths,
                                   bool advanced, const Buffer& errors) {
  const ClaSight sight = detail::sight_of(*step.planner, step.causal != 0);
  detail::KernelLease lease = step.cut_tiles->acquire();
  lease.args(step.meta, step.splits_at, step.num_splits, step.lens_at, step.pages_at,
             cl_int{sight.page_size}, cl_int{sight.causal}, cl_int{sight.window_left},
             cl_int{sight.window_right}, cl_int{sight.chunk}, cl_int{sight.chunk_lookback},
             lengths.seq_lens, lengths.slot_mapping, cl_int{advanced ? 1 : 0}, errors);
  return lease;
}

/// Splits of a tile that met other lengths would disagree on their number.
void require_apart(const Buffer& buffer, cl_mem meta, std::string_view name) {
  detail::throw_invalid_if(
      detail::place_of(buffer.handle()).memory == detail::place_of(meta).memory,
      "update_seq_lens: {} lies in the step's metadata, legal: memory of its own", name);
}

}  // namespace

void detail::check_update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                                   const DeviceLengths& lengths, const DeviceErrors& errors) {
  check_current(metadata, queue);
  const PagedStepView* const step = metadata.step();
  throw_invalid_if(
      step == nullptr || step->kernels == nullptr || step->cut_tiles == nullptr,
      "update_seq_lens: attn_metadata: its lengths are on the host, legal: metadata of a builder "
      "with device_seq_lens");
  require_size(lengths.seq_lens, step->num_lens, sizeof(std::int32_t), "update_seq_lens: seq_lens");
  if (lengths.slot_mapping)
    require_size(lengths.slot_mapping, step->most_tokens, sizeof(std::int64_t),
                 "update_seq_lens: slot_mapping");
  require_apart(lengths.seq_lens, step->meta, "seq_lens");
  if (lengths.slot_mapping) require_apart(lengths.slot_mapping, step->meta, "slot_mapping");
  require_apart(errors.word(), step->meta, "errors");
  require_in_order(queue);
  check_recordable(queue, *step);
}

void detail::enqueue_update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                                     const DeviceLengths& lengths, const DeviceErrors& errors,
                                     Event* event, LengthsFrom from) {
  const PagedStepView& step = *metadata.step();
  recorder_for(queue, step);
  if (event != nullptr) event->reset();  // stays empty when there is nothing to do
  const std::size_t group_size = group_size_of(*step.kernels);
  bind_cut_tiles(step, lengths, from == LengthsFrom::kAdvanceStep, errors.word())
      .enqueue(queue, ceil_div(to_size(step.num_splits), group_size), group_size, event);
}

void detail::warm_up_seq_lens(cl_command_queue queue, const AttentionKernels& kernels,
                              const PlannerConfig& planner,
                              const std::shared_ptr<KernelPool>& cut_tiles) {
  refuse_recording(queue, "warm_up");
  const Buffer untouched = kernels.runtime->allocate(sizeof(ClaSplit));
  PagedStepView idle;
  idle.meta = untouched.handle();
  idle.planner = &planner;
  idle.cut_tiles = cut_tiles;
  bind_cut_tiles(idle, {untouched}, false, untouched).enqueue(queue, 1, group_size_of(kernels));
  Queue::adopt(queue).finish();
}

void update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                     const DeviceLengths& lengths, DeviceErrors& errors, Event* event) {
  detail::check_update_seq_lens(queue, metadata, lengths, errors);
  detail::enqueue_update_seq_lens(queue, metadata, lengths, errors, event,
                                  detail::LengthsFrom::kApplication);
}

}  // namespace clattn
