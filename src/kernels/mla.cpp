#include <clattn/mla.hpp>

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "capture/capture.hpp"
#include "kernels/cache_write.hpp"
#include "kernels/paged_builder.hpp"
#include "kernels/paged_rules.hpp"
#include "kernels/step_launch.hpp"

namespace clattn::detail {

namespace {

constexpr std::int32_t kMaxHeads = 4096;  // as other backends: work-group counts stay below 2^31

KernelShape shape_of(const MLAConfig& config) {
  KernelShape shape;
  shape.num_heads = config.num_heads;
  shape.num_kv_heads = 1;
  shape.head_size = config.kv_lora_rank;
  shape.rope_dim = config.rope_dim;
  shape.block_size = config.block_size;
  shape.dtype = config.dtype;
  shape.cache_dtype = config.cache_dtype();
  shape.form = CacheForm::kLatent;
  return shape;
}

float softmax_scale(const MLAConfig& config) {
  return config.scale.value_or(
      1.0F / std::sqrt(static_cast<float>(config.kv_lora_rank + config.rope_dim)));
}

/// The latent cache's part of a stage's arguments.
class LatentArguments final : public StageArguments {
 public:
  explicit LatentArguments(const MLACache& cache)
      : buffer_(cache.buffer.handle()),
        scale_(cache.scale.handle()),
        quantized_(is_quantized(cache.dtype)) {}
  void bind_cache(KernelLease& lease) const override { lease.arg(buffer_); }
  void bind_options(KernelLease& lease) const override {
    if (quantized_) lease.arg(scale_).arg<cl_int>(scale_ != nullptr ? 0 : -1);
  }

 private:
  cl_mem buffer_;
  cl_mem scale_;
  bool quantized_;
};

class PagedMLAImpl final : public MLAImpl {
 public:
  PagedMLAImpl(const MLAConfig& config, std::shared_ptr<const AttentionKernels> kernels)
      : config_(config), kernels_(std::move(kernels)) {}

  const MLAConfig& config() const noexcept override { return config_; }

  void forward(cl_command_queue queue, TensorRef query, const MLACache& cache,
               const AttentionMetadata& metadata, TensorRef output, cl_mem lse, Event* event,
               std::vector<LaunchRecord>* launches) const override {
    check_cache(cache);
    const std::int64_t heads = config_.num_heads;
    StepCall call{.queue = queue,
                  .kernels = *kernels_,
                  .step = checked_step(metadata, *kernels_, cache.num_blocks),
                  .query = query,
                  .output = output,
                  .lse = lse,
                  .scale = softmax_scale(config_)};
    const std::int64_t width = std::int64_t{config_.kv_lora_rank} + config_.rope_dim;
    call.query_stride = checked_token_stride(query, heads * width, "query");
    call.output_stride = checked_token_stride(output, heads * config_.kv_lora_rank, "output");
    if (capturing()) {
      capture_mla_decode({.queue = queue,
                          .config = config_,
                          .batch = call.step.batch,
                          .causal = call.step.causal != 0,
                          .query = query,
                          .cache = cache,
                          .scale = call.scale});
    }
    launch_step(call, LatentArguments(cache), event, launches);
  }

  std::vector<KernelInfo> kernels() const override { return describe_kernels(*kernels_); }

