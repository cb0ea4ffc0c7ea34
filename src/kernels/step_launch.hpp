#pragma once

#include <clattn/attention.hpp>
#include <numbers>
#include <vector>

#include "kernels/attention_kernels.hpp"
#include "kernels/paged_step.hpp"

namespace clattn::detail {

inline constexpr float kLog2E = std::numbers::log2e_v<float>;

/// What the kernels of a step take whatever form the cache has. Strides in elements.
struct StepCall {
  cl_command_queue queue = nullptr;
  const AttentionKernels& kernels;
  const PagedStepView& step;
  TensorRef query;
  cl_long query_stride = 0;
  TensorRef output;
  cl_long output_stride = 0;
  cl_mem lse = nullptr;
  float scale = 1;  ///< of the softmax
};

/// The step behind `metadata`, if these kernels can run its plan on a cache of `num_blocks` pages.
const PagedStepView& checked_step(const AttentionMetadata& metadata,
                                  const AttentionKernels& kernels, std::int64_t num_blocks);

/// Cache and options of a layer, bound in two places of every stage's argument list.
class StageArguments {
 public:
  virtual ~StageArguments() = default;
  virtual void bind_cache(KernelLease& lease) const = 0;
  virtual void bind_options(KernelLease& lease) const = 0;
};

/// Launches the stages that have items, then the merge if anything was split. `launches` gets a
/// record a kernel, `event` completes with the last.
void launch_step(const StepCall& call, const StageArguments& arguments, Event* event,
                 std::vector<LaunchRecord>* launches);

/// The kernels for reports.
std::vector<KernelInfo> describe_kernels(const AttentionKernels& kernels);

}  // namespace clattn::detail
