#pragma once

#include <clattn/attention.hpp>
#include <memory>
#include <span>
#include <vector>

#include "capture/capture.hpp"
#include "kernels/choose/attention_kernels.hpp"
#include "kernels/launch/workspace.hpp"
#include "kernels/step/cache_checks.hpp"
#include "metadata/validate.hpp"
#include "opencl/recorder.hpp"
#include "opencl/staging.hpp"

namespace clattn::detail {

/// What forward() binds: where the parts of a step's metadata lie on the device.
struct PagedStepView {
  const AttentionKernels* kernels = nullptr;  ///< the plan fits these kernels' tiles only
  cl_mem meta = nullptr;                      ///< one buffer for everything below; offsets in ints
  PlanCounts counts;                          ///< with the padding of recorded steps
  cl_int pages_at = 0;
  cl_int merge_counts_at = -1;            ///< ClaMergeCounts; -1: not recorded
  std::shared_ptr<KernelPool> cut_tiles;  ///< of steps with device_seq_lens: makes the items
  cl_int splits_at = 0;                   ///< what it makes them of,
  cl_int num_splits = 0;                  ///< one for each item
  cl_int lens_at = 0;                     ///< and the lengths that it took,
  cl_int num_lens = 0;                    ///< padding included
  cl_mem workspace = nullptr;
  WorkspaceLayout workspace_layout;
  BlockBound block_ids;
  cl_int causal = 1;
  KeyWindow window;                        ///< keys outside it are in no item
  bool has_slots = false;                  ///< whether the step has slots, computed or given
  bool slots_of_queries = false;           ///< one slot per query token
  const PlannerConfig* planner = nullptr;  ///< of the builder
  PlanCounts planned;                      ///< without that padding
  cl_command_queue side_queue = nullptr;   ///< of the builder, if launches run beside each other
  PlanOutput plan;                         ///< on the host, until the builder's next build()
  bool recordable = false;                 ///< launches stay what they are with the next batch
  std::shared_ptr<PreparedStep> prepared;  ///< what replays ask, if recordable; num_used: stages,
                                           ///< then the merge
  std::int32_t graph_pad_size = 0;         ///< the batch's
  std::int32_t most_keys = 0;    ///< of a request, in this batch or, if recordable, in any
  std::int64_t most_tokens = 0;  ///< of the batch, or, if recordable, of any with its pad size
  BatchRecord batch;
};

/// How page ids are laid out for the kernels and for readers of the metadata.
enum class PageTable : std::uint8_t {
  kCsr,    ///< concatenated lists (FlashInfer)
  kDense,  ///< one row a request, as wide as the longest list, padded with page 0 (xFormers)
};

/// What a step owes to its backend.
struct StepStyle {
  std::string_view backend;  ///< registry name
  PageTable page_table = PageTable::kCsr;
  bool cascades = false;  ///< its builder may recommend cascade attention
};

/// Decides how a batch's keys are split where the caller does not: fits `planner` to the batch, or
/// throws for a batch that the layer cannot take.
using SplitRule = void (*)(const KernelShape& shape, const CommonAttentionMetadata& batch,
                           const BatchSummary& summary, PlannerConfig& planner);

/// What a layer asks of its steps.
struct StepRules {
  AttentionType attn_type = AttentionType::kDecoder;
  KeyWindow window;
  SplitRule split = nullptr;  ///< null = the builder's policy
};

/// Upper bound of a step's partial rows, so that long prompts cannot take the memory that the cache
/// needs.
std::int64_t most_partial_rows(const KernelShape& shape, const DeviceCapabilities& capabilities);

/// Turns a batch into one upload: slots, work items, merges and page ids. Allocates only while it
/// grows. Not thread-safe.
class PagedStep {
 public:
  PagedStep(std::shared_ptr<Context> context, std::shared_ptr<const AttentionKernels> kernels,
            const StepRules& rules, BuilderOptions options, StepStyle style);

