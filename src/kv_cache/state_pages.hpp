#pragma once

#include <clattn/kv_cache.hpp>
#include <cstddef>

namespace clattn::detail {

/// Bytes of one request's tensor; throws on overflow.
std::size_t state_bytes(const StateTensor& state);

}  // namespace clattn::detail
