#pragma once

#include <array>
#include <clattn/types.hpp>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

/// Families of kernels that compute the same. kAuto chooses by the device's capabilities; forcing
/// one is for tests, comparisons and devices that report themselves wrongly.
enum class KernelFamily : std::uint8_t {
  kAuto,
  kCpu,        ///< one work-item per group, explicit vectors, no barriers
  kGpu,        ///< work-groups and local memory: any device
  kGpuPtx,     ///< as kGpu, with lane shuffles through inline PTX where a kernel has them
  kGpuMatrix,  ///< as kGpu, with matrix units that the driver's compiler has built-ins for
};
/// All of them, kAuto first.
inline constexpr std::array kKernelFamilies = {KernelFamily::kAuto, KernelFamily::kCpu,
                                               KernelFamily::kGpu, KernelFamily::kGpuPtx,
                                               KernelFamily::kGpuMatrix};

/// "auto", "cpu", "gpu", "gpu_ptx" or "gpu_matrix".
std::string_view to_string(KernelFamily family);
/// Inverse of to_string; throws kInvalidArgument naming the legal values.
KernelFamily parse_kernel_family(std::string_view name);

/// AttentionConfig::fp8_products leaves requests of at most this many rows (query tokens times
/// query heads per KV head) to the decode kernels, which do not multiply in e4m3.
inline constexpr std::int32_t kMostDecodeRows = 16;

/// What get_attn_backend() is asked for; also what an AttentionImpl is made from.
struct AttentionConfig {
  std::int32_t num_heads = 0;     ///< query heads, a multiple of num_kv_heads
  std::int32_t num_kv_heads = 0;  ///< key/value heads
  std::int32_t head_size = 0;     ///< use_mla: kv_lora_rank + rope_dim
  std::int32_t head_size_v = 0;   ///< of V: 8 ... head_size, steps of 8; 0 = head_size
  std::int32_t block_size = 16;   ///< tokens per cache page
  DType dtype = DType::kF16;      ///< of query, key, value and output
  std::optional<DType> kv_cache_dtype = std::nullopt;  ///< nullopt = "auto" = dtype
  std::optional<float> scale = std::nullopt;  ///< softmax scale; nullopt = 1 / sqrt(head_size)
  // Logit of query position i and key position j: x = scale * <q, k>; then c * tanh(x / c); then
  // + slope * (j - i); then masks; a sink joins the denominator. All of these can be combined.
  float logits_soft_cap = 0;        ///< c; 0 = none
  std::int32_t sliding_window = 0;  ///< keys seen, the own one included (encoder types: to either
                                    ///< side); 0 = all. Keys outside are skipped, not masked
  std::int32_t attention_chunk_size = 0;  ///< chunked-local: a query sees the keys of its own
                                          ///< aligned chunk only; 0 = none
  AttentionType attn_type = AttentionType::kDecoder;  ///< what attends to what
  std::vector<float> alibi_slopes = {};               ///< [num_heads] or empty
  std::vector<float> sinks = {};  ///< [num_heads] logits that join the denominator, or empty
  bool custom_mask = false;       ///< every forward() brings a mask of its own
  bool output_fp8 = false;        ///< every forward() also writes the output as fp8 e4m3
  /// For prompts over an e4m3 cache: multiplies in e4m3, less accurate and, beyond a few thousand
  /// keys, faster, where the device can (compute capability 9.0, 16-bit dtype, heads of 128, up to
  /// 16 query heads a KV head, neither ALiBi nor custom_mask). Ignored otherwise, and for requests
  /// of at most kMostDecodeRows rows. Queries are divided by their scale (KVCache::scales_query,
  /// above 0; else 1); they and probabilities are rounded to e4m3, saturating. docs/howto.md states
  /// the error.
  bool fp8_products = false;
  bool use_mla = false;        ///< multi-head latent attention: MLA backends only
  std::int32_t rope_dim = 64;  ///< use_mla: elements of head_size that are the rotary part; those
                               ///< before them are the latent part. vLLM: qk_rope_head_dim
  bool is_attention_free = false;  ///< no attention at all: selects NO_ATTENTION
  // What the engine will do with the layer. None of this changes the kernels; it decides which
  // backends fit.
  bool use_non_causal = false;             ///< batches with causal = false
  bool use_batch_invariant = false;        ///< builders with SplitPolicy::kDeterministic
  bool use_per_head_quant_scales = false;  ///< caches with scales_per_head
  bool use_mm_prefix = false;  ///< bidirectional spans, by make_mm_prefix_mask(): needs custom_mask
  bool use_kv_connector = false;  ///< hooks around forward() that load and save the cache
  bool use_pcp = false;           ///< prefill context parallelism: a prompt's tokens over devices
  KernelFamily kernel_family = KernelFamily::kAuto;  ///< kAuto: the device decides

  /// The type that the cache has: kv_cache_dtype, or dtype without one.
  DType cache_dtype() const { return kv_cache_dtype.value_or(dtype); }
  /// Query heads that share a KV head; 0 for a configuration without KV heads.
  std::int32_t num_queries_per_kv() const {
    return num_kv_heads > 0 ? num_heads / num_kv_heads : 0;
  }
  /// Elements of a head's output: those of its values, head_size_v or head_size, with use_mla the
  /// latent part alone (kv_lora_rank).
  std::int32_t output_head_size() const {
    if (use_mla) return static_cast<std::int32_t>(std::int64_t{head_size} - rope_dim);
    return head_size_v != 0 ? head_size_v : head_size;
  }
  /// Whether keys and values are attended directly instead of through a paged cache: encoder types
  /// always, cross attention with block_size 0. Only then may values, and results, have fewer
  /// elements a head (head_size_v) than queries and keys.
  bool contiguous_kv() const {
    return attn_type == AttentionType::kEncoder || attn_type == AttentionType::kEncoderOnly ||
           (attn_type == AttentionType::kEncoderDecoder && block_size == 0);
  }
};

}  // namespace clattn
