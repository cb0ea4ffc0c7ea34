#include <array>
#include <clattn/mla.hpp>
#include <span>
#include <utility>

#include "backends/registry.hpp"
#include "base/checked.hpp"
#include "capture/capture.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/launch/step_launch.hpp"
#include "kernels/step/paged_step.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/copy.hpp"

namespace clattn::detail {

namespace {

/// MLAImpl and concat_and_cache_mla() behind the calls that all layers make.
class LatentImpl final : public AttentionImpl {
 public:
  LatentImpl(Context& context, const AttentionConfig& config)
      : config_(config),
        runtime_(&context.runtime()),
        impl_(make_mla_impl(context, mla_config(config))),
        concat_(concat_mla_kernel(context, config.dtype, config.cache_dtype())) {}

  const AttentionConfig& config() const noexcept override { return config_; }

  void write_kv_cache(cl_command_queue queue, TensorRef key, TensorRef value, const KVCache& cache,
                      const AttentionMetadata& metadata, Event* event) const override {
    check_write(queue, metadata);
    require_context(
        {{"key", key.buffer}, {"value", value.buffer}, {"kv_cache", cache.buffer.handle()}},
        runtime_->context());
    recorder_for(queue, *metadata.step());
    enqueue_concat_mla(concat_, queue, write_of(queue, key, value, checked_rows(cache), metadata),
                       event);
  }

  void check_forward(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
                     const AttentionMetadata& metadata,
                     const ForwardOptions& options) const override {
    check_options(options);
    const MLACache rows = checked_rows(cache);
    impl_->check_forward(queue, without_keys(tensors), rows, metadata);
    if (!brings_keys(tensors)) return;
    check_write(queue, metadata);
    const LatentWrite write = write_of(queue, tensors.key, tensors.value, rows, metadata);
    check_concat_mla(write);
    check_apart(tensors, nullptr, kernel_shape(config_), metadata.num_actual_tokens(),
                {write.slots.num_tokens, rows.kv_lora_rank, rows.rope_dim});
  }

  void forward(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
               const AttentionMetadata& metadata, const ForwardOptions& options) const override {
    check_options(options);
    if (brings_keys(tensors)) check_forward(queue, tensors, cache, metadata, options);
    forward_checked(queue, tensors, cache, metadata, options);
  }

  void forward_checked(cl_command_queue queue, const AttentionTensors& tensors,
                       const KVCache& cache, const AttentionMetadata& metadata,
                       const ForwardOptions& options) const override {
    if (tensors.key.buffer != nullptr)
      write_kv_cache(queue, tensors.key, tensors.value, cache, metadata, nullptr);
    impl_->forward(queue, without_keys(tensors), checked_rows(cache), metadata, options.event,
                   options.launches);
  }

  void forward_encoder(cl_command_queue, const AttentionTensors&, const AttentionMetadata&,
                       const ForwardOptions&) const override {
    throw_unsupported("attn_type {}: keys and values come from the cache, use forward()",
                      to_string(config_.attn_type));
  }

  void warm_up(cl_command_queue queue) const override {
    const CapturePause pause;  // no call of the application's
    impl_->warm_up(queue);
    const MLAConfig shape = mla_config(config_);
    const std::size_t elements = to_size(config_.block_size) * to_size(config_.head_size);
    MLACache page{.buffer = runtime_->allocate(elements * sizeof(float)),
                  .dtype = config_.cache_dtype(),
                  .num_blocks = 1,
                  .block_size = config_.block_size,
                  .kv_lora_rank = shape.kv_lora_rank,
                  .rope_dim = shape.rope_dim,
                  .scale = {}};
    constexpr std::array kUnit = {1.0F};
    if (is_quantized(page.dtype))
      page.scale = runtime_->allocate_copy(std::as_bytes(std::span(kUnit)));
    constexpr std::array kNoSlot = {kPadSlotId};
    const Buffer slots = runtime_->allocate_copy(std::as_bytes(std::span(kNoSlot)));
    const TensorRef row{page.buffer.handle()};
    enqueue_concat_mla(concat_, queue, {row, row, config_.dtype, page, {slots.handle(), 0, 1}},
                       nullptr);
    Queue::adopt(queue).finish();
  }

