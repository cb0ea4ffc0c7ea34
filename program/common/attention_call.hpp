#pragma once

#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <clattn/explain.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oracle/oracle.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/verify.hpp"

namespace clattn::cli {

/// What decides how a builder splits keys, besides num_splits.
struct PlanOptions {
  SplitPolicy split_policy = SplitPolicy::kBalanced;
  bool fast_build = false;
  bool side_by_side = true;
  std::int32_t decode_threshold = 1;
  /// Those of the call's builder: they decide how long deterministic cuts are. nullopt = as narrow
  /// as the batch.
  std::optional<BatchLimits> limits = {};
};

/// Positions of one request whose queries see one another.
struct KeySpan {
  std::int32_t first = 0, end = 0;
  bool operator==(const KeySpan&) const = default;
};

/// Query and sequence length of one request, and what it says of its keys beyond them to layers
/// that look at it (use_directions, use_first_keys, use_keep_keys, use_spans, use_trees).
struct RequestShape {
  std::int32_t query_len, seq_len;
  Direction direction = Direction::kCausal;
  std::int32_t first_key = 0;
  std::int32_t keep_keys = 0;
  std::vector<KeySpan> spans = {};
  std::vector<std::int32_t> parents = {};  ///< of the newest tokens, drafts in a tree
};

/// What the operation has of a batch, as CommonAttentionMetadata has it.
struct BatchArrays {
  std::vector<std::int32_t> query_start_loc, seq_lens, block_table;
  std::int64_t max_blocks = 0;
  std::vector<Direction> direction;
  std::vector<std::int32_t> span_start_loc, spans, first_keys, keep_keys, tree_start_loc,
      tree_parents;

  /// Makes the lists that a layer takes. Spans are given to those without use_spans, too, which
  /// ignore them.
  void list(std::span<const RequestShape> requests, const AttentionConfig& config);
  CommonAttentionMetadata metadata() const;
};

/// One attention call with all its inputs on the host, tensors as element bits in logical order,
/// requests in any order. Latent attention is one of a single KV head whose keys and values are the
/// same rows.
struct AttentionCall : BatchArrays {
  AttentionConfig config;
  bool causal = true;  ///< unless each request has a direction
  std::int32_t num_splits = 0;
  PlanOptions plan;
  std::int32_t padding = 0;  ///< rows of the query behind the requests' tokens, which no tensor has
  std::int32_t common_prefix_len = 0;   ///< tokens that all requests share, in the same pages
  std::string backend;                  ///< registry name; "" and "auto" choose
  std::optional<KVCacheLayout> layout;  ///< nullopt = the backend's preference
  bool packed = false;                  ///< an x-packed cache instead

  /// [num_reqs], upper bounds of seq_lens that the plan is made of, while the device has the
  /// lengths (BuilderOptions::device_seq_lens); or empty: made of the lengths. Under a bound, a
  /// length of 0 stands for one that the device refuses: its queries attend to nothing.
  std::vector<std::int32_t> seq_len_bounds;
  std::vector<std::int64_t> slot_mapping;   // [tokens] or empty: from the block table
  std::vector<std::int32_t> key_start_loc;  // [num_reqs + 1], contiguous keys only; or empty

  std::vector<std::byte> query;  // [tokens, num_heads, head_size]
  /// [tokens, num_kv_heads, head_size or value_width()] to be stored, or empty; contiguous keys:
  /// attended directly.
  std::vector<std::byte> key, value;
  std::int64_t num_blocks = 0;
  LogicalCache cache;
  std::vector<float> scales;           // of a quantized cache, [2][1 or num_kv_heads]; or empty: 1
  float query_scale = 1;               ///< what queries are divided by under config.fp8_products
  std::vector<std::byte> custom_mask;  // [tokens, max_seq_len()] under config.custom_mask
  float output_scale = 1;              ///< under config.output_fp8

