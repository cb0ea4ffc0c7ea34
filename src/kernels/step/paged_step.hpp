#pragma once

#include <clattn/attention.hpp>
#include <memory>

#include "capture/capture.hpp"
#include "kernels/choose/attention_kernels.hpp"
#include "kernels/launch/workspace.hpp"
#include "kernels/step/cache_checks.hpp"
#include "metadata/validate.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

/// What forward() binds: where the parts of a step's metadata lie on the device.
struct PagedStepView {
  const AttentionKernels* kernels = nullptr;  ///< the plan fits these kernels' tiles only
  bool is_last = true;               ///< false, under CLATTN_DEBUG: its builder has made another
  cl_command_queue queue = nullptr;  ///< that it was uploaded by
  cl_mem meta = nullptr;             ///< one buffer for everything below; offsets in ints
  PlanCounts counts;                 ///< with the padding of recorded steps
  cl_int pages_at = 0;
  cl_int merge_counts_at = -1;            ///< ClaMergeCounts; -1: not recorded
  std::shared_ptr<KernelPool> cut_tiles;  ///< of steps with device_seq_lens: makes the items
  cl_int splits_at = 0;                   ///< what it makes them of,
  cl_int num_splits = 0;                  ///< one for each item
  cl_int lens_at = 0;                     ///< and the lengths that it took,
  cl_int num_lens = 0;                    ///< padding included
  cl_int bounds_at = -1;                  ///< ClaQueryBounds [num_lens]; -1: query lengths are
                                          ///< the host's
  cl_int starts_at = 0;                   ///< [num_lens + 1]: the query starts that it took
  cl_int num_slots = 0;                   ///< padding included
  std::shared_ptr<KernelPool> list_rows;  ///< of steps whose listed rows follow from the device
  cl_int sources_at = 0;                  ///< ClaRowSource, one for each listed row
  cl_int requests_at = 0;                 ///< ClaListedRequest [num_lens]
  cl_int tree_bits_at = 0;                ///< [num_slots, tree_words], of trees as they were given
  cl_int tree_words = 0;
  cl_mem workspace = nullptr;
  WorkspaceLayout workspace_layout;
  BlockBound block_ids;
  cl_int causal = 1;
  KeyWindow window;                        ///< keys outside it are in no item
  ListRules lists;                         ///< what of the batch's lists is in the items
  bool has_slots = false;                  ///< whether the step has slots, computed or given
  bool slots_of_queries = false;           ///< one slot per query token
  const PlannerConfig* planner = nullptr;  ///< of the builder
  PlanCounts planned;                      ///< without that padding
  cl_command_queue side_queue = nullptr;   ///< of the builder, if launches run at the same time
  PlanOutput plan;                         ///< on the host, until the builder's next build()
  bool recordable = false;                 ///< launches stay what they are with the next batch
  std::shared_ptr<PreparedStep> prepared;  ///< what replays ask, if recordable; num_used: stages,
                                           ///< then the merge
  std::int32_t graph_pad_size = 0;         ///< the batch's
  std::int32_t most_keys = 0;    ///< of a request, in this batch or, if recordable, in any
  std::int64_t most_tokens = 0;  ///< of the batch, or, if recordable, of any with its pad size
  BatchRecord batch;
};

/// The batch of a step, but for its pages and slots.
CommonAttentionMetadata recorded_batch(const PagedStepView& step);

/// Upper bound of a step's partial rows, so that long prompts cannot take the memory that the cache
/// needs.
std::int64_t most_partial_rows(const KernelShape& shape, const DeviceCapabilities& capabilities);

}  // namespace clattn::detail

namespace clattn {
inline auto AttentionMetadata::step() const noexcept {
  return static_cast<const detail::PagedStepView*>(step_);
}
}  // namespace clattn
