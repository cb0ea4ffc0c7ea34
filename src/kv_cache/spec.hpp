#pragma once

#include <clattn/attention_config.hpp>
#include <clattn/kv_cache.hpp>

namespace clattn::detail {

/// What a page of such a layer holds, whichever pages it may give back.
KVCacheSpec page_spec(const AttentionConfig& config);

/// Bytes of one request's tensor of states; throws on overflow.
std::size_t state_bytes(const StateTensor& state);

}  // namespace clattn::detail
