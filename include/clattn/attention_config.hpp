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

/// The types of the fields of an AttentionConfig by kind.
namespace config_kind {
using Count = std::int32_t;                         ///< a number of things
using Flag = bool;                                  ///< yes or no
using Float = float;                                ///< a number
using OptionalFloat = std::optional<float>;         ///< nullopt = "auto"
using PerHead = std::vector<float>;                 ///< a number a query head, or none
using Type = DType;                                 ///< an element type
using OptionalFormat = std::optional<CacheFormat>;  ///< nullopt = "auto"
using Attends = AttentionType;                      ///< what attends to what
using Family = KernelFamily;                        ///< a family of kernels
using Rule = SpanRule;                              ///< how a window cuts spans
}  // namespace config_kind

/// A layer's configuration: what get_attn_backend() is asked for and an AttentionImpl is made from.
/// Its fields are the rows of attention_config.inc, which say what each means and which values are
/// legal; docs/configuration.md is a table of them. Logit of query position i and key position j:
/// x = scale * <q, k>; then c * tanh(x / c); then + slope * (j - i); then masks; a sink joins the
/// denominator. All of these can be combined.
struct AttentionConfig {
#define CLATTN_FIELD(kind, name, standard, ...) config_kind::kind name = standard;
#include <clattn/attention_config.inc>
#undef CLATTN_FIELD

  bool operator==(const AttentionConfig&) const = default;
  /// The format that the cache has: kv_cache_dtype, or that of dtype without one.
  CacheFormat cache_format() const {
    return kv_cache_dtype.value_or(dtype);
  }
  /// The type of its elements.
  DType cache_dtype() const {
    return cache_format().k.code;
  }
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
  /// always, cross attention with block_size 0.
  bool contiguous_kv() const {
    return attn_type == AttentionType::kEncoder || attn_type == AttentionType::kEncoderOnly ||
           (attn_type == AttentionType::kEncoderDecoder && block_size == 0);
  }
};

}  // namespace clattn
