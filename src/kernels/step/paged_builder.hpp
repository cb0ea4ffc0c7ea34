#pragma once

#include <clattn/attention.hpp>
#include <clattn/cascade.hpp>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/environment.hpp"
#include "base/one_thread.hpp"
#include "kernels/step/paged_step.hpp"
#include "metadata/validate.hpp"
#include "opencl/staging.hpp"

namespace clattn::detail {

/// How page ids are laid out for the kernels and for readers of the metadata.
enum class PageTable : std::uint8_t {
  kCsr,    ///< concatenated lists (FlashInfer)
  kDense,  ///< one row a request, as wide as the longest list, padded with page 0 (xFormers)
};

/// Decides how a batch's keys are split where the caller does not: fits `planner` to the batch, or
/// throws for a batch that the layer cannot take.
using SplitRule = void (*)(const KernelShape& shape, const CommonAttentionMetadata& batch,
                           const BatchSummary& summary, PlannerConfig& planner);

/// What a layer and its backend ask of their steps.
struct StepRules {
  AttentionType attn_type = AttentionType::kDecoder;
  KeyWindow window = {};
  ListRules lists = {};
  SplitRule split = nullptr;      ///< null = the builder's policy
  std::string_view backend = {};  ///< registry name
  PageTable page_table = PageTable::kCsr;
  bool cascades = false;      ///< the builder may recommend cascade attention
  bool only_decodes = false;  ///< one kernel takes all requests, which all count as decodes
};

/// What the batch of a step says of its requests beyond lengths.
struct KeptLists {
  std::vector<Direction> direction;
  std::vector<std::int32_t> span_start_loc, spans, first_keys, keep_keys, tree_start_loc,
      tree_parents;
};

/// A builder on the library's own kernels, but for the class of its metadata. Turns a batch into
/// one upload: slots, work items, merges and page ids.
class PagedBuilder : public AttentionMetadataBuilder {
 public:
  const AttentionMetadata& build(cl_command_queue queue, const CommonAttentionMetadata& batch,
                                 Event* upload, const BuildOptions& options) final {
    return build_metadata(queue, batch, upload, options, nullptr);
  }
  bool supports_update_block_table() const noexcept final {
    return key_source() != KeySource::kContiguous && view_.cut_tiles == nullptr;
  }
  const AttentionMetadata& update_block_table(cl_command_queue queue,
                                              const AttentionMetadata& metadata,
                                              const GroupPages& pages, Event* upload) final;
  std::size_t workspace_bytes(const CommonAttentionMetadata& batch) const final;
  bool can_run_in_graph(const CommonAttentionMetadata& batch) const final;
  bool reorder_batch(std::span<const std::int32_t> num_scheduled_tokens,
                     std::span<std::int32_t> order) const final {
    return reorder_batch_to_split_decodes_and_prefills(num_scheduled_tokens, decode_threshold(),
                                                       order);
  }
  std::int32_t decode_threshold() const noexcept final {
    return rules_.only_decodes ? std::numeric_limits<std::int32_t>::max()
                               : options_.decode_threshold;
  }
  void set_workspace_buffer(std::shared_ptr<AttentionWorkspace> workspace) final;
  void warm_up(cl_command_queue queue) final;
  bool use_cascade_attention(const CascadeQuery& query) const final {
    return rules_.cascades && !options_.disable_cascade_attn && !options_.device_seq_lens &&
           clattn::use_cascade_attention(query);
  }

  const PagedStepView& view() const noexcept { return view_; }
  const BatchLimits& limits() const noexcept { return options_.limits; }
  std::span<const std::int32_t> last_page_len() const noexcept { return last_page_len_; }
  std::int64_t table_width() const noexcept { return table_width_; }

 protected:
  PagedBuilder(std::shared_ptr<Context> context, std::shared_ptr<const AttentionKernels> kernels,
               const StepRules& rules, BuilderOptions options);

  /// `taken`: a step of the same lengths whose plan is this one's, null = plan.
  virtual const AttentionMetadata& build_metadata(cl_command_queue queue,
                                                  const CommonAttentionMetadata& batch,
                                                  Event* upload, const BuildOptions& options,
                                                  const PagedStepView* taken) = 0;
  /// Leaves no metadata to run by, as a batch that is refused does.
  void invalidate() noexcept { view_.kernels = nullptr; }
  /// Makes view() the step of this batch.
  void build_step(cl_command_queue queue, const CommonAttentionMetadata& batch, Event* upload,
                  const BuildOptions& options, const PagedStepView* taken);
  KeySource key_source() const noexcept {
    return key_source_of(rules_.attn_type, kernels_->shape.block_size == 0);
  }
  const BatchSummary& summary() const noexcept { return summary_; }
  std::span<const std::int64_t> slots() const noexcept { return slots_; }

 private:
  struct Layout;
  /// What a recorded step of a size may hold.
  struct GraphSize {
    std::int32_t num_reqs, num_tokens, max_query_len;
  };
  GraphSize graph_size(std::int32_t size) const;
  void limit_to_graphs();
  void take_lengths_from_device();
  void take_lists_from_device();
  /// Whether the device lists the rows of its steps.
  bool lists_on_device() const noexcept { return view_.list_rows != nullptr; }
  std::int64_t tree_words(std::int32_t nodes) const {
    return rules_.lists.trees ? ceil_div(nodes, 32) : 0;
  }
  PlanCounts largest_plan(std::int32_t graph_batch_size) const;
  std::size_t largest_step_bytes() const;
  void reserve_workspace(std::int64_t rows);

