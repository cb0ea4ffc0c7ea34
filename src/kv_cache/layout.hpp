#pragma once

#include <array>
#include <clattn/types.hpp>
#include <cstdint>
#include <optional>
#include <string_view>

namespace clattn::detail {

/// Strides of the logical dimensions when memory holds them in `order`, slowest first, without
/// gaps. Throws where they overflow.
std::array<std::int64_t, 5> strides_of(const std::array<std::int64_t, 5>& shape,
                                       const std::array<std::int32_t, 5>& order);

/// get_kv_cache_layout() for an override and the text of CLATTN_KV_CACHE_LAYOUT.
std::optional<KVCacheLayout> choose_kv_cache_layout(std::optional<KVCacheLayout> layout_override,
                                                    std::string_view variable);

}  // namespace clattn::detail
