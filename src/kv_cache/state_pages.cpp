#include <algorithm>
#include <clattn/kv_cache.hpp>
#include <limits>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kv_cache/spec.hpp"

namespace clattn {

namespace {

using detail::throw_invalid_if;

/// Pages of keys and values or of latent rows as large as `bytes`.
void enlarge(const std::string& layer, KVCacheSpec& spec, std::size_t bytes) {
  const std::size_t own = spec.page_size_bytes();
  if (spec.page_size_padded == 0 && bytes % own == 0) {
    const std::size_t tokens = bytes / own * detail::to_size(spec.block_size);
    throw_invalid_if(tokens > std::numeric_limits<std::int32_t>::max(),
                     "KVCacheSpec: layer '{}': blocks of {} tokens, legal: up to 2^31 - 1", layer,
                     tokens);
    spec.block_size = static_cast<std::int32_t>(tokens);
    return;
  }
  throw_invalid_if(spec.use_mla,
                   "KVCacheSpec: layer '{}' has latent pages of {} bytes, legal: a divisor of the "
                   "largest page's {} (latent pages are not padded)",
                   layer, own, bytes);
  spec.page_size_padded = bytes;
}

}  // namespace

void unify_kv_cache_spec_page_size(std::map<std::string, KVCacheSpec>& specs) {
  std::size_t keys = 0, states = 0;  // the largest pages of both sorts
  for (const auto& [layer, spec] : specs) {
    std::size_t& largest = spec.kind == KVCacheKind::kMamba ? states : keys;
    largest = std::max(largest, spec.page_size_bytes());
  }
  const std::size_t bytes =
      keys == 0
          ? states
          : detail::checked_mul(keys, std::max(detail::ceil_div(states, keys), std::size_t{1}),
                                "KVCacheSpec: page_size_bytes");
  std::map<std::string, KVCacheSpec> unified = specs;
  for (auto& [layer, spec] : unified) {
    if (spec.page_size_bytes() == bytes) continue;
    if (spec.kind == KVCacheKind::kMamba)
      spec.page_size_padded = bytes;
    else
      enlarge(layer, spec, bytes);
  }
  specs = std::move(unified);
}

std::vector<StateView> view_state_pages(const Buffer& raw, const KVCacheSpec& spec) {
  throw_invalid_if(spec.kind != KVCacheKind::kMamba,
                   "view_state_pages: pages of keys and values, legal: kMamba");
  const std::size_t page = spec.page_size_bytes();
  throw_invalid_if(!raw || raw.size_bytes() < page || raw.size_bytes() % page != 0,
                   "view_state_pages: buffer of {} bytes, legal: a positive multiple of the page "
                   "size {}",
                   raw.size_bytes(), page);
  std::vector<StateView> views;
  std::size_t begin = 0;
  for (const StateTensor& state : spec.states) {
    const std::size_t element = element_size_bytes(state.dtype);
    throw_invalid_if(begin % element != 0 || page % element != 0,
                     "view_state_pages: state {} begins at byte {} of pages of {}, legal: "
                     "multiples of {} ({})",
                     views.size(), begin, page, element, to_string(state.dtype));
    views.push_back({.buffer = raw,
                     .tensor = state,
                     .num_blocks = static_cast<std::int64_t>(raw.size_bytes() / page),
                     .offset = static_cast<std::int64_t>(begin / element),
                     .block_stride = static_cast<std::int64_t>(page / element)});
    begin += detail::state_bytes(state);
  }
  return views;
}

}  // namespace clattn
