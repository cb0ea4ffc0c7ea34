#pragma once

#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/mla.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "capture/case_writer.hpp"

// A cache as a case keeps it: arrays in logical order, and keys that say how it is stored.

namespace clattn::detail {

/// What "layout" says of an x-packed cache.
inline constexpr std::string_view kPackedLayout = "packed";

/// A number of case.json. JSON knows no infinity and no NaN: what is neither legal nor a number
/// becomes a string, which `clattn run` refuses by name.
std::string number(float value);

/// Adds the arrays of a cache: `pages` as they are, zeros elsewhere. Throws kInvalidArgument for a
/// page that the cache does not have.
void add_cache(const CaseWriter& writer, const Queue& queue, const KVCache& cache,
               std::vector<std::int32_t> pages);
void add_cache(const CaseWriter& writer, const Queue& queue, const PackedKVCache& cache,
               std::vector<std::int32_t> pages);
void add_cache(const CaseWriter& writer, const Queue& queue, const MLACache& cache,
               std::vector<std::int32_t> pages);

/// Element type and order in memory, to stand behind other keys.
std::string storage_keys(const KVCache& cache);
std::string storage_keys(const PackedKVCache& cache);
/// Those and the scales.
std::string cache_keys(const Queue& queue, const KVCache& cache);
std::string cache_keys(const Queue& queue, const PackedKVCache& cache);
std::string cache_keys(const Queue& queue, const MLACache& cache);

}  // namespace clattn::detail
