#pragma once

#include <clattn/attention.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "program/common/attention_call.hpp"
#include "program/recurrent/delta_net.hpp"

namespace clattn::cli {

/// What a row of suite `cache` measures.
enum class CacheOp : std::uint8_t {
  kWrite,            ///< the layer's own write: reshape_and_cache_flash, concat_and_cache_mla
  kReshapeAndCache,  ///< into the x-packed pair
  kAppend,           ///< append_paged_kv_cache
  kCopyBlocks,       ///< half of the batch's pages to the other half
  kSwapOut,          ///< that half to pinned host memory
  kSwapIn,           ///< and back
  kGather,           ///< gather_and_maybe_dequant_cache of all tokens
};

/// The layer that a row measures; docs/benchmark.md explains the fields.
struct BenchModel {
  std::string name;
  AttentionConfig config{};  ///< of layers of attention; its dtype is that of all layers
  DeltaNet delta_net{};      ///< of the recurrent layers, if there are some
  CacheOp op = CacheOp::kWrite;
  std::optional<KVCacheLayout> layout{};  ///< of the cache; nullopt = as the run has it
  std::int32_t span = 0;       ///< tokens of one in each prompt, which see one another; 0 = none
  std::int32_t keep_keys = 0;  ///< first keys of each request that escape the window; 0 = none
  std::int32_t tree = 0;  ///< drafts that each draft has, use_trees or custom_mask; 0 = no tree
};

/// One row of a shapes file.
struct BenchShape {
  BenchModel model;  ///< with the row's own options
  std::string suite, batch, options;
  std::vector<std::string> sets;
  std::vector<RequestShape> requests;  ///< decodes first, as builders want them

  /// "model/suite/batch", then the row's own options: what --filter looks at and what rows of two
  /// reports are matched by.
  std::string name() const;
  bool in_set(std::string_view set) const;
  std::int32_t num_reqs() const { return static_cast<std::int32_t>(requests.size()); }
  std::int32_t num_tokens() const;
  std::int32_t max_query_len() const;
  std::int32_t max_seq_len() const;
  /// Of suites gdn_decode, gdn_prefill and conv.
  bool is_recurrent() const;
};

/// "write", "reshape_and_cache", ...: the values of option op.
std::string_view to_string(CacheOp op);

/// The suites in the order of reports.
const std::vector<std::string>& bench_suites();

/// Parses the text of a shapes file; throws kInvalidArgument "NAME:LINE: field: value, legal: ...".
std::vector<BenchShape> parse_shapes(std::string_view text, std::string_view name);

}  // namespace clattn::cli
