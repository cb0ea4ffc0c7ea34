#include <clattn/layer.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "attention/layer_kernels.hpp"
#include "backends/registry.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "capture/capture.hpp"
#include "kernels/launch/step_launch.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::throw_invalid, detail::throw_invalid_if;

/// The configuration with vLLM's defaults filled in.
AttentionConfig resolve(const AttentionOptions& options) {
  const CacheConfig cache = options.cache_config.value_or(CacheConfig{});
  return {.num_heads = options.num_heads,
          .num_kv_heads = options.num_kv_heads.value_or(options.use_mla ? 1 : options.num_heads),
          .head_size = options.head_size,
          .head_size_v = options.head_size_v,
          .block_size = cache.block_size,
          .dtype = options.dtype,
          .kv_cache_dtype = cache.cache_dtype,
          .scale = options.scale,
          .logits_soft_cap = options.logits_soft_cap,
          .sliding_window = options.per_layer_sliding_window.value_or(cache.sliding_window),
          .attention_chunk_size = options.attention_chunk_size,
          .attn_type = options.attn_type,
          .alibi_slopes = options.alibi_slopes,
          .sinks = options.sinks,
          .custom_mask = options.custom_mask,
          .output_fp8 = options.output_fp8,
          .fp8_products = options.fp8_products && options.kv_sharing_target_layer_name.empty(),
          .use_mla = options.use_mla,
          .rope_dim = options.rope_dim,
          .is_attention_free = cache.is_attention_free,
          .kernel_family = options.kernel_family};
}

void check_options(const AttentionOptions& options, const AttentionConfig& config,
                   const LayerRegistry& registry) {
  throw_invalid_if(config.num_kv_heads < 1, "num_kv_heads is {}, legal: >= 1", config.num_kv_heads);
  throw_invalid_if(config.num_heads % config.num_kv_heads != 0,
                   "num_heads ({}) is not divisible by num_kv_heads ({})", config.num_heads,
                   config.num_kv_heads);
  throw_invalid_if(options.quant_config && options.quant_config->fp8_checkpoint &&
                       config.kv_cache_dtype == DType::kFp8E5M2,
                   "fp8_e5m2 kv-cache is not supported with fp8 checkpoints.");
  throw_invalid_if(registry.find(options.prefix) != nullptr, "Duplicate layer name: {}",
                   options.prefix);
}

[[noreturn]] void refuse_target(const AttentionOptions& options, std::string_view why) {
  throw_invalid("Specified KV sharing target layer for {} is not valid: target layer {} {}",
                options.prefix, options.kv_sharing_target_layer_name, why);
}

bool same_cache(const AttentionConfig& a, const AttentionConfig& b) {
  return a.num_kv_heads == b.num_kv_heads && a.head_size == b.head_size &&
         a.block_size == b.block_size && a.cache_dtype() == b.cache_dtype() &&
         a.use_mla == b.use_mla && (!a.use_mla || a.rope_dim == b.rope_dim);
}

/// Zeroes the output's rows of no token. Which they are differs from replay to replay: a recorded
/// step zeroes all of them, before those of tokens are written.
void zero_padding(const detail::RowZeroer& zeroer, cl_command_queue queue, TensorRef output,
                  const ForwardOptions& options, const AttentionMetadata& metadata) {
  const bool recording = detail::Recorder::of(queue) != nullptr;
  const std::int64_t tokens = metadata.num_actual_tokens();
  const std::int64_t most =
      recording ? static_cast<std::int64_t>(metadata.slot_mapping().size()) : tokens;
  throw_invalid_if(options.num_rows != 0 && options.num_rows < most,
                   "num_rows is {}, legal: 0, or at least the {}'s {} tokens", options.num_rows,
                   recording ? "recorded step" : "batch", most);
  // The first to enqueue something: what it refuses leaves no trace.
  zeroer.enqueue(queue, output, options.output_fp8, {recording ? 0 : tokens, options.num_rows});
}

}  // namespace

Attention* LayerRegistry::find(std::string_view name) const noexcept {
  const auto found = std::ranges::find(layers_, name, &Attention::layer_name);
  return found == layers_.end() ? nullptr : *found;
}