  /// `taken`: a step of the same lengths whose plan is this one's, null = plan.
  void build(cl_command_queue queue, const CommonAttentionMetadata& batch, Event* upload,
             const BuildOptions& options, const PagedStepView* taken = nullptr);
  /// Leaves no metadata to run by, as a batch that build() refuses does.
  void invalidate() noexcept { view_.kernels = nullptr; }
  /// Throws unless `other` is a step that this one can take the plan of.
  void require_same_planning(const PagedStepView* other) const;
  /// Bytes of partial results that build() would use for this batch.
  std::size_t workspace_bytes(const CommonAttentionMetadata& batch) const;

  /// AttentionMetadataBuilder::warm_up().
  void warm_up(cl_command_queue queue) const;
  /// Takes effect at the next build(). Throws kUnsupported if launches are recorded.
  void set_workspace(std::shared_ptr<AttentionWorkspace> workspace);

  /// Whether BuilderOptions::graph_batch_size is set and holds the batch.
  bool fits_graph(const CommonAttentionMetadata& batch) const;

  const PagedStepView& view() const noexcept { return view_; }
  const BatchLimits& limits() const noexcept { return options_.limits; }
  std::span<const std::int64_t> slots() const noexcept { return slots_; }
  std::span<const std::int32_t> last_page_len() const noexcept { return last_page_len_; }
  std::int64_t table_width() const noexcept { return table_width_; }
  std::int32_t max_query_len() const noexcept { return summary_.max_query_len; }
  std::int32_t max_seq_len() const noexcept { return summary_.max_seq_len; }

 private:
  struct Sizes;
  struct Layout;
  CommonAttentionMetadata resolve_causal(CommonAttentionMetadata batch) const;
  BatchSummary check_lengths(const CommonAttentionMetadata& batch) const;
  void check_graph(const CommonAttentionMetadata& batch, std::int32_t max_query_len) const;
  void take_lengths_from_device();
  static void check_device_lengths(const CommonAttentionMetadata& batch,
                                   const BuildOptions& options);
  bool records_causal() const noexcept { return rules_.attn_type == AttentionType::kDecoder; }
  bool fits_recorded(const CommonAttentionMetadata& batch, std::int32_t max_query_len) const;
  KeySource key_source() const noexcept {
    return key_source_of(rules_.attn_type, kernels_->shape.block_size == 0);
  }
  PlannerConfig planner_for(const CommonAttentionMetadata& batch, const BatchSummary& summary,
                            bool fast) const;
  void write_plan(const AttentionPlan* own, const PagedStepView* taken,
                  const PlanOutput& output) const;
  void keep_lengths(const CommonAttentionMetadata& batch);
  void place_keys(const CommonAttentionMetadata& batch);
  void place_pages();
  void copy_pages(const CommonAttentionMetadata& batch, std::span<std::int32_t> pages) const;
  void copy_slots(const CommonAttentionMetadata& batch, std::span<std::int64_t> slots) const;
  void limit_to_graphs();
  PlanCounts largest_plan(std::int32_t num_reqs) const;
  void publish(std::int32_t pad_size);
  static void clear_padding(const PlanCounts& planned, const PlanOutput& output);
  void reserve_workspace(std::int64_t rows);
  cl_command_queue side_queue_of(const PlanCounts& planned);
  std::size_t largest_step_bytes() const;

  std::shared_ptr<Context> context_;
  std::shared_ptr<const AttentionKernels> kernels_;
  BuilderOptions options_;
  StepStyle style_;
  StepRules rules_;
  PlannerConfig planner_;
  StagedUpload staging_;
  Queue side_queue_;
  AttentionWorkspace workspace_;  ///< as this step is bound to it
  PagedStepView view_;

  std::size_t num_reqs_ = 0;
  BatchSummary summary_;
  std::int64_t table_width_ = 0;
  std::vector<std::int32_t> query_start_loc_, seq_lens_, last_page_len_, pages_at_;
  PlanRecord record_;
  std::span<const std::int64_t> slots_;
};

}  // namespace clattn::detail
