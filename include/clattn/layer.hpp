#pragma once

#include <array>
#include <clattn/attention.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace clattn::detail {
class KVScaleCalculator;
class RowZeroer;
}  // namespace clattn::detail

namespace CLATTN_API clattn {

class Attention;

/// A model's attention layers by name, in the order they were made (vLLM: the static forward
/// context). The engine owns it; it must outlive its layers. Making and destroying layers is for
/// one thread at a time.
class LayerRegistry {
 public:
  LayerRegistry() = default;
  LayerRegistry(const LayerRegistry&) = delete;
  LayerRegistry& operator=(const LayerRegistry&) = delete;

  /// In the order in which they were made.
  std::span<Attention* const> layers() const noexcept { return layers_; }
  /// The layer of this name, or null.
  Attention* find(std::string_view name) const noexcept;

 private:
  friend class Attention;
  std::vector<Attention*> layers_;
};

/// The one integer between the dots of a layer's name: 3 of "model.layers.3.self_attn.attn". Throws
/// kInvalidArgument when there is none, or more than one.
std::int32_t extract_layer_index(std::string_view layer_name);

/// What the engine says about the caches of all layers.
struct CacheConfig {
  std::int32_t block_size = 16;                     ///< tokens per page
  std::optional<DType> cache_dtype = std::nullopt;  ///< nullopt = "auto" = the layer's dtype
  std::int32_t sliding_window = 0;   ///< for layers without one of their own; 0 = none
  bool is_attention_free = false;    ///< the model has no attention at all
  bool calculate_kv_scales = false;  ///< take scales from the first batch instead of the checkpoint
};

/// What the engine says about the checkpoint's quantisation.
struct QuantConfig {
  bool fp8_checkpoint = false;  ///< weights (and scales) were stored as fp8
};

/// vLLM's constructor arguments of Attention, with its names and defaults.
struct AttentionOptions {
  std::int32_t num_heads = 0;                               ///< query heads
  std::int32_t head_size = 0;                               ///< use_mla: kv_lora_rank + rope_dim
  std::int32_t head_size_v = 0;                             ///< AttentionConfig::head_size_v
  std::optional<float> scale = std::nullopt;                ///< nullopt = 1 / sqrt(head_size)
  std::optional<std::int32_t> num_kv_heads = std::nullopt;  ///< nullopt = num_heads; use_mla: 1
  std::vector<float> alibi_slopes = {};                     ///< [num_heads] or empty
  std::optional<CacheConfig> cache_config = std::nullopt;   ///< nullopt = CacheConfig{}
  std::optional<QuantConfig> quant_config = std::nullopt;   ///< nullopt = not quantised
  float logits_soft_cap = 0;                                ///< 0 = none
  /// Keys seen, the own one included; 0 = all; nullopt = the cache configuration's window.
  std::optional<std::int32_t> per_layer_sliding_window = std::nullopt;
  bool use_mla = false;     ///< multi-head latent attention: shapes at forward()
  std::string prefix = {};  ///< the layer's name, unique in its registry
  AttentionType attn_type = AttentionType::kDecoder;  ///< what attends to what
  std::string kv_sharing_target_layer_name = {};  ///< attend to that layer's cache; empty = own one
  std::shared_ptr<const AttentionBackend> attn_backend = nullptr;  ///< null = get_attn_backend()
  // vLLM's extra_impl_args.
  std::vector<float> sinks = {};          ///< [num_heads] or empty
  std::int32_t attention_chunk_size = 0;  ///< 0 = none
  bool custom_mask = false;               ///< every forward() brings a mask (ForwardOptions)
  bool output_fp8 = false;                ///< every forward() also writes fp8 (ForwardOptions)
  /// AttentionConfig::fp8_products; queries are divided by the layer's q_scale. Ignored where it
  /// shares another layer's cache, whose scales are not its own.
  bool fp8_products = false;
  std::int32_t rope_dim = 64;  ///< use_mla: the rotary part of head_size (qk_rope_head_dim)
  // What vLLM takes from its default dtype and platform.
  DType dtype = DType::kF16;                         ///< of query, key, value and output
  KernelFamily kernel_family = KernelFamily::kAuto;  ///< kAuto: the device decides
};

/// Scales as a checkpoint holds them: nothing, or one value; values below 0 mean "not loaded".
struct LoadedKVScales {
  std::span<const float> k_scale = {};     ///< of K
  std::span<const float> v_scale = {};     ///< of V
  std::span<const float> q_scale = {};     ///< of Q
  std::span<const float> prob_scale = {};  ///< of the probabilities
  /// The cache's bytes are e4m3fnuz, where every one means half of what it means in e4m3: doubles
  /// what was loaded. For caches of other libraries; this one's kernels read and write e4m3.
  bool fnuz = false;
};

/// Per-tensor scales on the host: real = stored * scale.
struct KVScales {
  float k_scale = 1;                       ///< of K
  float v_scale = 1;                       ///< of V
  float q_scale = 1;                       ///< of Q
  float prob_scale = 1;                    ///< of the probabilities
  std::vector<std::string> warnings = {};  ///< for the engine's log
  bool operator==(const KVScales&) const = default;
};

/// vLLM's BaseKVCacheMethod: which scales a cache of `kv_cache_dtype` gets from what a checkpoint
/// holds. In caches that are not quantised ("auto" included) K and V get 1. Otherwise both are used
/// as loaded; if only one was, it serves for both; if none was, both are 1. q and prob are as
/// loaded, else 1. FNUZ doubles what was loaded. Throws kInvalidArgument for more than one value,
/// and for values that are 0 or not finite.
KVScales load_kv_scales(const LoadedKVScales& loaded, std::optional<DType> kv_cache_dtype);

/// One attention layer of a model (vLLM: Attention): its backend's impl, its cache and scales.
/// forward() may be called by several threads on different outputs; everything else by one at a
/// time.
class Attention {
 public:
  /// Registers the layer. Throws kInvalidArgument (a duplicate prefix, an illegal sharing target, a
  /// head count that does not divide, fp8_e5m2 with an fp8 checkpoint), kUnsupported with the
  /// backend's reasons.
  Attention(std::shared_ptr<Context> context, LayerRegistry& registry, AttentionOptions options);
  ~Attention();
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  /// AttentionOptions::prefix.
  const std::string& layer_name() const noexcept { return options_.prefix; }
  /// What it was made from.
  const AttentionOptions& options() const noexcept { return options_; }
  /// What the impl was made from: every default resolved.
  const AttentionConfig& config() const noexcept { return config_; }
  /// Whether sinks join its denominators.
  bool has_sink() const noexcept { return !options_.sinks.empty(); }
  /// Whether it attends to another layer's cache.
  bool shares_kv_cache() const noexcept { return !options_.kv_sharing_target_layer_name.empty(); }
  /// The backend that was chosen or given.
  const std::shared_ptr<const AttentionBackend>& get_attn_backend() const noexcept {
    return backend_;
  }
  /// Shared by layers of equal configurations; lives as long as the layer.
  const AttentionImpl& impl() const noexcept { return *impl_; }
  /// "head_size=64, num_heads=8, num_kv_heads=2, scale=0.125, backend=FLASHINFER"
  std::string extra_repr() const;