std::int32_t extract_layer_index(std::string_view layer_name) {
  std::optional<std::int32_t> index;
  std::string_view rest = layer_name;
  while (true) {
    const std::string_view part = rest.substr(0, rest.find('.'));
    std::int32_t value = 0;
    const char* end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data(), end, value);
    if (!part.empty() && error == std::errc{} && stop == end) {
      if (index) throw_invalid("layer name {} should only contain one integer", layer_name);
      index = value;
    }
    if (part.size() == rest.size()) break;
    rest.remove_prefix(part.size() + 1);
  }
  if (!index) throw_invalid("layer name {} should only contain one integer", layer_name);
  return *index;
}

Attention::Attention(std::shared_ptr<Context> context, LayerRegistry& registry,
                     AttentionOptions options)
    : context_(std::move(context)),
      registry_(&registry),
      options_(std::move(options)),
      config_(resolve(options_)),
      backend_(options_.attn_backend),
      cache_(std::make_shared<KVCache>()) {
  check_options(options_, config_, registry);
  if (shares_kv_cache()) take_cache_of_target();
  if (backend_ != nullptr) {
    impl_ = backend_->make_impl(context_, config_);
  } else {
    auto [backend, impl] = detail::get_fitting_backend(context_, config_);
    backend_ = std::move(backend);
    impl_ = std::move(impl);
  }
  zeroer_ = std::make_unique<detail::RowZeroer>(context_->runtime(), config_);
  if (is_quantized(config_.cache_dtype()) && !shares_kv_cache()) {
    set_scales({});
    if (options_.cache_config && options_.cache_config->calculate_kv_scales) {
      calculator_ = std::make_unique<detail::KVScaleCalculator>(context_->runtime(), config_);
    }
  }
  registry.layers_.push_back(this);
}

Attention::~Attention() {
  std::erase(registry_->layers_, this);
}

/// vLLM's validate_kv_sharing_target, and that the caches are alike.
void Attention::take_cache_of_target() {
  const std::string& target_name = options_.kv_sharing_target_layer_name;
  if (target_name == options_.prefix) {
    refuse_target(options_, "cannot be the same as the current layer.");
  }
  const Attention* target = registry_->find(target_name);
  if (target == nullptr) {
    const bool later = extract_layer_index(options_.prefix) <= extract_layer_index(target_name);
    refuse_target(options_, later ? "must come before the current layer."
                                  : "is not a valid Attention layer in the model.");
  }
  if (target->config_.attn_type != config_.attn_type) {
    refuse_target(options_, fmt::format("must be the same type as the current layer ({}).",
                                        to_string(config_.attn_type)));
  }
  if (!same_cache(target->config_, config_)) {
    refuse_target(options_,
                  "must have KV heads, head_size, block_size, kv_cache_dtype, use_mla and rope_dim "
                  "of the current layer.");
  }
  cache_ = target->cache_;
}

std::string Attention::extra_repr() const {
  return fmt::format("head_size={}, num_heads={}, num_kv_heads={}, scale={}, backend={}",
                     config_.head_size, config_.num_heads, config_.num_kv_heads,
                     detail::softmax_scale(config_.scale, config_.head_size), backend_->name());
}

void Attention::check_kv_cache(const KVCache& cache) const {
  throw_invalid_if(shares_kv_cache(), "layer {}: it uses the cache of {}, bind that layer's",
                   options_.prefix, options_.kv_sharing_target_layer_name);
  if (cache.keys_by_dim()) {
    const auto reasons =
        backend_->validate_layout(KVCacheLayout::kHDN, config_, &context_->capabilities());
    detail::throw_unsupported_if(!reasons.empty(), "layer {}: kv_cache: {}", options_.prefix,
                                 fmt::join(reasons, "; "));
  }
}

void Attention::bind_kv_cache(KVCache cache) {
  check_kv_cache(cache);
  if (!cache.scales) {
    cache.scales = scales_;
    cache.scales_per_head = false;
    cache.scales_query = static_cast<bool>(scales_);  // what set_scales() and calc_kv_scales() hold
  }
  *cache_ = std::move(cache);
}

/// Whether the cache is stored by this layer's scales: not if it was bound with the engine's.
bool Attention::uses_own_scales() const noexcept {
  return cache_->scales.handle() == scales_.handle();
}

/// Whether the cache is int8 and still has the scales of 1 that a layer starts with, by which it
/// could hold whole numbers only.
bool Attention::lacks_scales() const noexcept {
  return config_.cache_dtype() == DType::kInt8 && uses_own_scales() && !scales_loaded_ &&
         (calculator_ == nullptr || !calculator_->has_begun());
}

