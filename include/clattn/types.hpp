#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace clattn {

/// Element types of tensors and caches. f16 and bf16 are storage types: all arithmetic is f32.
enum class DType : std::uint8_t { kF32, kF16, kBF16 };

/// Bytes of one element.
std::size_t element_size_bytes(DType dtype);
/// "f32", "f16" or "bf16".
std::string_view to_string(DType dtype);
/// Inverse of to_string; throws kInvalidArgument naming the legal values.
DType parse_dtype(std::string_view name);

/// Order in memory of one cache block: NHD = [token, head, dim], HND = [head, token, dim].
enum class KVCacheLayout : std::uint8_t { kNHD, kHND };

/// "NHD" or "HND".
std::string_view to_string(KVCacheLayout layout);
/// Inverse of to_string; throws kInvalidArgument naming the legal values.
KVCacheLayout parse_kv_cache_layout(std::string_view name);

/// The slot that stores nothing.
inline constexpr std::int64_t kPadSlotId = -1;

}  // namespace clattn
