#include "kernels/launch/update_lists.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/launch/step_launch.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn {
namespace detail {

std::size_t group_size_of(const AttentionKernels& kernels) {
  return to_size(cache_op_work_group_size(kernels.runtime->capabilities()));
}

void require_source(const StepUpdate& update, const Buffer& buffer, std::int64_t count,
                    std::size_t element_bytes, std::string_view name) {
  const PagedStepView& step = *update.metadata.step();
  require_size(buffer, count, element_bytes, fmt::format("{}: {}", update.call, name));
  throw_invalid_if(place_of(buffer.handle()).memory == place_of(step.meta).memory,
                   "{}: {} lies in the step's metadata, legal: memory of its own", update.call,
                   name);
}

void add_sight(KernelLease& lease, const PagedStepView& step) {
  const ClaSight sight = sight_of(*step.planner, step.causal != 0);
  lease.args(cl_int{sight.page_size}, cl_int{sight.causal}, cl_int{sight.window_left},
             cl_int{sight.window_right}, cl_int{sight.chunk}, cl_int{sight.chunk_lookback},
             cl_int{sight.span_rule});
}

void enqueue_list_rows(cl_command_queue queue, const PagedStepView& step, const DeviceLists& lists,
                       const Buffer& errors, Event* event) {
  const std::size_t group_size = group_size_of(*step.kernels);
  const cl_int work_items = std::max({step.counts.num_listed, step.num_lens, 1});
  KernelLease lease = step.list_rows->acquire();
  lease.args(step.meta, cl_int{step.plan.listed_at}, step.sources_at,
             cl_int{step.counts.num_listed}, step.requests_at, step.lens_at, step.starts_at,
             step.num_lens, step.tree_bits_at, step.tree_words);
  add_sight(lease, step);
  lease.args(lists.direction, lists.tree_sizes, lists.tree_bits,
             static_cast<cl_long>(lists.tree_bits_stride), errors);
  lease.enqueue(queue, ceil_div(to_size(work_items), group_size), group_size, event);
}

void warm_up_lists(cl_command_queue queue, const AttentionKernels& kernels,
                   const PlannerConfig& planner, const std::shared_ptr<KernelPool>& list_rows) {
  refuse_recording(queue, "warm_up");
  const Buffer untouched = kernels.runtime->allocate(sizeof(ClaRowSource));
  PagedStepView idle;
  idle.kernels = &kernels;
  idle.meta = untouched.handle();
  idle.planner = &planner;
  idle.list_rows = list_rows;
  enqueue_list_rows(queue, idle, {}, untouched, nullptr);
  Queue::adopt(queue).finish();
}

namespace {

/// Throws unless the call gives the list if and only if the step's builder takes it.
void check_given(const StepUpdate& update, const Buffer& list, bool wanted, std::string_view name,
                 std::string_view option) {
  const bool given = static_cast<bool>(list);
  throw_invalid_if(given && !wanted, "{}: {} is given, legal without {}: none", update.call, name,
                   option);
  throw_invalid_if(!given && wanted, "{}: {} is missing, legal with {}: a buffer", update.call,
                   name, option);
}

void check_sources(const StepUpdate& update, const DeviceLists& lists) {
  const PagedStepView& step = *update.metadata.step();
  const ListRules& rules = step.planner->lists;
  check_given(update, lists.direction, rules.device_directions, "direction", "device_directions");
  check_given(update, lists.tree_sizes, rules.device_trees, "tree_sizes", "device_trees");
  check_given(update, lists.tree_bits, rules.device_trees, "tree_bits", "device_trees");
  if (lists.direction) require_source(update, lists.direction, step.num_lens, 1, "direction");
  throw_invalid_if(!rules.device_trees && lists.tree_bits_stride != 0,
                   "{}: tree_bits_stride is {}, legal without tree_bits: 0", update.call,
                   lists.tree_bits_stride);
  if (!rules.device_trees) return;
  require_source(update, lists.tree_sizes, step.num_lens, sizeof(std::int32_t), "tree_sizes");
  throw_invalid_if(
      lists.tree_bits_stride < std::max(step.tree_words, 1) || lists.tree_bits_stride > INT32_MAX,
      "{}: tree_bits_stride is {}, legal: {} … {} (words of the largest tree)", update.call,
      lists.tree_bits_stride, std::max(step.tree_words, 1), INT32_MAX);
  require_source(update, lists.tree_bits, step.most_tokens * lists.tree_bits_stride,
                 sizeof(std::uint32_t), "tree_bits");
}

}  // namespace
}  // namespace detail

void update_lists(cl_command_queue queue, const AttentionMetadata& metadata,
                  const DeviceLists& lists, DeviceErrors& errors, Event* event) {
  detail::check_current(metadata, queue);
  const detail::PagedStepView* const step = metadata.step();
  const bool takes_lists =
      step != nullptr && step->kernels != nullptr && step->list_rows != nullptr &&
      (step->planner->lists.device_directions || step->planner->lists.device_trees);
  detail::throw_invalid_if(!takes_lists,
                           "update_lists: attn_metadata: its lists are on the host, legal: "
                           "metadata of a builder with device_directions or device_trees");
  const detail::StepUpdate update{"update_lists", metadata, errors};
  detail::check_sources(update, lists);
  detail::require_source(update, errors.word(), 1, sizeof(std::int32_t), "errors");
  detail::require_in_order(queue);
  detail::check_recordable(queue, *step);
  detail::recorder_for(queue, *step);
  if (event != nullptr) event->reset();  // stays empty when there is nothing to do
  if (step->num_lens == 0) return;
  detail::enqueue_list_rows(queue, *step, lists, errors.word(), event);
}

}  // namespace clattn
