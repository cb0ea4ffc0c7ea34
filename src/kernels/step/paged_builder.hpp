#pragma once

#include <clattn/attention.hpp>
#include <clattn/cascade.hpp>

#include "kernels/paged_impl.hpp"
#include "kernels/step/paged_step.hpp"

namespace clattn::detail {

/// The builder of every backend on the library's own kernels: `Metadata` is the backend's public
/// metadata class, and fill(metadata, step, config) copies into it what the backend's readers
/// expect.
template <typename Metadata>
class PagedMetadataBuilder final : public AttentionMetadataBuilder {
 public:
  using Fill = void (*)(Metadata&, const PagedStep&, const AttentionConfig&);

  PagedMetadataBuilder(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                       const BuilderOptions& options, StepStyle style, Fill fill)
      : config_(config),
        decode_threshold_(options.decode_threshold),
        cascades_(style.cascades && !options.disable_cascade_attn && !options.device_seq_lens &&
                  validate_cascade_configuration(config).empty()),
        step_(context,
              attention_kernels(context->runtime(), kernel_shape(config), config.kernel_family),
              {.attn_type = config.attn_type, .window = window_of(config)}, options, style),
        fill_(fill) {}
  /// For layers on kernels of their own. `decode_threshold`: see AttentionMetadataBuilder.
  PagedMetadataBuilder(std::shared_ptr<Context> context,
                       std::shared_ptr<const AttentionKernels> kernels, const StepRules& rules,
                       const BuilderOptions& options, std::int32_t decode_threshold,
                       std::string_view backend = {})
      : decode_threshold_(decode_threshold),
        step_(std::move(context), std::move(kernels), rules, options, StepStyle{backend}),
        fill_([](Metadata&, const PagedStep&, const AttentionConfig&) {}) {}

  const AttentionMetadata& build(cl_command_queue queue, const CommonAttentionMetadata& batch,
                                 Event* upload, const BuildOptions& options) override {
    return build_step(queue, batch, upload, options, nullptr);
  }
  bool supports_update_block_table() const noexcept override {
    return !config_.contiguous_kv() && step_.view().cut_tiles == nullptr;
  }
  const AttentionMetadata& update_block_table(cl_command_queue queue,
                                              const AttentionMetadata& metadata,
                                              const GroupPages& pages, Event* upload) override {
    const PagedStepView* step = metadata.step();
    step_.require_same_planning(step);
    CommonAttentionMetadata batch =
        CommonAttentionMetadata::of(step->batch.query_start_loc, step->batch.seq_lens, {});
    batch.block_table = pages.block_table;
    batch.block_table_stride = pages.block_table_stride;
    batch.slot_mapping = pages.slot_mapping;
    batch.causal = step->causal != 0;
    batch.graph_pad_size = step->graph_pad_size;
    return build_step(queue, batch, upload, {.common_prefix_len = metadata.common_prefix_len()},
                      step);
  }
  std::size_t workspace_bytes(const CommonAttentionMetadata& batch) const override {
    return step_.workspace_bytes(batch);
  }
  bool can_run_in_graph(const CommonAttentionMetadata& batch) const override {
    return step_.fits_graph(batch);
  }
  bool reorder_batch(std::span<const std::int32_t> num_scheduled_tokens,
                     std::span<std::int32_t> order) const override {
    return reorder_batch_to_split_decodes_and_prefills(num_scheduled_tokens, decode_threshold_,
                                                       order);
  }
  std::int32_t decode_threshold() const noexcept override { return decode_threshold_; }
  void set_workspace_buffer(std::shared_ptr<AttentionWorkspace> workspace) override {
    step_.set_workspace(std::move(workspace));
  }
  void warm_up(cl_command_queue queue) override { step_.warm_up(queue); }
  bool use_cascade_attention(const CascadeQuery& query) const override {
    return cascades_ && clattn::use_cascade_attention(query);
  }

 private:
  const AttentionMetadata& build_step(cl_command_queue queue, const CommonAttentionMetadata& batch,
                                      Event* upload, const BuildOptions& options,
                                      const PagedStepView* taken) {
    step_.invalidate();
    const StepSplit split = split_step(batch, decode_threshold_,
                                       key_source_of(config_.attn_type, config_.contiguous_kv()));
    step_.build(queue, batch, upload, options, taken);
    metadata_.refresh(step_, split, batch, options);
    fill_(metadata_, step_, config_);
    return metadata_;
  }

  /// Fills the fields that all backends share.
  struct StepMetadata final : Metadata {
    void refresh(const PagedStep& step, const StepSplit& split,
                 const CommonAttentionMetadata& batch, const BuildOptions& options) {
      this->backend_ = step.view().batch.backend;
      this->common_prefix_len_ = options.common_prefix_len;
      this->split_ = split.counts;
      this->decodes_at_ = split.decodes_at;
      this->prefills_at_ = split.prefills_at;
      this->num_actual_tokens_ = batch.num_actual_tokens;
      this->max_query_len_ = step.max_query_len();
      this->max_seq_len_ = step.max_seq_len();
      this->slot_buffer_ = step.view().meta;
      this->slot_offset_bytes_ = 0;  // slots stand first in the upload
      this->slots_ = step.slots();
      this->step_ = &step.view();
    }
  };

  AttentionConfig config_;
  std::int32_t decode_threshold_;
  bool cascades_ = false;  ///< backend, layer and options allow it
  PagedStep step_;
  Fill fill_;
  StepMetadata metadata_;
};

}  // namespace clattn::detail