void Attention::set_scales(const KVScales& scales) {
  const std::array<float, 3> k_v_q = {scales.k_scale, scales.v_scale, scales.q_scale};
  auto made = context_->runtime().allocate_copy(std::as_bytes(std::span(k_v_q)));
  if (uses_own_scales()) cache_->scales = made;  // may throw: the layer's own change only after it
  scales_ = std::move(made);
}

std::vector<std::string> Attention::load_kv_scales(const LoadedKVScales& loaded) {
  KVScales scales = clattn::load_kv_scales(loaded, config_.kv_cache_dtype);
  const bool sets_scales = is_quantized(config_.cache_dtype()) && !shares_kv_cache();
  if (sets_scales) {
    const auto given = [](std::span<const float> scale) { return !scale.empty() && scale[0] > 0; };
    const bool calculated = calculator_ != nullptr && !calculator_->has_begun();
    if (calculated) {
      scales.k_scale = scales.v_scale = 1;
      scales.warnings.clear();
    }
    set_scales(scales);  // may throw: nothing of the layer may change before it
    scales_loaded_ = !calculated && (given(loaded.k_scale) || given(loaded.v_scale));
  }
  prob_scale_ = scales.prob_scale;
  if (!sets_scales || !uses_own_scales()) scales.warnings.clear();  // they are about K and V
  return std::move(scales.warnings);
}

void Attention::calc_kv_scales(cl_command_queue queue, TensorRef query, TensorRef key,
                               TensorRef value, std::int64_t num_tokens,
                               std::optional<std::int64_t> num_keys) {
  const std::int64_t keys = num_keys.value_or(num_tokens);
  if (keys == 0 || calculator_ == nullptr || !uses_own_scales()) return;
  if (detail::capturing() && !calculator_->has_begun()) {
    calculator_->checked_strides({&key, &value, &query}, {keys, num_tokens});
    detail::capture_calc_kv_scales({.queue = queue,
                                    .config = config_,
                                    .key = key,
                                    .value = value,
                                    .query = query,
                                    .num_keys = keys,
                                    .num_tokens = num_tokens});
  }
  calculator_->calculate_once(queue, key, value, query, {keys, num_tokens}, scales_);
}

void Attention::process_weights_after_loading(DType act_dtype) const {
  throw_invalid_if(act_dtype != config_.dtype, "act_dtype is {}, legal: the layer's dtype, {}",
                   to_string(act_dtype), to_string(config_.dtype));
}

std::vector<Candidate> Attention::explain() const {
  std::vector<Candidate> all;
  std::string_view fitting = "not asked for, or not built";  // of those in front of the chosen one
  for (const AttentionBackend* backend : list_attn_backends()) {
    Candidate candidate{.role = "backend", .name = std::string(backend->name())};
    candidate.chosen = backend == backend_.get();
    const auto reasons = backend->validate_configuration(config_, &context_->capabilities());
    if (candidate.chosen) {
      fitting = "the chosen one is preferred";
    } else {
      candidate.reason =
          reasons.empty() ? std::string(fitting) : fmt::format("{}", fmt::join(reasons, ", "));
    }
    all.push_back(std::move(candidate));
  }
  for (Candidate& candidate : impl_->candidates()) all.push_back(std::move(candidate));
  return all;
}

void Attention::warm_up(cl_command_queue queue) {
  impl_->warm_up(queue);
  zeroer_->warm_up(queue);
  if (calculator_ != nullptr) calculator_->warm_up(queue);
}