 private:
  void check_cache(const MLACache& cache) const {
    if (cache.block_size != config_.block_size || cache.kv_lora_rank != config_.kv_lora_rank ||
        cache.rope_dim != config_.rope_dim || cache.dtype != config_.cache_dtype()) {
      throw_invalid(
          "kv_cache: {} tokens x ({} + {}) of {}, legal: {} x ({} + {}) of {} as this layer was "
          "configured",
          cache.block_size, cache.kv_lora_rank, cache.rope_dim, to_string(cache.dtype),
          config_.block_size, config_.kv_lora_rank, config_.rope_dim,
          to_string(config_.cache_dtype()));
    }
    if (!cache.buffer) throw_invalid("kv_cache: no buffer");
    if (cache.num_blocks < 1)
      throw_invalid("kv_cache: num_blocks is {}, legal: >= 1", cache.num_blocks);
    const std::int64_t row = std::int64_t{cache.kv_lora_rank} + cache.rope_dim;
    const std::int64_t elems =
        checked_mul(checked_mul(cache.num_blocks, std::int64_t{cache.block_size}, "kv_cache"), row,
                    "kv_cache: elements");
    const std::size_t room = cache.buffer.size_bytes() / element_size_bytes(cache.dtype);
    if (std::cmp_less(room, elems)) {
      throw_invalid("kv_cache: its buffer holds {} elements, legal: at least {} (num_blocks {})",
                    room, elems, cache.num_blocks);
    }
    if (!cache.scale) return;
    if (!is_quantized(cache.dtype)) {
      throw_invalid("kv_cache: scale given, legal: none for {}", to_string(cache.dtype));
    }
    if (cache.scale.size_bytes() < sizeof(float)) {
      throw_invalid("kv_cache: scale holds {} bytes, legal: at least {} (f32 [1])",
                    cache.scale.size_bytes(), sizeof(float));
    }
  }

  MLAConfig config_;
  std::shared_ptr<const AttentionKernels> kernels_;
};

std::shared_ptr<const AttentionKernels> checked_kernels(Context& context, const MLAConfig& config) {
  require_valid(kMLABackendName, validate_mla_configuration(config, &context.capabilities()));
  return attention_kernels(context.runtime(), shape_of(config), config.kernel_family);
}

}  // namespace

}  // namespace clattn::detail

namespace clattn {

std::vector<std::string> validate_mla_configuration(const MLAConfig& config,
                                                    const DeviceCapabilities* capabilities) {
  struct Field {
    std::string_view name;
    std::int32_t value, low, high, step;
  };
  const Field fields[] = {
      {"num_heads", config.num_heads, 1, detail::kMaxHeads, 1},
      {"kv_lora_rank", config.kv_lora_rank, kKVLoraRankStep, kMaxKVLoraRank, kKVLoraRankStep},
      {"rope_dim", config.rope_dim, 8, 64, 8},
      {"block_size", config.block_size, 1, 1 << 24, 1}};
  std::vector<std::string> reasons;
  for (const Field& field : fields) {
    if (field.value >= field.low && field.value <= field.high && field.value % field.step == 0)
      continue;
    reasons.push_back(fmt::format("{} is {}, supported: {} … {} in steps of {}", field.name,
                                  field.value, field.low, field.high, field.step));
  }
  if (is_quantized(config.dtype)) {
    reasons.push_back(
        fmt::format("dtype {} not supported: f32, f16 and bf16 are", to_string(config.dtype)));
  }
  if (config.scale && !std::isfinite(*config.scale)) {
    reasons.push_back(fmt::format("scale is {}, supported: finite numbers", *config.scale));
  }
  if (capabilities == nullptr) return reasons;
  for (const detail::Role role : {detail::Role::kMLADecode, detail::Role::kMerge}) {
    if (detail::any_variant_runs(role, config.kernel_family, *capabilities)) continue;
    reasons.push_back(fmt::format("no {} kernel of family {} runs on {}", to_string(role),
                                  to_string(config.kernel_family), capabilities->name));
  }
  return reasons;
}

std::shared_ptr<const MLAImpl> make_mla_impl(Context& context, const MLAConfig& config) {
  return std::make_shared<detail::PagedMLAImpl>(config, detail::checked_kernels(context, config));
}

std::unique_ptr<AttentionMetadataBuilder> make_mla_builder(std::shared_ptr<Context> context,
                                                           const MLAConfig& config,
                                                           const BuilderOptions& options) {
  auto kernels = detail::checked_kernels(*context, config);
  return std::make_unique<detail::PagedMetadataBuilder<AttentionMetadata>>(
      std::move(context), std::move(kernels), detail::StepRules{}, options,
      std::numeric_limits<std::int32_t>::max());
}

}  // namespace clattn
