#pragma once

#include <clattn/attention.hpp>
#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace CLATTN_API clattn {

class AttentionBackend;  // attention_backend.hpp

/// What the choice between one pass and a shared-prefix cascade depends on.
struct CascadeQuery {
  std::int32_t common_prefix_len = 0;             ///< tokens that all requests share at their start
  std::span<const std::int32_t> query_lens = {};  ///< [num_reqs]
  std::int32_t num_query_heads = 0;               ///< a multiple of num_kv_heads
  std::int32_t num_kv_heads = 0;                  ///< key/value heads
  bool use_alibi = false;                         ///< whether layers have ALiBi slopes
  bool use_sliding_window = false;                ///< whether layers have a window
  bool use_local_attention = false;               ///< whether layers are chunked-local
  std::int32_t num_sms = 0;                       ///< compute units of the device, >= 1
};

/// vLLM's heuristic: no for prefixes below 256 tokens, fewer than 8 requests, ALiBi, windows or
/// chunks; else yes, except that a batch of single tokens with several query heads per KV head
/// takes it only if the waves of 128-key tiles are fewer than those of split decoding.
bool use_cascade_attention(const CascadeQuery& query);

/// Why layers of this configuration cannot cascade, one sentence each; empty = they can. ALiBi,
/// windows, chunks and masks need a key's position in its request, which a level does not know.
/// Soft caps, scales, quantized caches and sinks cascade, and so do a batch's lists.
std::vector<std::string> validate_cascade_configuration(const AttentionConfig& config);

/// A layer for cascades: its kernels with and without its sinks, which join the denominator once,
/// in the last level. Immutable and thread-safe.
class CascadeImpl {
 public:
  /// Throws kUnsupported with the reasons of validate_cascade_configuration() or of the backend.
  CascadeImpl(const std::shared_ptr<Context>& context, const AttentionBackend& backend,
              const AttentionConfig& config);
  /// What it was made from.
  const AttentionConfig& config() const noexcept { return config_; }

 private:
  friend class MultiLevelCascadeAttentionWrapper;
  AttentionConfig config_;
  std::shared_ptr<const AttentionImpl> inner_;        ///< all levels but the last
  std::shared_ptr<const AttentionImpl> last_;         ///< of keys that all its queries see
  std::shared_ptr<const AttentionImpl> last_causal_;  ///< of keys that its queries stand among
};

/// One level of the keys in FlashInfer's form, host arrays: its sequence s holds the query tokens
/// qo_indptr[s] … qo_indptr[s + 1] - 1 and the pages paged_kv_indices[paged_kv_indptr[s]] …
/// paged_kv_indices[paged_kv_indptr[s + 1] - 1]. A prefix of all requests is one sequence of all
/// tokens. A sequence without pages is legal: the level adds nothing for its tokens.
struct CascadeLevel {
  std::span<const std::int32_t> qo_indptr = {};  ///< [num_seqs + 1], ends at the step's tokens
  std::span<const std::int32_t> paged_kv_indptr = {};         ///< [num_seqs + 1]
  std::span<const std::int32_t> paged_kv_indices = {};        ///< [>= paged_kv_indptr.back()]
  std::span<const std::int32_t> paged_kv_last_page_len = {};  ///< [num_seqs], 1 … block_size, 0
                                                              ///< for a sequence without pages
  bool causal = false;  ///< queries are the sequence's newest tokens; the last level only
};

/// Attention over keys that requests share in levels, such as a system prompt, then a document,
/// then each request's own tokens: every level is attended separately and merged into the levels
/// before (merge_attn_states), so that the result is attention over the levels' keys one after
/// another. A level's sequence reads its keys once for each tile of its query tokens, as many as
/// fill KernelInfo::block_rows with the heads of a KV head, whereas plain attention reads them at
/// least once per request. Levels round to `dtype` before they merge. vLLM and FlashInfer:
/// MultiLevelCascadeAttentionWrapper.
///
/// Not thread-safe; run() calls between two plan() calls must go to one in-order queue, in order.
class MultiLevelCascadeAttentionWrapper {
 public:
  /// `config` is that of the layers, as make_builder() takes it. Takes its memory here and at the
  /// first plan(), sized by options.limits, which bound every level: max_num_reqs its sequences,
  /// max_model_len their keys, max_num_batched_tokens the step. Partial results of all levels share
  /// one workspace. graph_batch_size must be 0; sequences may be in any order, whatever
  /// decode_threshold says. Throws as CascadeImpl does.
  MultiLevelCascadeAttentionWrapper(const std::shared_ptr<Context>& context,
                                    const AttentionBackend& backend, const AttentionConfig& config,
                                    std::int32_t num_levels, const BuilderOptions& options = {});
  MultiLevelCascadeAttentionWrapper(MultiLevelCascadeAttentionWrapper&&) noexcept;
  MultiLevelCascadeAttentionWrapper& operator=(MultiLevelCascadeAttentionWrapper&&) noexcept;
  ~MultiLevelCascadeAttentionWrapper();

