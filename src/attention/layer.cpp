#include <clattn/layer.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <clattn/kv_scales.hpp>

#include <algorithm>
#include <array>
#include <cmath>

#include "attention/layer_kernels.hpp"
#include "backends/registry.hpp"
#include "base/checked.hpp"
#include "kernels/launch/step_launch.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

struct Attention::Kernels {
  Kernels(detail::Runtime& runtime, const AttentionConfig& config) : zeroer(runtime, config) {}
  detail::RowZeroer zeroer;
  std::optional<detail::KVScaleCalculator> scales;  ///< none = not wanted
};

namespace {

using detail::throw_invalid, detail::throw_invalid_if;

/// The configuration with the defaults of a layer filled in.
AttentionConfig resolve(const AttentionOptions& options) {
  AttentionConfig config = options.config;
  if (config.num_kv_heads == 0) config.num_kv_heads = config.use_mla ? 1 : config.num_heads;
  if (!options.kv_sharing_target_layer_name.empty()) config.fp8_products = false;
  return config;
}

void check_options(const AttentionOptions& options, const AttentionConfig& config,
                   const LayerRegistry& registry) {
  detail::check_at_least("num_kv_heads", config.num_kv_heads, 1);
  throw_invalid_if(config.num_heads % config.num_kv_heads != 0,
                   "num_heads ({}) is not divisible by num_kv_heads ({})", config.num_heads,
                   config.num_kv_heads);
  throw_invalid_if(options.fp8_checkpoint && config.kv_cache_dtype == DType::kFp8E5M2,
                   "fp8_e5m2 kv-cache is not supported with fp8 checkpoints.");
  throw_invalid_if(registry.find(options.prefix) != nullptr, "Duplicate layer name: {}",
                   options.prefix);
}

/// Whether its cache has scales that somebody gives, instead of one found for each row.
bool takes_scales(const AttentionConfig& config) {
  return is_quantized(config.cache_dtype()) && !config.cache_format().scales_per_row();
}

bool same_cache(const AttentionConfig& a, const AttentionConfig& b) {
  return a.num_kv_heads == b.num_kv_heads && a.head_size == b.head_size &&
         a.output_head_size() == b.output_head_size() && a.block_size == b.block_size &&
         a.cache_format() == b.cache_format() && a.use_mla == b.use_mla &&
         (!a.use_mla || a.rope_dim == b.rope_dim);
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

/// The one value of a checkpoint's scale times `factor`, -1 when it holds none.
float single(std::span<const float> values, std::string_view name, float factor) {
  throw_invalid_if(values.size() > 1,
                   "Only support per-tensor scaling factor for fp8 KV cache: {} has {} values",
                   name, values.size());
  if (values.empty()) return -1;
  const float value = values.front() * factor;
  throw_invalid_if(!std::isfinite(value) || value == 0,
                   "{} is {}, legal: finite numbers > 0, or < 0 for not loaded", name, value);
  return value;
}

}  // namespace

KVScales load_kv_scales(const LoadedKVScales& loaded, std::optional<CacheFormat> kv_cache_dtype) {
  const float factor = loaded.fnuz ? 2 : 1;
  const float k = single(loaded.k_scale, "k_scale", factor);
  const float v = single(loaded.v_scale, "v_scale", factor);
  const float q = single(loaded.q_scale, "q_scale", factor);
  const float prob = single(loaded.prob_scale, "prob_scale", factor);
  KVScales scales;
  if (q > 0) scales.q_scale = q;
  if (prob > 0) scales.prob_scale = prob;
  if (!kv_cache_dtype || !is_quantized(kv_cache_dtype->k.code)) return scales;
  if (kv_cache_dtype->scales_per_row()) {
    if (k > 0 || v > 0)
      scales.warnings.push_back(
          fmt::format("k_scale and v_scale are not used: {} finds a scale for each token and head.",
                      to_string(*kv_cache_dtype)));
    return scales;
  }
  if (k > 0 && v > 0) {
    scales.k_scale = k;
    scales.v_scale = v;
  } else if (k > 0 || v > 0) {
    scales.k_scale = scales.v_scale = std::max(k, v);
  }
  if (scales.k_scale == 1 && scales.v_scale == 1 && kv_cache_dtype == DType::kFp8E4M3) {
    scales.warnings.emplace_back(
        "Using KV cache scaling factor 1.0 for fp8_e4m3. This may cause accuracy issues. Please "
        "make sure k/v_scale is available in the fp8 checkpoint.");
  }
  return scales;
}

Attention* LayerRegistry::find(std::string_view name) const noexcept {
  const auto found = std::ranges::find(layers_, name, &Attention::layer_name);
  return found == layers_.end() ? nullptr : *found;
}

std::int32_t extract_layer_index(std::string_view layer_name) {
  std::int32_t index = 0, num_integers = 0;
  for (std::size_t begin = 0; begin <= layer_name.size();) {
    const std::size_t end = std::min(layer_name.find('.', begin), layer_name.size());
    const std::string_view part = layer_name.substr(begin, end - begin);
    std::int32_t value = 0;
    if (detail::parse_number(part, value)) {
      index = value;
      ++num_integers;
    }
    begin = end + 1;
  }
  throw_invalid_if(num_integers != 1, "layer name {} should only contain one integer", layer_name);
  return index;
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
  kernels_ = std::make_unique<Kernels>(context_->runtime(), config_);
  if (takes_scales(config_) && !shares_kv_cache()) {
    set_scales({});
    if (options_.calculate_kv_scales) kernels_->scales.emplace(context_->runtime(), config_);
  }
  registry.layers_.push_back(this);
}

Attention::~Attention() {
  std::erase(registry_->layers_, this);
}

/// vLLM's validate_kv_sharing_target, and that the caches are alike.
void Attention::take_cache_of_target() {
  const std::string& target_name = options_.kv_sharing_target_layer_name;
  const auto refuse_if = [&](bool wrong, std::string_view why) {
    throw_invalid_if(wrong,
                     "Specified KV sharing target layer for {} is not valid: target layer {} {}",
                     options_.prefix, target_name, why);
  };
  refuse_if(target_name == options_.prefix, "cannot be the same as the current layer.");
  const Attention* target = registry_->find(target_name);
  if (target == nullptr) {
    const bool later = extract_layer_index(options_.prefix) <= extract_layer_index(target_name);
    refuse_if(true, later ? "must come before the current layer."
                          : "is not a valid Attention layer in the model.");
  }
  refuse_if(target->config_.attn_type != config_.attn_type,
            fmt::format("must be the same type as the current layer ({}).",
                        to_string(config_.attn_type)));
  refuse_if(!same_cache(target->config_, config_),
            "must have KV heads, head_size, block_size, kv_cache_dtype, use_mla and rope_dim of "
            "the current layer.");
  cache_ = target->cache_;
}

void Attention::check_kv_cache(const KVCache& /*cache*/) const {
  throw_invalid_if(shares_kv_cache(), "layer {}: it uses the cache of {}, bind that layer's",
                   options_.prefix, options_.kv_sharing_target_layer_name);
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

void Attention::set_scales(const KVScales& scales) {
  const std::array<float, 3> k_v_q = {scales.k_scale, scales.v_scale, scales.q_scale};
  auto made = context_->runtime().allocate_copy(std::as_bytes(std::span(k_v_q)));
  if (uses_own_scales()) cache_->scales = made;  // may throw: the layer's own change only after it
  scales_ = std::move(made);
}

std::vector<std::string> Attention::load_kv_scales(const LoadedKVScales& loaded) {
  KVScales scales = clattn::load_kv_scales(loaded, config_.kv_cache_dtype);
  const bool sets_scales = takes_scales(config_) && !shares_kv_cache();
  if (sets_scales) {
    const auto given = [](std::span<const float> scale) { return !scale.empty() && scale[0] > 0; };
    const bool calculated = kernels_->scales && !kernels_->scales->has_begun();
    if (calculated) {
      scales.k_scale = scales.v_scale = 1;
      scales.warnings.clear();
    }
    set_scales(scales);  // may throw: nothing of the layer may change before it
    scales_loaded_ = !calculated && (given(loaded.k_scale) || given(loaded.v_scale));
  }
  prob_scale_ = scales.prob_scale;
  // They are about K and V that are stored by them; of scales of rows nobody needs any.
  const bool rows = config_.cache_format().scales_per_row();
  if (!rows && (!sets_scales || !uses_own_scales())) scales.warnings.clear();
  return std::move(scales.warnings);
}

void Attention::calc_kv_scales(cl_command_queue queue, TensorRef query, TensorRef key,
                               TensorRef value, std::int64_t num_tokens,
                               std::optional<std::int64_t> num_keys) {
  const std::int64_t keys = num_keys.value_or(num_tokens);
  if (keys == 0 || !kernels_->scales || !uses_own_scales()) return;
  kernels_->scales->calculate_once({queue, config_, key, value, query, keys, num_tokens}, scales_);
}

std::vector<Candidate> Attention::explain() const {
  std::vector<Candidate> all;
  std::string_view fitting = "not asked for, or not built";  // of those in front of the chosen one
  for (const auto& backend : list_attn_backends()) {
    Candidate& candidate = all.emplace_back();
    candidate.role = "backend";
    candidate.name = backend->name();
    candidate.chosen = backend == backend_;
    if (candidate.chosen) {
      fitting = "the chosen one is preferred";
      continue;
    }
    const auto reasons = backend->validate_configuration(config_, &context_->capabilities());
    candidate.reason =
        reasons.empty() ? std::string(fitting) : fmt::format("{}", fmt::join(reasons, ", "));
  }
  for (Candidate& candidate : impl_->candidates()) all.push_back(std::move(candidate));
  return all;
}

void Attention::warm_up(cl_command_queue queue) {
  impl_->warm_up(queue);
  kernels_->zeroer.warm_up(queue);
  if (kernels_->scales) kernels_->scales->warm_up(queue, config_);
}

/// Attends to the call's own keys, for a step without a cache. False if this layer's backend has
/// no kernels for that.
bool Attention::attend_own_keys(cl_command_queue queue, const AttentionTensors& tensors,
                                const AttentionMetadata& metadata,
                                const ForwardOptions& options) const {
  AttentionConfig config = config_;
  config.kv_cache_dtype = std::nullopt;
  const bool cross = config.attn_type == AttentionType::kEncoderDecoder;
  if (cross)
    config.block_size = 0;
  else
    config.attn_type = AttentionType::kEncoderOnly;
  // Without kernels it is what a refused batch left.
  if (metadata.step() == nullptr || metadata.step()->kernels == nullptr || config.use_mla ||
      !backend_->validate_configuration(config, &context_->capabilities()).empty()) {
    return false;
  }
  const detail::BatchRecord& step = metadata.step()->batch;
  throw_invalid_if(step.device_lists.buffer != nullptr,
                   "layer {}: no kv_cache is bound, legal with device_directions or device_trees: "
                   "a bound one",
                   options_.prefix);
  CommonAttentionMetadata batch = detail::recorded_batch(*metadata.step());
  if (cross) batch.causal.reset();
  std::vector<std::int32_t> key_start_loc = {0};
  for (std::size_t r = 0; r < step.seq_lens.size(); ++r) {
    const std::int32_t query_len = detail::query_len_of(batch, r);
    throw_invalid_if(!cross && step.seq_lens[r] != query_len,
                     "layer {}: no kv_cache is bound, but request {} has {} computed tokens, which "
                     "only a cache could hold; legal: 0",
                     options_.prefix, r, step.seq_lens[r] - query_len);
    key_start_loc.push_back(
        detail::checked_add(key_start_loc.back(), step.seq_lens[r], "key_start_loc"));
  }
  batch.key_start_loc = key_start_loc;
  BuilderOptions limits;
  limits.limits = {.max_num_reqs = std::max(batch.num_reqs, 1),
                   .max_num_batched_tokens = std::max(batch.num_actual_tokens, 1),
                   .max_model_len = std::max(metadata.max_seq_len(), 1)};
  const auto builder = backend_->make_builder(context_, config, limits);
  const AttentionMetadata& own = builder->build(queue, batch);
  const auto impl = backend_->make_impl(context_, config);
  impl->check_forward(queue, tensors, {}, own, options);
  zero_padding(kernels_->zeroer, queue, tensors.output, options, own);
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
  const bool calculates =
      options.enable_kv_scales_calculation && kernels_->scales && uses_own_scales() && keys > 0;
  const bool begun = kernels_->scales && kernels_->scales->has_begun();
  if (calculates && !begun) {
    detail::checked_strides(
        {queue, config_, tensors.key, tensors.value, tensors.query, keys, tokens});
  }
  // By the scales of 1 that a layer starts with, an int8 cache could hold whole numbers only.
  const bool has_scales =
      config_.cache_format() != DType::kInt8 || !uses_own_scales() || scales_loaded_ || begun;
  throw_invalid_if(tokens > 0 && !calculates && !has_scales,
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
    throw_invalid_if(options.num_rows < 1,
                     "num_rows is {}, legal without attn_metadata (a profiling run): the rows of "
                     "the output, which are zeroed",
                     options.num_rows);
    if (options.event != nullptr) options.event->reset();
    if (options.launches != nullptr) options.launches->clear();
    return kernels_->zeroer.enqueue(queue, tensors.output, options.output_fp8,
                                    {0, options.num_rows});
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
  zero_padding(kernels_->zeroer, queue, tensors.output, options, *metadata);
  if (calculates) {
    calc_kv_scales(queue, used.query, used.key, used.value, metadata->num_actual_tokens(),
                   num_keys(*metadata));
  }
  impl_->forward_checked(queue, used, *cache_, *metadata, options);
}

}  // namespace clattn
