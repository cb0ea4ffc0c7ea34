#pragma once

#include <clattn/types.hpp>
#include <optional>
#include <string_view>

namespace clattn::detail {

/// get_kv_cache_layout() for an override and the text of CLATTN_KV_CACHE_LAYOUT.
std::optional<KVCacheLayout> choose_kv_cache_layout(std::optional<KVCacheLayout> layout_override,
                                                    std::string_view variable);

}  // namespace clattn::detail
