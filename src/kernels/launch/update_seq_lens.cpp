#include "kernels/launch/update_seq_lens.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/checked.hpp"
#include "kernels/launch/step_launch.hpp"
#include "kernels/launch/update_lists.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

/// The kernel, bound to what cut_tiles.cl and cut_queries.cl share of their arguments.
template <typename... Own>
detail::KernelLease bind_cut(const detail::PagedStepView& step, const Buffer& seq_lens,
                             const Buffer& slot_mapping, const Own&... own) {
  detail::KernelLease lease = step.cut_tiles->acquire();
  lease.args(step.meta, step.splits_at, step.num_splits, step.lens_at, step.pages_at,
             step.requests_at);
  detail::add_sight(lease, step);
  lease.args(seq_lens, slot_mapping, own...);
  return lease;
}

detail::KernelLease bind_cut_tiles(const detail::PagedStepView& step, const DeviceLengths& lengths,
                                   bool advanced, const Buffer& errors) {
  return bind_cut(step, lengths.seq_lens, lengths.slot_mapping, cl_int{advanced ? 1 : 0}, errors);
}

detail::KernelLease bind_cut_queries(const detail::PagedStepView& step,
                                     const DeviceQueryLengths& lengths, const Buffer& errors) {
  return bind_cut(step, lengths.seq_lens, lengths.slot_mapping, lengths.query_start_loc,
                  step.bounds_at, step.starts_at, step.num_lens, step.num_slots, errors);
}

/// What both calls ask of a step that takes its lengths from the device.
void check_update(cl_command_queue queue, const detail::StepUpdate& update, const Buffer& seq_lens,
                  const Buffer& slot_mapping) {
  const detail::PagedStepView& step = *update.metadata.step();
  detail::require_source(update, seq_lens, step.num_lens, sizeof(std::int32_t), "seq_lens");
  if (slot_mapping)
    detail::require_source(update, slot_mapping, step.most_tokens, sizeof(std::int64_t),
                           "slot_mapping");
  detail::require_source(update, update.errors.word(), 1, sizeof(std::int32_t), "errors");
  detail::require_in_order(queue);
  detail::check_recordable(queue, step);
}

bool takes_lengths(const AttentionMetadata& metadata) {
  const detail::PagedStepView* const step = metadata.step();
  return step != nullptr && step->kernels != nullptr && step->cut_tiles != nullptr;
}

}  // namespace

void detail::check_update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                                   const DeviceLengths& lengths, const DeviceErrors& errors) {
  check_current(metadata, queue);
  throw_invalid_if(
      !takes_lengths(metadata),
      "update_seq_lens: attn_metadata: its lengths are on the host, legal: metadata of a builder "
      "with device_seq_lens");
  throw_invalid_if(metadata.step()->bounds_at >= 0,
                   "update_seq_lens: attn_metadata: its query lengths are on the device, too, "
                   "legal: metadata of a builder without device_query_lens, or "
                   "update_query_lens()");
  check_update(queue, {"update_seq_lens", metadata, errors}, lengths.seq_lens,
               lengths.slot_mapping);
}

void detail::enqueue_update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                                     const DeviceLengths& lengths, const DeviceErrors& errors,
                                     Event* event, LengthsFrom from) {
  const PagedStepView& step = *metadata.step();
  recorder_for(queue, step);
  if (event != nullptr) event->reset();  // stays empty when there is nothing to do
  const std::size_t group_size = group_size_of(*step.kernels);
  Event* const own_event = step.list_rows == nullptr ? event : nullptr;
  bind_cut_tiles(step, lengths, from == LengthsFrom::kAdvanceStep, errors.word())
      .enqueue(queue, ceil_div(to_size(step.num_splits), group_size), group_size, own_event);
  if (step.list_rows != nullptr) enqueue_list_rows(queue, step, {}, errors.word(), event);
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
  (planner.most_query_len > 0 ? bind_cut_queries(idle, {untouched, untouched}, untouched)
                              : bind_cut_tiles(idle, {untouched}, false, untouched))
      .enqueue(queue, 1, group_size_of(kernels));
  Queue::adopt(queue).finish();
}

void update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                     const DeviceLengths& lengths, DeviceErrors& errors, Event* event) {
  detail::check_update_seq_lens(queue, metadata, lengths, errors);
  detail::enqueue_update_seq_lens(queue, metadata, lengths, errors, event,
                                  detail::LengthsFrom::kApplication);
}

void update_query_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                       const DeviceQueryLengths& lengths, DeviceErrors& errors, Event* event) {
  detail::check_current(metadata, queue);
  detail::throw_invalid_if(
      !takes_lengths(metadata) || metadata.step()->bounds_at < 0,
      "update_query_lens: attn_metadata: its query lengths are on the host, legal: metadata of a "
      "builder with device_query_lens");
  const detail::PagedStepView& step = *metadata.step();
  const detail::StepUpdate update{"update_query_lens", metadata, errors};
  detail::require_source(update, lengths.query_start_loc, std::int64_t{step.num_lens} + 1,
                         sizeof(std::int32_t), "query_start_loc");
  check_update(queue, update, lengths.seq_lens, lengths.slot_mapping);
  detail::recorder_for(queue, step);
  if (event != nullptr) event->reset();  // stays empty when there is nothing to do
  if (step.num_lens == 0) return;
  const std::size_t group_size = detail::group_size_of(*step.kernels);
  const cl_int work_items = std::max({step.num_splits, step.num_slots, step.num_lens + 1});
  Event* const own_event = step.list_rows == nullptr ? event : nullptr;
  bind_cut_queries(step, lengths, errors.word())
      .enqueue(queue, detail::ceil_div(detail::to_size(work_items), group_size), group_size,
               own_event);
  if (step.list_rows != nullptr) detail::enqueue_list_rows(queue, step, {}, errors.word(), event);
}

}  // namespace clattn
