#pragma once

#include <array>
#include <clattn/attention.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/mla.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "base/environment.hpp"
#include "capture/capture_pause.hpp"
#include "capture/packed_pages.hpp"

// CLATTN_CAPTURE_DIR: calls as case directories that `clattn run` executes. Capturing reads device
// memory through the call's queue and so waits for all that was enqueued before. Of what its format
// (docs/cases.md) has no key for a case knows only the default: a plan that was made for another
// layer's window.

namespace clattn::detail {

inline bool capturing() {
  return !environment().capture_dir.empty() && !CapturePause::active();
}

/// Adds to a case what its call gave, for `clattn run` to compare; empty where a case keeps no
/// results. Waits for all that the queue was given. To be called once the call is enqueued, but
/// not where it was only recorded; what the capture was given must still be there.
using AddResults = std::function<void()>;

/// What decides how a step's keys are split, as its builder was told.
struct PlanRecord {
  std::int32_t num_splits = 0;
  SplitPolicy split_policy = SplitPolicy::kBalanced;
  std::optional<BatchLimits> limits = {};  ///< where they decide how long deterministic cuts are
  bool fast_build = false;
  std::int32_t decode_threshold = 1;  ///< which requests come first
  bool side_by_side = true;
};

/// Lengths on the device, int32 from `offset_bytes` on.
struct LengthSource {
  cl_mem buffer = nullptr;
  std::size_t offset_bytes = 0;
};

/// Lists on the device: ClaListedRequest [requests] and, of trees, the bits of each query token, at
/// so many bytes of the buffer.
struct ListSource {
  cl_mem buffer = nullptr;
  std::size_t requests_at = 0, tree_bits_at = 0;
  std::int32_t tree_words = 0;
  bool directions = false, trees = false;
};

/// A step's batch as the host keeps it.
struct BatchRecord {
  std::string_view backend;
  PlanRecord plan = {};
  std::span<const std::int32_t> query_start_loc, seq_lens;
  /// The pages of request r are pages[pages_at[r]] and those after it. Contiguous keys: no pages,
  /// and the request's first key row stands at pages_at[r].
  std::span<const std::int32_t> pages_at, pages;
  LengthSource device_lens = {};    ///< if not null, what counts: seq_lens are their bounds
  LengthSource device_starts = {};  ///< if not null, what counts instead of query_start_loc
  ListSource device_lists = {};  ///< if not null, what counts instead of these of the lists below
  std::span<const Direction> direction = {};  ///< these as CommonAttentionMetadata has them
  std::span<const std::int32_t> span_start_loc = {}, spans = {}, first_keys = {}, keep_keys = {};
  std::span<const std::int32_t> tree_start_loc = {}, tree_parents = {};
};

/// The batch that a call runs: that of the host, with what counts of the device's query starts and
/// lists.
/// Waits for the queue to read them.
class RunBatch {
 public:
  RunBatch(cl_command_queue queue, const BatchRecord& batch);
  RunBatch(const RunBatch&) = delete;
  RunBatch& operator=(const RunBatch&) = delete;
  ~RunBatch() = default;
  const BatchRecord& record() const noexcept { return record_; }

 private:
  void read_lists(cl_command_queue queue, const ListSource& lists);