  std::int32_t num_reqs() const { return static_cast<std::int32_t>(seq_lens.size()); }
  bool is_refused(std::size_t request) const {
    return !seq_len_bounds.empty() && seq_lens[request] == 0;
  }
  std::int32_t num_tokens() const { return query_start_loc.empty() ? 0 : query_start_loc.back(); }
  /// Of the bounds, if there are.
  std::int32_t max_seq_len() const;
  /// As much of the common prefix as is computed already in every request with query tokens: what
  /// a cascade can read once.
  std::int32_t computed_prefix_len() const;
  CommonAttentionMetadata batch() const;
};

/// Throws kInvalidArgument naming request, field and value unless the batch's arrays fit each other
/// and the cache (num_blocks = -1: of any size).
void validate_call(const AttentionCall& call, std::int64_t num_blocks);

/// Throws kInvalidArgument unless each bound is at least its length and at most `most`, the tokens
/// that the block table has room for.
void validate_bounds(std::span<const std::int32_t> seq_lens, std::span<const std::int32_t> bounds,
                     std::int64_t most);

/// The kernel of a role. Of several tiles the largest, which is last, is what tuning rows
/// choose.
std::optional<KernelInfo> kernel_of(const std::vector<KernelInfo>& kernels, std::string_view role);

/// The role of launches that merge a cascade's levels.
inline constexpr std::string_view kCascadeRole = "cascade";

struct LaunchReport {
  std::string name, role;  ///< of the kernel
  std::int64_t tasks = 0;
  std::int64_t work_groups = 0;
  std::int32_t work_group_size = 0;
  double time_us = 0;
};

struct AttentionOutcome {
  std::vector<std::byte> out;      // [tokens, num_heads, head_size] in config.dtype
  std::vector<float> lse;          // [tokens, num_heads]
  std::vector<std::byte> out_fp8;  // [tokens, num_heads, head_size] under config.output_fp8
  LogicalCache cache;              ///< after the write; empty when nothing was stored
  std::string_view backend;
  KVCacheLayout layout = KVCacheLayout::kNHD;
  std::vector<LaunchReport> launches;
  bool rounds_probabilities = false;  ///< KernelInfo::rounds_probabilities of one of them
  bool multiplies_fp8 = false;        ///< LaunchRecord::multiplies_fp8 of one of them
  bool flushes_f16 = false;           ///< it multiplied f16 on a device that flushes it
  double metadata_us = 0;             ///< host time of build()
  double upload_us = 0, cache_write_us = 0, attention_us = 0;
};

/// Runs the call on the context's device through the backend that it asks for: decodes are brought
/// to the front and the outputs put back in the call's order. Over an x-packed cache requests stay
/// in it, reshape_and_cache stores, and PagedAttention runs. The forward runs `repeat` times over
/// freshly poisoned outputs; times are those of the last. Throws what the library throws.
AttentionOutcome execute(const std::shared_ptr<Context>& context, const AttentionCall& call,
                         int repeat = 1);

/// The cache after the call's keys and values have been stored.
LogicalCache expected_cache(const AttentionCall& call);

/// The same call for the oracle: stored keys and values applied, everything widened to double.
oracle::AttentionCase oracle_case(const AttentionCall& call);

/// The outputs of a call, in its own type and (under config.output_fp8) as fp8. A call that ran as
/// a cascade may also be off by the rounding of its levels to the output's type, and one on matrix
/// units that flush f16 by what they leave out. Rows that were multiplied in fp8 are those of
/// rounded queries.
Deviation judge_output(const AttentionCall& call, const AttentionOutcome& outcome,
                       const oracle::AttentionResult& truth);

/// Every byte of the cache after the call's keys and values were stored. With a scale for each
/// token and head the stored rows are judged by what the oracle allows.
Deviation judge_cache(const AttentionCall& call, const AttentionOutcome& outcome,
                      const LogicalCache& expected);

/// What a call's outputs should be.
oracle::AttentionResult oracle_result(const AttentionCall& call);

/// The layout to use: the wanted one if validate_layout() has no reasons against it (kUnsupported
/// with them otherwise), else the backend's own.
KVCacheLayout choose_layout(const AttentionBackend& backend, std::optional<KVCacheLayout> wanted,
                            const DeviceCapabilities* capabilities);

/// A cache of at least one page in the backend's order, and the fields that its pages imply.
KVCache make_cache(const Context& context, const AttentionBackend& backend, KVCacheLayout layout,
                   const KVCacheSpec& spec, std::int64_t num_blocks);

}  // namespace clattn::cli
