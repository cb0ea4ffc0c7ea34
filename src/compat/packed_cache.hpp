#pragma once

#include <clattn/compat/packed_cache.hpp>

#include "capture/packed_pages.hpp"

namespace clattn::detail {

/// The cache as the other rooms take it.
PackedPages pages_of(const PackedKVCache& cache);

}  // namespace clattn::detail
