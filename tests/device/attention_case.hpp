#pragma once

#include <clattn/clattn.hpp>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oracle/oracle.hpp"

/// One attention call made up at random, run on a device and judged by the oracle. Everything that
/// a kernel must not use is poisoned: unused cache elements are NaN, unused block-table entries
/// point far outside, outputs are filled with a pattern and fenced by guard bands.
namespace attention_test {

struct Request {
  std::int32_t query_len = 1;
  std::int32_t context_len = 0;  ///< keys beyond the queries' own: in the cache before this step
  std::uint32_t identity = 0;    ///< equal identities and lengths have equal tensors in any batch
  std::optional<clattn::Direction> direction = std::nullopt;      ///< of all requests, or of none
  std::vector<std::pair<std::int32_t, std::int32_t>> spans = {};  ///< first position, end
  std::int32_t first_key = 0;              ///< with AttentionConfig::use_first_keys
  std::int32_t keep_keys = 0;              ///< with use_keep_keys
  std::vector<std::int32_t> parents = {};  ///< of a tree
};

struct CaseSpec {
  std::string backend = "FLASHINFER";
  clattn::KVCacheLayout layout = clattn::KVCacheLayout::kHND;
  clattn::AttentionConfig config;
  /// What the builder is made for; none = the same configuration. Another one tests layers that
  /// share a plan.
  std::optional<clattn::AttentionConfig> planned_for = std::nullopt;
  std::vector<Request> requests;  ///< decodes (1 query token) first
  bool causal = true;             ///< decoders
  bool causal_encoder = false;    ///< encoder_only
  std::int32_t num_splits = 0;
  clattn::SplitPolicy split_policy = clattn::SplitPolicy::kBalanced;
  bool side_by_side = true;  ///< clattn::BuilderOptions::side_by_side
  clattn::BuildOptions build_options = {};
  std::int64_t query_padding = 0;  ///< elements between the query tokens' rows, as in packed QKV
  bool write_cache = false;        ///< store the step's keys and values through write_kv_cache
  bool last_token_overflows =
      false;  ///< each request's newest K and V are overflow_value, seen by its last row only
  bool first_token_overflows = false;  ///< the same of each request's first K and V
  double overflow_value = std::numeric_limits<double>::infinity();
  /// The builder knows every length but as a bound, so many tokens above it: the lengths come from
  /// the device (BuilderOptions::device_seq_lens), the further pages are poison. -1: no bounds.
  std::int32_t bounds_above = -1;
  bool lists_on_device = false;   ///< directions or trees (BuilderOptions::device_directions)
  double mask_density = 0.6;      ///< share of keys that config.custom_mask leaves visible
  bool mask_shows_ahead = false;  ///< instead, it leaves those visible that follow the query
  bool unseen_is_nan = false;    ///< keys and values of requests that none of their queries may see
  bool scales_per_head = false;  ///< quantized caches: a factor per KV head, else per tensor
  double query_scale = 0;        ///< KVCache::scales_query's; 0 = it has none
  double value_mean = 0;         ///< of V, whose standard deviation is 1
  /// Keys of 0, and values of 1 in the element of their position's number, else 0: an output is the
  /// weights of the keys.
  bool unit_values = false;
  double rise = 0;               ///< of the logits from a request's first key to its last, about
  double sharpness = 1.0;        ///< standard deviation of the query's elements
  std::size_t page_padding = 0;  ///< bytes behind the K and V of each page
  bool heads_apart = false;      ///< all blocks of a KV head follow each other in the cache
  std::uint32_t page_seed = 1;   ///< where the pages lie; must not change any bit of the result
};

struct CaseResult {
  std::vector<std::string> kernels;       ///< that ran, in order
  bool rounds_probabilities = false;      ///< one of them (KernelInfo)
  bool multiplies_fp8 = false;            ///< likewise (LaunchRecord)
  std::vector<std::int64_t> tasks;        ///< of each
  std::vector<std::int64_t> work_groups;  ///< that share them
  bool beside = false;                    ///< two launches ran beside each other
  bool rebalanced = false;                ///< clattn::detail::PlanCounts
  std::vector<double> out;                ///< [tokens, num_heads, output_head_size()]
  std::vector<double> lse;                ///< [tokens, num_heads]
  std::vector<std::uint8_t> out_fp8;      ///< the same if config.output_fp8
  double worst_share = 0;                 ///< largest error as a share of what the oracle allows
  std::string worst_place;
  std::string fault;  ///< a touched guard band or a wrong cache element; empty = none
};

/// Runs the call; throws what the library throws.
CaseResult run_case(const std::shared_ptr<clattn::Context>& context, const CaseSpec& spec);

/// Readable description for failure messages.
std::string describe(const CaseSpec& spec);

/// Names an instance of tests over kernel families.
template <typename Tested>
std::string family_name(const Tested& tested) {
  return std::string(clattn::to_string(tested.param));
}

/// Every device found, opened once per process.
const std::vector<std::shared_ptr<clattn::Context>>& all_contexts();

/// Four heads of 64 over two KV heads, f16, pages of 16.
clattn::AttentionConfig small_config();

}  // namespace attention_test
