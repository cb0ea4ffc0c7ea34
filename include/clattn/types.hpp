#pragma once

#if __cplusplus < 202002L
#error "CLAttn's headers are C++20: compile with -std=c++20 or later"
#endif

#include <clattn/version.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

/// Marks the namespace in every public header as exported by the shared library. All else is
/// hidden.
#define CLATTN_API [[gnu::visibility("default")]]

namespace CLATTN_API clattn {

/// The library's own version, "0.1.0"; CLATTN_VERSION is that of the headers.
std::string_view version() noexcept;

/// Element types of tensors and caches. All but f32 are storage types: arithmetic is f32. The 8-bit
/// ones are for caches, with real = stored * scale: fp8 e4m3 (finite, up to 448) and e5m2 (up to
/// 57344), rounded to nearest even, saturating, NaN kept; int8 symmetric (-127 … 127), rounded to
/// nearest even, saturating, NaN stored as 0. uint4x2 is two codes of 4 bits in a byte, 0 … 15, the
/// first in its lower half: of caches with a scale and a zero for each token and head only.
enum class DType : std::uint8_t { kF32, kF16, kBF16, kFp8E4M3, kFp8E5M2, kInt8, kUInt4x2 };

/// Bytes of one element.
std::size_t element_size_bytes(DType dtype);
/// Numbers that one element holds: 2 of uint4x2, 1 of all others.
constexpr std::int32_t codes_per_element(DType dtype) {
  return dtype == DType::kUInt4x2 ? 2 : 1;
}
/// Whether the type is one of a byte, of caches alone: codes that are multiplied by a scale.
bool is_quantized(DType dtype);
/// "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8" or "uint4x2".
std::string_view to_string(DType dtype);
/// The type of a name, or nullopt if there is none. Names are those of to_string() and those of
/// PyTorch and vLLM, with or without "torch.": float32, float, float16, half, bfloat16,
/// float8_e4m3fn, float8_e5m2, and fp8 (e4m3).
std::optional<DType> find_dtype(std::string_view name);
/// As find_dtype(), but throws kInvalidArgument listing the legal names instead.
DType parse_dtype(std::string_view name);

/// How a cache holds keys and values: what one code is, and what turns codes into numbers. An
/// element type is the format of that type with scales for a tensor or for each KV head
/// (KVCache::scales).
struct CacheFormat {
  /// Keys, or values: x = (code - zero) * scale.
  struct Side {
    /// The codes that share a scale. kTensor: all of a tensor, or of a KV head, given with the
    /// cache. kRow: a token's of one head, found when they are stored. Others are not supported.
    enum class Group : std::uint8_t { kTensor, kRow, kDims32, kDims16, kChannel16 };
    /// kNone: x = code * scale. kInteger, of uint4x2: x = (code - zero) * scale, where zero, 0 …
    /// 15, is the 4 lowest bits of the stored f32, and scale that f32 with 0 in their place.
    /// kOffset is not supported.
    enum class Zero : std::uint8_t { kNone, kInteger, kOffset };
    /// The type of scales. Others than kF32 are not supported.
    enum class Scale : std::uint8_t { kF32, kF16, kE4M3, kE8M0 };
    DType code = DType::kF16;      ///< what an element is
    Group group = Group::kTensor;  ///< what shares a scale
    Zero zero = Zero::kNone;       ///< what is taken from codes, or added to numbers
    Scale scale = Scale::kF32;     ///< the type of scales
    std::int32_t rotation = 0;     ///< dims that are turned together before; only 0 is supported
    bool operator==(const Side&) const = default;
  };

  CacheFormat() = default;
  /// The format of an element type.
  constexpr CacheFormat(DType dtype)  // NOLINT(google-explicit-constructor): it is a format
      : k{.code = dtype}, v{.code = dtype} {}
  /// One for keys and one for values.
  constexpr CacheFormat(Side keys, Side values) : k(keys), v(values) {}

  Side k = {};  ///< keys
  Side v = {};  ///< values