  CommonAttentionMetadata resolve_causal(CommonAttentionMetadata batch) const;
  BatchSummary check_lengths(const CommonAttentionMetadata& batch) const;
  BatchSummary check_batch(const CommonAttentionMetadata& batch, const BuildOptions& options) const;
  void check_graph(const CommonAttentionMetadata& batch, std::int32_t max_query_len) const;
  bool records_causal() const noexcept { return rules_.attn_type == AttentionType::kDecoder; }
  bool fits_recorded(const CommonAttentionMetadata& batch, std::int32_t max_query_len) const;
  /// The batch size whose recorded launches run this batch.
  std::int32_t pad_size_of(const CommonAttentionMetadata& batch) const noexcept {
    return batch.graph_pad_size > 0 ? batch.graph_pad_size : options_.graph_batch_size;
  }

  PlannerConfig planner_for(const CommonAttentionMetadata& batch, const BatchSummary& summary,
                            bool fast) const;
  cl_command_queue side_queue_of(const PlanCounts& planned);
  void keep_lengths(const CommonAttentionMetadata& batch);
  Layout layout_of_step(const CommonAttentionMetadata& batch) const;
  void copy_pages(const CommonAttentionMetadata& batch, std::span<std::int32_t> pages) const;
  void copy_slots(const CommonAttentionMetadata& batch, std::span<std::int64_t> slots) const;
  void bind_view(cl_command_queue queue, const CommonAttentionMetadata& batch,
                 const Layout& layout);
  void put_lengths(const CommonAttentionMetadata& batch, const Layout& layout,
                   std::span<std::byte> bytes) const;
  void put_lists(const CommonAttentionMetadata& batch, const Layout& layout,
                 std::span<std::byte> bytes) const;
  void publish(std::int32_t pad_size);

  std::shared_ptr<Context> context_;
  std::shared_ptr<const AttentionKernels> kernels_;
  BuilderOptions options_;
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
  KeptLists lists_;
  PlanRecord record_;
  std::span<const std::int64_t> slots_;
};

/// The builder of every backend on the library's own kernels: `Metadata` is the backend's public
/// metadata class, and fill(metadata, builder, config) copies into it what the backend's readers
/// expect.
template <typename Metadata>
class PagedMetadataBuilder final : public PagedBuilder {
 public:
  using Fill = void (*)(Metadata&, const PagedBuilder&, const AttentionConfig&);

  /// `rules`: the backend's. The configuration's own are added.
  PagedMetadataBuilder(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                       const BuilderOptions& options, StepRules rules, Fill fill)
      : PagedBuilder(
            context,
            attention_kernels(context->runtime(), kernel_shape(config), config.kernel_family),
            with_config(rules, config), options),
        config_(config),
        fill_(fill) {}
  /// For layers on kernels of their own.
  PagedMetadataBuilder(std::shared_ptr<Context> context,
                       std::shared_ptr<const AttentionKernels> kernels, const StepRules& rules,
                       const BuilderOptions& options)
      : PagedBuilder(std::move(context), std::move(kernels), rules, options) {}

 private:
  static StepRules with_config(StepRules rules, const AttentionConfig& config) {
    rules.attn_type = config.attn_type;
    rules.window = window_of(config);
    rules.lists = lists_of(config);
    rules.cascades = rules.cascades && validate_cascade_configuration(config).empty();
    return rules;
  }

  const AttentionMetadata& build_metadata(cl_command_queue queue,
                                          const CommonAttentionMetadata& given, Event* upload,
                                          const BuildOptions& options,
                                          const PagedStepView* taken) override {
    const OneThread call(busy_, taken == nullptr ? "build" : "update_block_table");
    invalidate();
    StepMetadata& metadata = next_metadata();
    const StepSplit split = split_step(given, decode_threshold(), key_source());
    const CommonAttentionMetadata batch = without_padding(given);
    build_step(queue, batch, upload, options, taken);
    metadata.refresh(*this, split, batch, options);
    if (fill_ != nullptr) fill_(metadata, *this, config_);
    return metadata;
  }

  /// Fills the fields that all backends share.
  struct StepMetadata final : Metadata {
    /// What tells a call that there is a later step.
    void retire() {
      static const PagedStepView later = [] {
        PagedStepView view;
        view.is_last = false;
        return view;
      }();
      static_cast<Metadata&>(*this) = Metadata();
      this->step_ = &later;
    }
    void refresh(const PagedMetadataBuilder& step, const StepSplit& split,
                 const CommonAttentionMetadata& batch, const BuildOptions& options) {
      this->backend_ = step.view().batch.backend;
      this->common_prefix_len_ = options.common_prefix_len;
      this->split_ = split.counts;
      this->decodes_at_ = split.decodes_at;
      this->prefills_at_ = split.prefills_at;
      this->num_actual_tokens_ = batch.num_actual_tokens;
      this->max_query_len_ = step.summary().max_query_len;
      this->max_seq_len_ = step.summary().max_seq_len;
      this->slot_buffer_ = step.view().meta;
      this->slot_offset_bytes_ = 0;  // slots come first in the upload
      this->slots_ = step.slots();
      this->step_ = &step.view();
    }
  };

  /// All steps' metadata are one object, but under CLATTN_DEBUG, which tells them apart.
  StepMetadata& next_metadata() {
    if (environment().debug) {
      metadata_.back().retire();
      metadata_.emplace_back();
    }
    return metadata_.back();
  }

  AttentionConfig config_;
  Fill fill_ = nullptr;
  std::list<StepMetadata> metadata_ = std::list<StepMetadata>(1);
  std::atomic<bool> busy_ = false;
};

}  // namespace clattn::detail
