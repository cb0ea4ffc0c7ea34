#pragma once

#include <clattn/attention.hpp>
#include <memory>

#include "kernels/choose/attention_kernels.hpp"
#include "kernels/launch/step_launch.hpp"

namespace clattn::detail {

/// The impl behind every backend whose cache is K and V blocks addressed by strides: binds a step's
/// metadata to the compiled kernels. Immutable; holds no context, so that a context can share it
/// among layers.
class PagedAttentionImpl final : public AttentionImpl {
 public:
  /// `config` was validated by the backend. Equal configurations of a context share one object.
  static std::shared_ptr<const AttentionImpl> make(Context& context, const AttentionConfig& config);

  PagedAttentionImpl(const Runtime& runtime, const AttentionConfig& config,
                     std::shared_ptr<const AttentionKernels> kernels);

  const AttentionConfig& config() const noexcept override { return config_; }
  void write_kv_cache(cl_command_queue queue, TensorRef key, TensorRef value, const KVCache& cache,
                      const AttentionMetadata& metadata, Event* event) const override;
  void forward(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
               const AttentionMetadata& metadata, const ForwardOptions& options) const override;
  void forward_encoder(cl_command_queue queue, const AttentionTensors& tensors,
                       const AttentionMetadata& metadata,
                       const ForwardOptions& options) const override;
  void check_forward(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
                     const AttentionMetadata& metadata,
                     const ForwardOptions& options) const override;
  void forward_checked(cl_command_queue queue, const AttentionTensors& tensors,
                       const KVCache& cache, const AttentionMetadata& metadata,
                       const ForwardOptions& options) const override;
  void warm_up(cl_command_queue queue) const override;
  std::vector<KernelInfo> kernels() const override { return describe_kernels(*kernels_); }
  std::vector<Candidate> candidates() const override { return kernels_->candidates; }
  /// Whether its kernels run what a builder of `planned` cuts, windows aside. Builds that builder's
  /// kernels.
  bool runs_plan_of(Context& context, const AttentionConfig& planned) const;

 private:
  struct Call {
    cl_command_queue queue;
    const AttentionTensors& tensors;
    const KVCache* cache;  ///< null: over the tensors' own keys
    const AttentionMetadata& metadata;
    const ForwardOptions& options;
  };
  void check_attention(const Call& call) const;
  void attend(const Call& call) const;
  struct Write {
    cl_command_queue queue;
    const TensorRef& key;
    const TensorRef& value;
    const KVCache& cache;  ///< checked
    const AttentionMetadata& metadata;
  };
  void check_write(const Write& write) const;
  void store(const Write& write, Event* event) const;
  void check_metadata(const AttentionMetadata& metadata) const;
  void check(const KVCache& cache) const;
  const PagedStepView& step_of(const AttentionMetadata& metadata) const;
  void check_options(const ForwardOptions& options, const PagedStepView& step,
                     std::int64_t tokens) const;
  /// `scales`: of a quantized cache.
  void add_options(LayerCall& layer, cl_mem scales, const ForwardOptions& extra) const;

  AttentionConfig config_;
  float scale_log2e_;
  bool causal_;  ///< false: bidirectional whatever the batch says
  KeyWindow window_;
  Buffer head_params_;
  std::shared_ptr<const AttentionKernels> kernels_;
};

}  // namespace clattn::detail