  std::vector<KernelInfo> kernels() const override { return impl_->kernels(); }
  std::vector<Candidate> candidates() const override { return impl_->candidates(); }

 private:
  static AttentionTensors without_keys(const AttentionTensors& tensors) {
    return {.query = tensors.query, .output = tensors.output, .lse = tensors.lse};
  }

  static void check_options(const ForwardOptions& options) {
    throw_invalid_if(options.custom_mask != nullptr || options.output_fp8 != nullptr ||
                         options.output_scale != nullptr,
                     "custom_mask, output_fp8, output_scale: given, legal: none of them (MLA)");
  }

  /// Slots mean places only under the block size that they were made for.
  void check_write(cl_command_queue queue, const AttentionMetadata& metadata) const {
    check_current(metadata, queue);
    const PagedStepView* step = metadata.step();
    throw_invalid_if(step == nullptr || step->kernels == nullptr ||
                         step->kernels->shape.form != CacheForm::kLatent ||
                         step->kernels->shape.block_size != config_.block_size,
                     "attn_metadata: built for other caches, legal: {} with block_size {}",
                     kMLABackendName, config_.block_size);
    check_recordable(queue, *step);
  }

  LatentWrite write_of(cl_command_queue queue, const TensorRef& kv_c, const TensorRef& k_pe,
                       const MLACache& rows, const AttentionMetadata& metadata) const {
    return {kv_c, k_pe, config_.dtype, rows, written_slots(metadata, queue)};
  }

  MLACache checked_rows(const KVCache& cache) const {
    throw_invalid_if(
        cache.block_size != config_.block_size || cache.head_size != config_.head_size ||
            cache.dtype != config_.cache_dtype(),
        "kv_cache: {} tokens x {} of {}, legal: {} x {} of {} as this layer was configured",
        cache.block_size, cache.head_size, to_string(cache.dtype), config_.block_size,
        config_.head_size, to_string(config_.cache_dtype()));
    return make_mla_cache(cache, config_.rope_dim);
  }

  AttentionConfig config_;
  const Runtime* runtime_;
  std::shared_ptr<const MLAImpl> impl_;
  OpKernel concat_;
};

/// Pages of latent rows, (num_blocks, block_size, kv_lora_rank + rope_dim), which are K and, but
/// for their rotary part, V of every query head.
class MLABackend final : public DescribedBackend {
 public:
  MLABackend()
      : DescribedBackend({.name = kMLABackendName,
                          .layouts = kBothLayouts,
                          .graph_support = AttentionCGSupport::kAlways,
                          .device_query_lens = true}) {}

  bool is_mla() const noexcept override { return true; }

  std::vector<std::string> validate_configuration(
      const AttentionConfig& config, const DeviceCapabilities* capabilities) const override {
    if (!config.use_mla) return {"non-MLA not supported"};
    std::vector<std::string> reasons;
    append_latent_reasons(config, capabilities, reasons);
    return reasons;
  }

  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t num_blocks, std::int32_t block_size,
                                                 std::int32_t num_kv_heads,
                                                 std::int32_t head_size) const override {
    if (num_kv_heads != 1) throw_invalid("num_kv_heads is {}, legal: 1 (MLA)", num_kv_heads);
    return {1, num_blocks, block_size, 1, head_size};
  }

  std::shared_ptr<const AttentionImpl> make_impl(std::shared_ptr<Context> context,
                                                 const AttentionConfig& config) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return std::make_shared<LatentImpl>(*context, config);
  }

  std::unique_ptr<AttentionMetadataBuilder> make_builder(
      std::shared_ptr<Context> context, const AttentionConfig& config,
      const BuilderOptions& options) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return make_mla_builder(std::move(context), mla_config(config), options);
  }
};

}  // namespace

const AttentionBackend& mla_backend() {
  static const MLABackend backend;
  return backend;
}

}  // namespace clattn::detail