/// Attends to the call's own keys, for a step without a cache. False if this layer's backend has
/// no kernels for that.
bool Attention::attend_own_keys(cl_command_queue queue, const AttentionTensors& tensors,
                                const AttentionMetadata& metadata,
                                const ForwardOptions& options) const {
  AttentionConfig config = config_;
  config.kv_cache_dtype = std::nullopt;
  const bool cross = config.attn_type == AttentionType::kEncoderDecoder;
  if (cross) {
    config.block_size = 0;
  } else {
    config.attn_type = AttentionType::kEncoderOnly;
  }
  // Without kernels it is what a refused batch left.
  if (metadata.step() == nullptr || metadata.step()->kernels == nullptr || config.use_mla ||
      !backend_->validate_configuration(config, &context_->capabilities()).empty()) {
    return false;
  }
  const detail::BatchRecord& step = metadata.step()->batch;
  auto batch = CommonAttentionMetadata::of(step.query_start_loc, step.seq_lens, {});
  std::vector<std::int32_t> key_start_loc = {0};
  for (std::size_t r = 0; r < step.seq_lens.size(); ++r) {
    const std::int32_t query_len = detail::query_len_of(batch, r);
    throw_invalid_if(!cross && step.seq_lens[r] != query_len,
                     "layer {}: request {} has {} computed tokens, legal: 0 as long as no kv_cache "
                     "is bound",
                     options_.prefix, r, step.seq_lens[r] - query_len);
    key_start_loc.push_back(
        detail::checked_add(key_start_loc.back(), step.seq_lens[r], "key_start_loc"));
  }
  batch.key_start_loc = key_start_loc;
  // A decoder's window reaches back only; without causal, encoder_only's would reach both ways.
  if (!cross) batch.causal = metadata.step()->causal != 0 || config.sliding_window > 0;
  BuilderOptions limits;
  limits.limits = {.max_num_reqs = std::max(batch.num_reqs, 1),
                   .max_num_batched_tokens = std::max(batch.num_actual_tokens, 1),
                   .max_model_len = std::max(metadata.max_seq_len(), 1)};
  const auto builder = backend_->make_builder(context_, config, limits);
  const AttentionMetadata& own = builder->build(queue, batch);
  const auto impl = backend_->make_impl(context_, config);
  impl->check_forward(queue, tensors, {}, own, options);
  zero_padding(*zeroer_, queue, tensors.output, options, own);
  impl->forward_checked(queue, tensors, {}, own, options);
  return true;
}

/// Rows of a step's keys that are stored.
std::int64_t Attention::num_keys(const AttentionMetadata& metadata) const noexcept {
  const bool cross = config_.attn_type == AttentionType::kEncoderDecoder;
  return cross ? std::ssize(metadata.slot_mapping()) : metadata.num_actual_tokens();
}

/// Whether a call that stores keys calculates their scales first. Throws what the calculation would
/// throw, and if the keys have no scales otherwise.
bool Attention::check_scales(cl_command_queue queue, const AttentionTensors& tensors,
                             const AttentionMetadata& metadata,
                             const ForwardOptions& options) const {
  // A recorded calculation would happen at every replay.
  if (detail::Recorder::of(queue) != nullptr) return false;
  const std::int64_t tokens = metadata.num_actual_tokens();
  const std::int64_t keys = num_keys(metadata);
  const bool calculates = options.enable_kv_scales_calculation && calculator_ != nullptr &&
                          uses_own_scales() && keys > 0;
  if (calculates && !calculator_->has_begun()) {
    calculator_->checked_strides({&tensors.key, &tensors.value, &tensors.query}, {keys, tokens});
  }
  throw_invalid_if(tokens > 0 && !calculates && lacks_scales(),
                   "layer {}: its int8 cache has no scales, legal: load_kv_scales() with k_scale "
                   "or v_scale, calculate_kv_scales, or a cache bound with scales",
                   options_.prefix);
  return calculates;
}

void Attention::forward(cl_command_queue queue, const AttentionTensors& tensors,
                        const AttentionMetadata* metadata, const ForwardOptions& options) {
  const bool stores = tensors.key.buffer != nullptr;
  throw_invalid_if(stores != (tensors.value.buffer != nullptr),
                   "key, value: only one of them is given, legal: both or none");
  const bool cached = !config_.contiguous_kv();
  if (metadata == nullptr) {
    if (options.event != nullptr) options.event->reset();
    if (options.launches != nullptr) options.launches->clear();
    return zeroer_->enqueue(queue, tensors.output, options.output_fp8, {0, options.num_rows});
  }
  if (cached && !cache_->buffer) {
    if (stores && attend_own_keys(queue, tensors, *metadata, options)) return;
    throw_invalid(
        "layer {}: no cache is bound, legal: bind_kv_cache() first, a batch's own key and value, "
        "or null attn_metadata (a profiling run)",
        options_.prefix);
  }
  AttentionTensors used = tensors;
  if (cached && shares_kv_cache()) used.key = used.value = {};
  impl_->check_forward(queue, used, *cache_, *metadata, options);
  const bool calculates =
      cached && used.key.buffer != nullptr && check_scales(queue, used, *metadata, options);
  zero_padding(*zeroer_, queue, tensors.output, options, *metadata);
  if (calculates) {
    calc_kv_scales(queue, used.query, used.key, used.value, metadata->num_actual_tokens(),
                   num_keys(*metadata));
  }
  impl_->forward_checked(queue, used, *cache_, *metadata, options);
}

}  // namespace clattn
