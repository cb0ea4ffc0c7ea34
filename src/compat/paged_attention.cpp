#include <clattn/compat/paged_attention.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <clattn/config_fields.hpp>
#include <utility>

#include "base/error.hpp"
#include "capture/capture.hpp"
#include "compat/packed_cache.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/launch/step_launch.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kernels/step/paged_builder.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

constexpr std::string_view kName = "paged_attention";

class PackedPagedAttention final : public PagedAttention {
 public:
  PackedPagedAttention(const Runtime& runtime, const AttentionConfig& config,
                       std::shared_ptr<const AttentionKernels> kernels)
      : config_(config),
        scale_log2e_(softmax_scale(config.scale, config.head_size) * kLog2E),
        slopes_(make_head_params(runtime, config)),
        kernels_(std::move(kernels)) {}

  const AttentionConfig& config() const noexcept override { return config_; }

  void forward(cl_command_queue queue, const AttentionTensors& tensors, const PackedKVCache& pages,
               const AttentionMetadata& metadata, Event* event,
               std::vector<LaunchRecord>* launches) const override {
    const PackedPages cache = detail::pages_of(pages);
    check_layer_cache(cache, kernels_->shape);
    refuse_keys(tensors, "reshape_and_cache()");
    const PagedStepView& step = checked_step(metadata, queue, *kernels_);
    check_block_ids(step.block_ids, cache.num_blocks);
    check_step_call(queue, *kernels_, step, tensors);
    check_apart(tensors, nullptr, kernels_->shape, num_rows(step, queue), {});
    require_context({{"kv_cache: key", cache.key},
                     {"kv_cache: value", cache.value},
                     {"kv_cache: scales", cache.scales.handle()}},
                    kernels_->runtime->context());
    AddResults add;
    if (capturing()) {
      const RunBatch batch(queue, step.batch);
      add = capture_attention(
          {queue, config_, batch.record(), step.causal != 0, tensors, &cache, {}});
    }
    LayerCall layer{.k = cache.key, .v = cache.value};
    layer.args.k_offset = cache.key_offset;
    layer.args.v_offset = cache.value_offset;
    layer.args.scale_log2e = scale_log2e_;
    layer.args.scale_stride = scale_stride_of(cache);
    if (slopes_) layer.add(slopes_.handle());
    if (is_quantized(cache.dtype)) layer.add(cache.scales.handle());
    launch_step(queue, *kernels_, step, tensors, layer, event, launches);
    add_results(add, queue);
  }

  std::vector<KernelInfo> kernels() const override { return describe_kernels(*kernels_); }

 private:
  AttentionConfig config_;
  float scale_log2e_;
  Buffer slopes_;
  std::shared_ptr<const AttentionKernels> kernels_;
};

/// One token a request; then the original's choice between one pass and partitions.
void split_as_the_original(const KernelShape& shape, const CommonAttentionMetadata& batch,
                           const BatchSummary& summary, PlannerConfig& planner) {
  throw_invalid_if(summary.max_query_len > 1,
                   "query_start_loc: a request has {} query tokens, legal: 0 or 1",
                   summary.max_query_len);
  if (planner.num_splits != 0 || planner.split_policy == SplitPolicy::kDeterministic) return;
  if (use_paged_attention_v1(summary.max_seq_len, batch.num_reqs, shape.num_heads)) {
    planner.num_splits = 1;
  } else {
    planner.split_policy = SplitPolicy::kDeterministic;  // cuts at multiples of the partition
  }
}

std::shared_ptr<const AttentionKernels> checked_kernels(Context& context,
                                                        const AttentionConfig& config) {
  require_valid(kName, validate_paged_attention(config, &context.capabilities()));
  KernelShape shape = kernel_shape(config);
  shape.form = CacheForm::kPacked;
  return attention_kernels(context.runtime(), shape, config.kernel_family);
}

}  // namespace

}  // namespace clattn::detail

namespace clattn {

bool use_paged_attention_v1(std::int32_t max_seq_len, std::int32_t num_seqs,
                            std::int32_t num_heads) {
  constexpr std::int32_t kMostKeys = 8192;
  constexpr std::int64_t kRowsThatFillADevice = 512;
  const bool one_partition = max_seq_len <= kPagedAttentionPartitionSize;
  return max_seq_len <= kMostKeys &&
         (one_partition || std::int64_t{num_seqs} * num_heads > kRowsThatFillADevice);
}

std::vector<std::string> validate_paged_attention(const AttentionConfig& config,
                                                  const DeviceCapabilities* capabilities) {
  std::vector<std::string> reasons;
  detail::append_head_size_reason(config.head_size, reasons, detail::kMaxPackedHeadSize);
  detail::append_common_reasons(config, nullptr, reasons);
  detail::refuse_row_scales(config, "packed caches", reasons);
  for (const std::string& option : fields_not_taken(config, field::kPacked))
    reasons.push_back(fmt::format("{} not supported", option));
  const auto x = static_cast<std::int32_t>(16 / element_size_bytes(config.cache_dtype()));
  detail::append_if(reasons, config.head_size % x != 0,
                    "head_size {} not supported with a packed cache of {}: multiples of {} are",
                    config.head_size, to_string(config.cache_dtype()), x);
  if (capabilities == nullptr) return reasons;
  detail::append_missing_kernels({detail::Role::kPackedDecode, detail::Role::kMerge},
                                 config.kernel_family, *capabilities, reasons);
  return reasons;
}

std::shared_ptr<const PagedAttention> make_paged_attention(Context& context,
                                                           const AttentionConfig& config) {
  return std::make_shared<detail::PackedPagedAttention>(context.runtime(), config,
                                                        detail::checked_kernels(context, config));
}

std::unique_ptr<AttentionMetadataBuilder> make_paged_attention_builder(
    std::shared_ptr<Context> context, const AttentionConfig& config,
    const BuilderOptions& options) {
  detail::throw_unsupported_if(
      options.graph_batch_size > 0,
      "graph_batch_size is {}, supported by paged_attention: 0 (the number of partitions follows "
      "the batch)",
      options.graph_batch_size);
  detail::throw_unsupported_if(options.device_seq_lens,
                               "device_seq_lens: true, supported by paged_attention: false (it "
                               "cuts by the longest request)");
  auto kernels = detail::checked_kernels(*context, config);
  BuilderOptions narrowed = options;
  narrowed.limits.max_num_batched_tokens =
      std::min(options.limits.max_num_batched_tokens, options.limits.max_num_reqs);
  // As in cross attention, lengths and queries are independent: a request without keys may ask.
  const detail::StepRules rules{.attn_type = AttentionType::kEncoderDecoder,
                                .split = detail::split_as_the_original,
                                .only_decodes = true};
  return std::make_unique<detail::PagedMetadataBuilder<AttentionMetadata>>(
      std::move(context), std::move(kernels), rules, narrowed);
}

}  // namespace clattn