  /// One upload per level. Throws kInvalidArgument naming level, sequence, field, value and legal
  /// range. Allocates nothing once warm.
  void plan(cl_command_queue queue, std::span<const CascadeLevel> levels);
  /// Writes output [num_tokens, num_heads, head_size], which must not overlap query (the same
  /// shape), and, if given, the LSE over all levels (FlashInfer returns none). Asynchronous:
  /// `event` completes with the last launch. `launches` gets one record per kernel; merges of
  /// levels, [num_tokens] groups, have no work_group_size. Throws as forward() does.
  void run(cl_command_queue queue, const CascadeImpl& impl, const AttentionTensors& tensors,
           const KVCache& cache, Event* event = nullptr,
           std::vector<LaunchRecord>* launches = nullptr) const;

 private:
  friend class CascadeAttention;
  struct Batch;
  struct Merge;
  void plan_batches(cl_command_queue queue);
  const AttentionImpl& layer_of(const CascadeImpl& impl, std::size_t level) const;
  void merge_level(cl_command_queue queue, const AttentionTensors& merged, Event* event,
                   std::vector<LaunchRecord>* launches) const;

  std::shared_ptr<Context> context_;  ///< outlives merge_
  std::unique_ptr<Merge> merge_;
  AttentionConfig config_;
  BatchLimits limits_;
  std::vector<Batch> batches_;  ///< a level each, as its builder takes it
  std::vector<std::unique_ptr<AttentionMetadataBuilder>> builders_;
  std::unique_ptr<AttentionMetadataBuilder> causal_builder_;  ///< of the last level
  std::vector<const AttentionMetadata*> metadata_;            ///< of the last plan(), a level each
  Buffer level_output_;            ///< [max tokens, num_heads, head_size]
  Buffer level_lse_, merged_lse_;  ///< f32 [max tokens, num_heads]
};

/// A batch whose requests start with the same tokens in the same pages, as a cascade of two levels:
/// the prefix as one sequence of all query tokens, then every request's own keys, causal. vLLM:
/// cascade_attention.
///
///     auto cascade = CascadeAttention(context, backend, config, options);
///     const auto layer = CascadeImpl(context, backend, config);
///     // every step for which builder->use_cascade_attention() says so:
///     const auto& metadata = cascade.build(queue, batch, common_prefix_len);
///     … impl->write_kv_cache(queue, key, value, cache, metadata) and
///       cascade.forward(queue, layer, {.query = q, .output = o}, cache) of every layer …
///
/// Threads and queues as MultiLevelCascadeAttentionWrapper.
class CascadeAttention {
 public:
  /// As MultiLevelCascadeAttentionWrapper's constructor, for two levels.
  CascadeAttention(const std::shared_ptr<Context>& context, const AttentionBackend& backend,
                   const AttentionConfig& config, const BuilderOptions& options = {});

  /// Plans both levels. `common_prefix_len` as in BuildOptions, but at least one page. What the
  /// batch says of directions, spans and trees holds in the second level, as every query token sees
  /// the whole prefix: a request with query tokens has no first key in it, and no node of a tree.
  /// The result is the second level's metadata: its slots are the step's. Throws what build()
  /// throws.
  const AttentionMetadata& build(cl_command_queue queue, const CommonAttentionMetadata& batch,
                                 std::int32_t common_prefix_len);
  /// As AttentionImpl::forward() of the whole batch; see MultiLevelCascadeAttentionWrapper::run().
  void forward(cl_command_queue queue, const CascadeImpl& impl, const AttentionTensors& tensors,
               const KVCache& cache, Event* event = nullptr,
               std::vector<LaunchRecord>* launches = nullptr) const;

 private:
  /// Writes the case; returns what adds the result to it.
  std::function<void()> capture(cl_command_queue queue, const CascadeImpl& impl,
                                const KVCache& cache, const AttentionTensors& tensors) const;

  MultiLevelCascadeAttentionWrapper levels_;
};

}  // namespace clattn