  /// The layer's cache, the target's if it shares one; null until bound.
  const KVCache* kv_cache() const noexcept { return cache_->buffer ? cache_.get() : nullptr; }
  /// The object behind kv_cache(), without a buffer until bound; never null. It outlives the layer,
  /// and what is bound and scaled later is seen in it.
  std::shared_ptr<const KVCache> shared_kv_cache() const noexcept { return cache_; }
  /// Binds the cache. If it is quantised and `cache` brings no scales, it gets this layer's: those
  /// that load_kv_scales() and calc_kv_scales() set. Scales that `cache` brings stay the engine's:
  /// the layer reads them and never changes or replaces them. Layers that share the cache see the
  /// same. Throws for a layer that shares another's, and for an order that its kernels do not read:
  /// HDN, unless they are the kernels for CPUs.
  void bind_kv_cache(KVCache cache);
  /// Throws what bind_kv_cache() would.
  void check_kv_cache(const KVCache& cache) const;

  /// Sets the layer's own scales from a checkpoint, before or after the cache is bound; returns
  /// warnings for the engine's log. With calculate_kv_scales K and V are left to the first batch.
  /// Recorded steps keep the scales that they were recorded with.
  std::vector<std::string> load_kv_scales(const LoadedKVScales& loaded);
  /// f32 [3]: K, V, Q, on the device, the layer's own (of a layer that shares a cache: what that
  /// cache is stored by). K and V are the cache's unless it was bound with scales of the engine's.
  /// Empty unless the cache is quantised. Read them with a queue; the host does not keep what
  /// calc_kv_scales() finds.
  const Buffer& scales() const noexcept { return shares_kv_cache() ? cache_->scales : scales_; }
  /// Of the probabilities, from a checkpoint; kept for the engine, no kernel reads it.
  float prob_scale() const noexcept { return prob_scale_; }
  /// scale = largest magnitude / constant (CLATTN_K_SCALE_CONSTANT …) of each whole tensor, on the
  /// device and without waiting; elements that are not finite do not count, zeros give 1. Happens
  /// once: forward() calls it for the first batch if calculate_kv_scales says so; what later calls
  /// enqueue, also from other threads on other queues, comes after it. With use_mla K's scale is
  /// that of the whole row, so that both parts count for it, and V's stays 1, unused. `num_tokens`
  /// rows are read; of key and value `num_keys` rows if given (cross attention). A call with
  /// num_tokens 0 leaves the calculation to the next one. Does nothing if the cache came with the
  /// engine's own scales.
  void calc_kv_scales(cl_command_queue queue, TensorRef query, TensorRef key, TensorRef value,
                      std::int64_t num_tokens, std::optional<std::int64_t> num_keys = std::nullopt);

