#pragma once

#include <clattn/attention_backend.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

class Attention;
struct KVScales;  // kv_scales.hpp

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

/// A layer: its configuration, and what makes it this one among a model's layers.
struct AttentionOptions {
  /// What it computes over which cache. num_kv_heads 0 = num_heads, with use_mla 1.
  AttentionConfig config = {};
  std::string prefix = {};  ///< the layer's name, unique in its registry
  /// Attends to that layer's cache; empty = one of its own. fp8_products is ignored then, because
  /// the scales of such a cache are not the layer's.
  std::string kv_sharing_target_layer_name = {};
  std::shared_ptr<const AttentionBackend> attn_backend = nullptr;  ///< null = get_attn_backend()
  bool calculate_kv_scales = false;  ///< take scales from the first batch instead of the checkpoint
  bool fp8_checkpoint = false;       ///< weights (and scales) were stored as fp8
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
  bool has_sink() const noexcept { return !config_.sinks.empty(); }
  /// Whether it attends to another layer's cache.
  bool shares_kv_cache() const noexcept { return !options_.kv_sharing_target_layer_name.empty(); }
  /// The backend that was chosen or given.
  std::shared_ptr<const AttentionBackend> get_attn_backend() const noexcept { return backend_; }
  /// Shared by layers of equal configurations; lives as long as the layer.
  const AttentionImpl& impl() const noexcept { return *impl_; }

  /// The layer's cache, the target's if it shares one; null until bound.
  const KVCache* kv_cache() const noexcept { return cache_->buffer ? cache_.get() : nullptr; }
  /// The object behind kv_cache(), without a buffer until bound; never null. It outlives the layer,
  /// and what is bound and scaled later is seen in it.
  std::shared_ptr<const KVCache> shared_kv_cache() const noexcept { return cache_; }
  /// Binds the cache. If it is quantised and `cache` brings no scales, it gets this layer's: those
  /// that load_kv_scales() and calc_kv_scales() set. Scales that `cache` brings stay the engine's:
  /// the layer reads them and never changes or replaces them. Layers that share the cache see the
  /// same. Throws for a layer that shares another's.
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
  /// Profiling runs: with null metadata the num_rows rows of the output are zeroed, and num_rows
  /// must be given, since nothing else tells them. If a cache is needed and none is
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
  struct Kernels;
  std::unique_ptr<Kernels> kernels_;
};

}  // namespace clattn
