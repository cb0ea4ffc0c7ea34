#pragma once

#include <clattn/cache_ops.hpp>
#include <memory>
#include <string_view>

#include "kernels/choose/attention_kernels.hpp"
#include "kernels/step/paged_step.hpp"

namespace clattn::detail {

/// What is updated, and by which call.
struct StepUpdate {
  std::string_view call;
  const AttentionMetadata& metadata;
  const DeviceErrors& errors;
};
/// Throws unless `buffer` holds `count` elements outside of the step's metadata: groups that met
/// other values than their neighbours would disagree with them.
void require_source(const StepUpdate& update, const Buffer& buffer, std::int64_t count,
                    std::size_t element_bytes, std::string_view name);

/// Work-items per group of the kernels that update a step.
std::size_t group_size_of(const AttentionKernels& kernels);
/// Adds what the step's queries see, which such a kernel takes as integers.
void add_sight(KernelLease& lease, const PagedStepView& step);

/// Lists the step's rows anew, by the lengths that it has and by `lists`, which have been checked;
/// what is not among these stays as it was.
void enqueue_list_rows(cl_command_queue queue, const PagedStepView& step, const DeviceLists& lists,
                       const Buffer& errors, Event* event);
/// Launches that kernel once without work and waits (AttentionMetadataBuilder::warm_up()).
void warm_up_lists(cl_command_queue queue, const AttentionKernels& kernels,
                   const PlannerConfig& planner, const std::shared_ptr<KernelPool>& list_rows);

}  // namespace clattn::detail