  /// After the weights are loaded: throws kInvalidArgument unless activations have the layer's
  /// dtype. Sinks are f32 from the start.
  void process_weights_after_loading(DType act_dtype) const;

  /// AttentionImpl::warm_up() for the order of the cache that is bound, and the same of the layer's
  /// own kernels: after bind_kv_cache() and before the first request, so that its first token does
  /// not wait for them. Touches neither cache nor scales.
  void warm_up(cl_command_queue queue);

  /// Why the layer runs as it does: every backend of the registry, then the kernels of the chosen
  /// one (AttentionImpl::candidates()). to_string() makes text of it; planned_launches() adds a
  /// step's tiles and splits.
  std::vector<Candidate> explain() const;

  /// Stores key and value in the cache (unless it is another layer's), attends, writes the tokens'
  /// rows to the output and zeroes its padding rows, those of an output_fp8 too. Tensors have the
  /// shape [rows, heads, head_size], value and output head_size_v where it is set; with use_mla:
  ///
  ///     query   [rows, num_heads, kv_lora_rank + rope_dim]: q_nope times the up-projection of
  ///             the keys (the absorbed form), then q_pe. Prefills take this form, too: right,
  ///             but more arithmetic than attending to keys that were projected up
  ///     key     [rows, kv_lora_rank]: the normed latents, vLLM's kv_c_normed
  ///     value   [rows, rope_dim]: k_pe, the rotary part that all heads share
  ///     output  [rows, num_heads, kv_lora_rank]: before the up-projection of the values
  ///
  /// Without key and value there is nothing new to store (cross attention's later steps). In cross
  /// attention's first step they have one row per slot of the batch. `lse` as in
  /// AttentionImpl::forward(). Asynchronous; allocates nothing. Throws kInvalidArgument when it
  /// would store keys in an int8 cache with the layer's own scales before these were loaded or
  /// calculated. A call that is refused stores nothing, zeroes no row and leaves the calculation of
  /// scales to the next one (AttentionImpl::check_forward()).
  ///
  /// Profiling runs: with null metadata all rows are zeroed. If a cache is needed and none is
  /// bound, the tokens attend to the call's own keys, causally in decoders; then requests must
  /// have 0 computed tokens (cross attention aside), and the call blocks until the work has run.
  /// Throws kInvalidArgument if the call has no keys either, with use_mla, and with third-party
  /// backends.
  void forward(cl_command_queue queue, const AttentionTensors& tensors,
               const AttentionMetadata* metadata, const ForwardOptions& options = {});

 private:
  void take_cache_of_target();
  bool attend_own_keys(cl_command_queue queue, const AttentionTensors& tensors,
                       const AttentionMetadata& metadata, const ForwardOptions& options) const;
  bool uses_own_scales() const noexcept;
  bool lacks_scales() const noexcept;
  std::int64_t num_keys(const AttentionMetadata& metadata) const noexcept;
  bool check_scales(cl_command_queue queue, const AttentionTensors& tensors,
                    const AttentionMetadata& metadata, const ForwardOptions& options) const;
  void set_scales(const KVScales& scales);

  std::shared_ptr<Context> context_;
  LayerRegistry* registry_;
  AttentionOptions options_;
  AttentionConfig config_;
  std::shared_ptr<const AttentionBackend> backend_;
  std::shared_ptr<const AttentionImpl> impl_;
  std::shared_ptr<KVCache> cache_;  ///< one object for all layers that share it
  Buffer scales_;                   ///< the layer's own
  bool scales_loaded_ = false;      ///< by load_kv_scales()
  float prob_scale_ = 1;
  std::unique_ptr<detail::RowZeroer> zeroer_;
  std::unique_ptr<detail::KVScaleCalculator> calculator_;  ///< null = not wanted
};

}  // namespace clattn