  /// That of codes of a type with a scale for each token and head, and of uint4x2 with a zero.
  static constexpr CacheFormat per_row(DType code) {
    const Side side{.code = code,
                    .group = Side::Group::kRow,
                    .zero = code == DType::kUInt4x2 ? Side::Zero::kInteger : Side::Zero::kNone};
    return {side, side};
  }
  /// Whether each token and head has a scale of its own.
  bool scales_per_row() const { return k.group == Side::Group::kRow; }
  bool operator==(const CacheFormat&) const = default;
};
using SideFormat = CacheFormat::Side;  ///< a format of keys, or of values

/// Why a format is not supported, naming field, value and what is; empty = it is.
std::string why_not(const CacheFormat& format);
/// The name of a supported format: that of its element type, "int8_per_token_head",
/// "fp8_per_token_head" or "uint4_per_token_head". Throws kUnsupported with why_not() for others.
std::string_view to_string(const CacheFormat& format);
/// The format of a name: to_string()'s or those of find_dtype(). "auto" gives nullopt, the layer's
/// type. Throws kInvalidArgument listing the legal names, and kUnsupported for vLLM's
/// "int4_per_token_head", whose rows are rotated.
std::optional<CacheFormat> parse_kv_cache_dtype(std::string_view name);

/// What attends to what (vLLM's AttentionType). Decoder: causal self-attention over the cache.
/// Encoder: bidirectional, inside an encoder-decoder model. Encoder-only: no cache at all,
/// bidirectional unless the batch says causal. Both attend to the given keys and values directly.
/// Encoder-decoder: cross attention, every query sees all of the encoder's keys.
enum class AttentionType : std::uint8_t { kDecoder, kEncoder, kEncoderOnly, kEncoderDecoder };

/// "decoder", "encoder", "encoder_only" or "encoder_decoder".
std::string_view to_string(AttentionType type);
/// Inverse of to_string; throws kInvalidArgument naming the legal values.
AttentionType parse_attention_type(std::string_view name);

/// Which keys the queries of one request see: all of them (kBothWays), those up to their own
/// position (kCausal), or all of them with the window of the first new token (kCanvas): its left
/// side is measured from that token for every query, and its right side is not applied.
enum class Direction : std::uint8_t { kBothWays = 0, kCausal = 1, kCanvas = 2 };

/// How a layer's window cuts the keys that a query sees of its span: not at all, to the left of the
/// query, or on both sides of it.
enum class SpanRule : std::uint8_t { kWhole, kClipLeft, kClipBoth };

/// "whole", "clip_left" or "clip_both".
std::string_view to_string(SpanRule rule);
/// Inverse of to_string; throws kInvalidArgument naming the legal values.
SpanRule parse_span_rule(std::string_view name);

/// Order in memory of one cache block: NHD = [token, head, dim], HND = [head, token, dim].
enum class KVCacheLayout : std::uint8_t { kNHD, kHND };

/// "NHD" or "HND".
std::string_view to_string(KVCacheLayout layout);
/// Inverse of to_string, which also takes the names of all dimensions, layers and blocks in front:
/// "LBNHC" is NHD, "LBHNC" HND. Throws kInvalidArgument naming the legal values.
KVCacheLayout parse_kv_cache_layout(std::string_view name);

/// What one layer keeps per token (vLLM's AttentionSpec family) or, kMamba, per request.
enum class KVCacheKind : std::uint8_t {
  kFull,
  kSlidingWindow,
  kChunkedLocal,
  kEncoderOnly,
  kCross,
  kMamba  ///< a constant state for the application's own kernels: one page per request
};

/// "full", "sliding_window", "chunked_local", "encoder_only", "cross" or "mamba".
std::string_view to_string(KVCacheKind kind);
/// Inverse of to_string, which also takes "full_attention" and the like; throws kInvalidArgument
/// naming the legal values.
KVCacheKind parse_kv_cache_kind(std::string_view name);

/// Which batches a backend's step can be recorded and replayed for; a greater value includes the
/// lesser ones.
enum class AttentionCGSupport : std::uint8_t {
  kNever = 0,
  kUniformSingleTokenDecode = 1,  ///< decodes of one token
  kUniformBatch = 2,              ///< requests of one query length
  kAlways = 3
};

/// The slot that stores nothing.
inline constexpr std::int64_t kPadSlotId = -1;

}  // namespace clattn