  BatchRecord record_;
  std::vector<std::int32_t> starts_;
  std::vector<Direction> direction_;
  std::vector<std::int32_t> tree_start_loc_, tree_parents_;
};

/// The cache of a call; null where its keys are contiguous.
using AnyCache = std::variant<const KVCache*, const PackedPages*, const MLACache*>;

/// A forward(), of x-packed caches too, or forward_encoder() before it runs.
struct CapturedAttention {
  cl_command_queue queue = nullptr;
  const AttentionConfig& config;
  const BatchRecord& batch;
  bool causal = false;
  const AttentionTensors& tensors;  ///< keys and values count where they are contiguous
  AnyCache cache = {};
  const ForwardOptions& options;
  std::int32_t common_prefix_len = 0;  ///< of a cascade
};
[[nodiscard]] AddResults capture_attention(const CapturedAttention& call);

/// Where a write's slots lie on the device: num_tokens int64 from `offset_bytes` on.
struct SlotSource {
  cl_mem buffer = nullptr;
  std::size_t offset_bytes = 0;
  std::int64_t num_tokens = 0;
};

/// A reshape_and_cache_flash() or reshape_and_cache() before it runs.
struct CapturedCacheWrite {
  cl_command_queue queue = nullptr;
  TensorRef key = {}, value = {};
  DType dtype = DType::kF16;
  AnyCache cache = {};
  SlotSource slots = {};
};
[[nodiscard]] AddResults capture_cache_write(const CapturedCacheWrite& call);

/// An MLAImpl::forward() before it runs. Its case has a request of one token for every query token,
/// so that directions and spans become lengths.
struct CapturedMLADecode {
  cl_command_queue queue = nullptr;
  const MLAConfig& config;
  const BatchRecord& batch;
  bool causal = true;
  const AttentionTensors& tensors;
  const MLACache& cache;
  float scale = 1;
};
[[nodiscard]] AddResults capture_mla_decode(const CapturedMLADecode& call);

/// What a concat_and_cache_mla() stores where, before it runs.
struct LatentWrite {
  TensorRef kv_c = {}, k_pe = {};
  DType dtype = DType::kF16;
  const MLACache& cache;
  SlotSource slots;
};
[[nodiscard]] AddResults capture_concat_and_cache_mla(cl_command_queue queue,
                                                      const LatentWrite& write);

/// A merge_attn_states() before it runs.
[[nodiscard]] AddResults capture_merge(cl_command_queue queue, const MergeAttnStates& config,
                                       const OutputWithLse& prefix, const OutputWithLse& suffix,
                                       const OutputWithLse& merged);

/// Writes a move_tokens() or move_tokens_mla() of one layer, before it runs.
[[nodiscard]] AddResults capture_move_tokens(cl_command_queue queue, AnyCache cache,
                                             const TokenMoves& moves);
/// Writes a copy_blocks() or copy_blocks_mla() of one layer, before it runs.
[[nodiscard]] AddResults capture_copy_blocks(cl_command_queue queue, AnyCache cache,
                                             std::span<const BlockPair> mapping);

/// Writes a gather_and_maybe_dequant_cache(), before it runs.
[[nodiscard]] AddResults capture_gather(cl_command_queue queue, const MLACache& cache,
                                        TensorRef destination, DType dtype,
                                        const MLAGather& gather);

/// A layer's calc_kv_scales(), before it runs. With use_mla, key is kv_c and value k_pe.
struct CapturedScales {
  cl_command_queue queue = nullptr;
  const AttentionConfig& config;
  TensorRef key, value, query;
  std::int64_t num_keys = 0, num_tokens = 0;
};
void capture_calc_kv_scales(const CapturedScales& call);

/// A swap_blocks() of one plane (keys, values or latent rows) before it runs: blocks as they lie,
/// because a swap moves them whole.
struct CapturedSwap {
  cl_command_queue queue = nullptr;
  std::string_view direction;
  DType dtype = DType::kF16;
  std::array<std::int64_t, 3> block_shape{};  ///< tokens, heads, elements
  std::span<const BlockPair> mapping;
  // Block b of the source begins at offset_bytes + b * block_stride of the one that is not null.
  cl_mem device = nullptr;
  const std::byte* host = nullptr;
  std::size_t offset_bytes = 0;
  std::int64_t block_stride = 0;
  std::int64_t source_blocks = 0, destination_blocks = 0;
};
void capture_swap_blocks(const CapturedSwap& call);

/// An advance_step_…() before it runs.
[[nodiscard]] AddResults capture_advance_step(cl_command_queue queue, const AdvanceStep& step);

}  // namespace clattn::detail
