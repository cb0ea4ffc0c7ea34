#pragma once

#include <clattn/opencl.hpp>

#include <clattn/attention_config.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace CLATTN_API clattn {

struct Candidate;     // explain.hpp
struct CascadeQuery;  // cascade.hpp
struct KernelInfo;    // explain.hpp
struct LaunchRecord;  // explain.hpp

/// The most bytes of partial results that a step may take, if the device can allocate that much;
/// work is cut more coarsely to stay below it (vLLM: FLASHINFER_WORKSPACE_BUFFER_SIZE, which is
/// allocated whole).
inline constexpr std::size_t kMaxWorkspaceBytes = std::size_t{256} << 20;

/// Device memory for counters and partial results, shared by launches and grown by the builders
/// that share it. Calls that use it must not overlap.
struct AttentionWorkspace {
  /// Counters, then tensor maps (how NVIDIA's copy engine finds keys and values; each launch writes
  /// its own before it reads), then partial results: LSE, accumulators.
  Buffer buffer = {};
  /// Counters are 0 between launches. They are used by kernels that take their work from a queue
  /// (CPUs) or merge splits themselves. Launches that overlapped on one workspace, or were aborted,
  /// leave other values; a new workspace is needed then.
  std::size_t counter_bytes = 0;
  std::size_t partial_lse2_bytes = 0;  ///< of the partial LSEs, base 2, after counters and maps
  bool counters_ready = false;         ///< they were set to 0; some kernels need none
};

/// How the steps of a builder are planned, and the most that they hold.
struct BuilderOptions {
  BatchLimits limits = {};                            ///< the most that a step holds
  SplitPolicy split_policy = SplitPolicy::kBalanced;  ///< how keys are split
  std::int32_t num_splits = 0;        ///< force this many KV splits per query tile, 0 = planned
  std::int32_t decode_threshold = 1;  ///< most query tokens of a decode: 1 + speculative tokens
  /// > 0: every build() asks for the same launches, padded to what any batch of up to this many
  /// decodes (or fewer, see CommonAttentionMetadata::graph_pad_size) needs, so that a recorded step
  /// (graph.hpp) runs the next batch too. Other batches are refused. The memory never moves.
  std::int32_t graph_batch_size = 0;
  /// With graph_batch_size, which then counts query tokens, as does graph_pad_size: a recorded step
  /// runs any batch of at most that many, prompts, chunks, decodes and drafts together, whose
  /// number of requests exceeds neither that nor limits.max_num_reqs (vLLM:
  /// AttentionCGSupport.ALWAYS). Every kernel that such a batch may need is launched. For causal
  /// decoders only.
  bool graph_mixed = false;
  /// Shared by builders whose forward() calls run in order on one queue and whose build() calls do
  /// not overlap: memory for the largest of them instead of the sum. Null = the builder's own.
  std::shared_ptr<AttentionWorkspace> workspace = nullptr;
  /// use_cascade_attention() always says no, because some layer that shares the metadata cannot
  /// cascade. The name is that of vLLM's model configuration; init_attn_backend() sets it for such
  /// groups.
  bool disable_cascade_attn = false;
  /// The lengths of a step are known on the device alone: the seq_lens of a batch are upper bounds,
  /// whose pages its block table names, and update_seq_lens() (cache_ops.hpp) puts the lengths in
  /// their place. Decoders over pages, of latent rows too, are supported, without
  /// slot_mapping, common_prefix_len, update_block_table() and, in layers with use_spans, spans.
  /// Other lists of a batch count with the lengths of the device: trees and canvases from their
  /// ends, first and kept keys from their beginnings. Each upload grows by 60 bytes per work item.
  bool device_seq_lens = false;
  /// With device_seq_lens: the query lengths of decodes are known on the device alone, too. Every
  /// request that the batch gives up to decode_threshold query tokens may have any number up to it
  /// (vLLM: device-CPU query lens mismatch, which adaptive verification needs), and
  /// update_query_lens() says which. The batch's query_start_loc is exact for the longer requests,
  /// the prefills; decodes that stand between them share the rows that it gives them together.
  /// Partial results get room for decode_threshold rows of each request. kUnsupported if
  /// max_num_reqs times decode_threshold rows exceed what kMaxWorkspaceBytes holds.
  bool device_query_lens = false;
  /// Which lists of a step's requests only the device knows; update_lists() (cache_ops.hpp) puts
  /// them in place. The plan has room for whatever they may say, so that no launch changes. For
  /// decoders with use_directions or use_trees; both at once are refused, and so are trees with
  /// device_query_lens. Uploads grow by 24 bytes for each listed row, by 32 for each request.
  ///@{
  /// `direction`, which a batch then leaves empty (vLLM: a tensor as `causal`). Requests of several
  /// query tokens are planned as if each of them saw all keys that a canvas sees; none has a tree.
  bool device_directions = false;
  /// The trees: a batch's tree_start_loc says how many nodes the tree of a request has at most, 0
  /// that it has none, and tree_parents is empty.
  bool device_trees = false;
  ///@}
  /// If a step has exactly two launches, and the plan predicts that they end earlier beside each
  /// other, each gets a part of the device. The second goes to an in-order queue of the builder's
  /// own: it waits for what the caller's queue held before, and later work of the caller's queue
  /// waits for both. Only for kernels with persistent work-groups; not for recorded steps or
  /// device_seq_lens. Results may differ in their last bits from those of launches in turn.
  bool side_by_side = true;
};

/// One step's device metadata, made by a builder and valid until its next build(). forward() calls
/// that share one must run in order (one in-order queue): they share its workspace for partial
/// results.
class AttentionMetadata {
 public:
  virtual ~AttentionMetadata() = default;
  /// Name of the backend whose builder made it; empty for builders outside the registry.
  std::string_view backend() const noexcept { return backend_; }
  /// How many requests and tokens are decodes (at most decode_threshold query tokens) and prefills,
  /// whatever the order of the requests.
  const BatchSplit& split() const noexcept { return split_; }
  /// Query tokens of the step, without padding.
  std::int32_t num_actual_tokens() const noexcept { return num_actual_tokens_; }
  /// The most query tokens of any request.
  std::int32_t max_query_len() const noexcept { return max_query_len_; }
  /// The most tokens of any request in the cache.
  std::int32_t max_seq_len() const noexcept { return max_seq_len_; }
  /// BuildOptions::common_prefix_len of the build.
  std::int32_t common_prefix_len() const noexcept { return common_prefix_len_; }
  /// What the library's own kernels are bound to, for its sources, which define it. Null for
  /// metadata of third-party backends.
  auto step() const noexcept;
  /// The step's slots, int64, on the device, from slot_mapping_offset_bytes() on. The builder owns
  /// the buffer.
  cl_mem slot_mapping_buffer() const noexcept { return slot_buffer_; }
  /// Bytes before the first slot.
  std::size_t slot_mapping_offset_bytes() const noexcept { return slot_offset_bytes_; }
  /// The host's copy, [num_actual_tokens]; in recorded steps padded with kPadSlotId. In eager steps
  /// of cross attention it has as many slots as the batch gave.
  std::span<const std::int64_t> slot_mapping() const noexcept { return slots_; }
  /// Throws kInvalidArgument naming this metadata's backend and `wanted`, the legal one.
  [[noreturn]] void throw_not_of(std::string_view wanted) const;

 protected:
  /// What the functions of the same names return.
  ///@{
  std::string_view backend_;
  BatchSplit split_;
  std::int32_t decodes_at_ = 0;   ///< index of the first decode; -1 if interleaved with prefills
  std::int32_t prefills_at_ = 0;  ///< index of the first prefill; -1 as decodes_at_
  std::int32_t num_actual_tokens_ = 0;
  std::int32_t max_query_len_ = 0;
  std::int32_t max_seq_len_ = 0;
  std::int32_t common_prefix_len_ = 0;
  cl_mem slot_buffer_ = nullptr;
  std::size_t slot_offset_bytes_ = 0;
  std::span<const std::int64_t> slots_;
  const void* step_ = nullptr;
  ///@}
};

/// The metadata as its backend's own class, FlashInferMetadata or XFormersMetadata (vLLM:
/// get_metadata_cls). Throws kInvalidArgument naming both backends if another one made it.
template <typename Metadata>
const Metadata& metadata_as(const AttentionMetadata& metadata) {
  const auto* const own = dynamic_cast<const Metadata*>(&metadata);
  if (own == nullptr) metadata.throw_not_of(Metadata::kBackend);
  return *own;
}

/// What a caller may say about one build().
struct BuildOptions {
  /// Tokens at the start of every request with query tokens that are computed already and lie in
  /// the same pages: a multiple of block_size, 0 = none known. Checked against lengths and block
  /// table, and kept in the metadata. forward() computes the same with and without;
  /// CascadeAttention (cascade.hpp) reads such a prefix once for all requests.
  std::int32_t common_prefix_len = 0;
  /// Cheap metadata before fast kernels, for metadata that few layers use (a draft model's): keys
  /// are not split and items keep the batch's order, so a plan is one walk over the tiles, without
  /// partial results to merge. Takes about a quarter off the host's time for 64 to 256 requests;
  /// long contexts of few requests then leave compute units idle. Without effect where cuts are not
  /// searched for: num_splits given or SplitPolicy::kDeterministic.
  bool fast_build = false;
};

/// Host arithmetic of a step plus one upload. One per KV cache group and stream of steps, for one
/// thread at a time: build() and update_block_table() throw kInvalidArgument while another thread
/// is in one of them.
class AttentionMetadataBuilder {
 public:
  virtual ~AttentionMetadataBuilder() = default;
  /// Validates the batch, plans the work and uploads everything by one non-blocking write to
  /// `queue` (in-order). Requests may come in any order, and results keep that order: the plan
  /// gives each request to the kernel for its query length. Never waits for the queue: where all
  /// staging memory still waits to be uploaded, it takes more, which it keeps (three times the
  /// largest step at first). Allocates nothing else once warm; throws kInvalidArgument naming
  /// request, field, value and legal range. The previous metadata becomes invalid; work already
  /// enqueued with it on the same queue stays correct. Destruction waits for uploads under way.
  ///
  /// Block-table entries of pages that end before the first key that a query token of the request
  /// sees, by its window, chunk, spans and first_keys, are not read, so that freed blocks may be
  /// there as -1 or any id; the page lists of the metadata have 0 there. With device_seq_lens every
  /// page counts, since a length below its bound sees earlier keys.
  virtual const AttentionMetadata& build(cl_command_queue queue,
                                         const CommonAttentionMetadata& batch,
                                         Event* upload = nullptr,
                                         const BuildOptions& options = {}) = 0;
  /// The build() of a draft model's step, with BuildOptions::fast_build: metadata that few layers
  /// use must cost the host little. Where one request has a long context, build() may be faster.
  const AttentionMetadata& build_for_drafting(cl_command_queue queue,
                                              const CommonAttentionMetadata& batch,
                                              Event* upload = nullptr) {
    return build(queue, batch, upload, {.fast_build = true});
  }
  /// Whether update_block_table() is supported.
  virtual bool supports_update_block_table() const noexcept { return false; }
  /// What build() would make of `metadata`'s batch with another block table and other slots, for
  /// the step's further KV cache groups: the plan is taken over instead of being made again, and
  /// `metadata` stays valid. It must come from another builder with this one's configuration and
  /// options (num_blocks aside) that has not built since. Throws what build() throws; kUnsupported
  /// by default.
  virtual const AttentionMetadata& update_block_table(cl_command_queue queue,
                                                      const AttentionMetadata& metadata,
                                                      const GroupPages& pages,
                                                      Event* upload = nullptr);
  /// Exactly the bytes of partial results in device workspace that build() would use for this batch
  /// without fast_build; counters add 4 bytes per partial row and head plus 64, tensor maps 256.
  virtual std::size_t workspace_bytes(const CommonAttentionMetadata& batch) const = 0;
  /// Whether a recorded step of this builder can run the batch (vLLM: can_run_in_cudagraph).
  virtual bool can_run_in_graph(const CommonAttentionMetadata& batch) const = 0;
  /// Whether a step with this prefix is faster as a CascadeAttention: the heuristic of cascade.hpp,
  /// and false for layers and backends that do not cascade and with
  /// BuilderOptions::disable_cascade_attn.
  virtual bool use_cascade_attention(const CascadeQuery&) const { return false; }
  /// vLLM's reorder_batch: the order that brings decodes first. Returns whether anything moves.
  virtual bool reorder_batch(std::span<const std::int32_t> num_scheduled_tokens,
                             std::span<std::int32_t> order) const = 0;
  /// The most query tokens that a request may have to count as a decode.
  virtual std::int32_t decode_threshold() const noexcept = 0;
  /// Launches the kernel of update_seq_lens() once without work and waits, so that no later call
  /// has to wait for the compiler; does nothing without BuilderOptions::device_seq_lens. The
  /// layer's kernels are AttentionImpl::warm_up()'s part. Throws kUnsupported for a queue that is
  /// being recorded.
  virtual void warm_up(cl_command_queue) {}
  /// From the next build() on, partial results go to `workspace`, as with
  /// BuilderOptions::workspace. Throws kInvalidArgument if it is null, and kUnsupported if the
  /// builder records launches (graph_batch_size) or, as this default does, has no workspace.
  virtual void set_workspace_buffer(std::shared_ptr<AttentionWorkspace> workspace);
};

/// The tensors of a forward(), each of the shape that the function gives.
struct AttentionTensors {
  TensorRef query = {};   ///< of the step's tokens
  TensorRef key = {};     ///< what forward() stores, or forward_encoder() attends to
  TensorRef value = {};   ///< as key
  TensorRef output = {};  ///< as many rows; overlaps no other tensor
  cl_mem lse = nullptr;   ///< f32, or null: not wanted
};

/// What a forward() takes beyond its tensors.
struct ForwardOptions {
  /// Completes with the last kernel. Its duration is no kernel's where two launches run beside each
  /// other.
  Event* event = nullptr;
  std::vector<LaunchRecord>* launches = nullptr;  ///< cleared, then one record per kernel
  /// u8 [num_actual_tokens, custom_mask_stride], 1 = the token may attend to the key at that
  /// position of its request; joins causality, window, chunk and the lists of the batch. Required
  /// if and only if the configuration says custom_mask.
  cl_mem custom_mask = nullptr;
  std::int64_t custom_mask_stride = 0;  ///< bytes from token to token, >= the longest seq_len
  /// u8 [num_actual_tokens, num_heads, output_head_size()]: fp8 e4m3 of output / output_scale[0],
  /// from the unrounded output. Both required if and only if the configuration says output_fp8.
  cl_mem output_fp8 = nullptr;
  cl_mem output_scale = nullptr;  ///< f32 [1]
  /// For Attention::forward() only: rows of the output, and of an output_fp8, padding included;
  /// those that belong to no token are zeroed. 0 = the metadata's num_actual_tokens; refused where
  /// there is no metadata.
  std::int64_t num_rows = 0;
  /// For Attention::forward() only: false while profiling. While a step is recorded, no scales are
  /// calculated either.
  bool enable_kv_scales_calculation = true;
};

/// One layer configuration, compiled. Immutable and thread-safe; layers with equal configurations
/// share one.
class AttentionImpl {
 public:
  virtual ~AttentionImpl() = default;
  /// What it was made from.
  virtual const AttentionConfig& config() const noexcept = 0;
  /// Stores the step's keys and values in the cache at the metadata's slots; those that are
  /// kPadSlotId store nothing, and `key` and `value` may end after the last row that is stored.
  /// With use_mla `key` is kv_c, [num_actual_tokens, kv_lora_rank], and `value` k_pe,
  /// [num_actual_tokens, rope_dim]. In cross attention both have one row per slot of the batch.
  /// Asynchronous. Throws kInvalidArgument for metadata without slots: cross attention's, unless
  /// its batch came with a slot_mapping.
  virtual void write_kv_cache(cl_command_queue queue, TensorRef key, TensorRef value,
                              const KVCache& cache, const AttentionMetadata& metadata,
                              Event* event = nullptr) const = 0;
  /// output[t, h, :] = attention of query token t over its request's pages; shapes
  /// [num_actual_tokens, num_heads, head_size], of the output with use_mla [num_actual_tokens,
  /// num_heads, kv_lora_rank] (MLAImpl::forward() says what is computed). `key` and `value`, if
  /// given, are stored first, as write_kv_cache() does; a refused call has stored nothing. `lse`,
  /// if given, receives f32 [num_actual_tokens, num_heads]: the natural log of the softmax
  /// denominator, -inf where a query sees no key (its output is 0). `output` must overlap no other
  /// tensor of the call. Values are summed before they are divided by the denominator, so that
  /// values of almost FLT_MAX over the number of equal keys overflow. Asynchronous.
  virtual void forward(cl_command_queue queue, const AttentionTensors& tensors,
                       const KVCache& cache, const AttentionMetadata& metadata,
                       const ForwardOptions& options = {}) const = 0;
  /// As forward() for configurations with contiguous_kv(), over `key`, [tokens, num_kv_heads,
  /// head_size], and `value`, [tokens, num_kv_heads, output_head_size()], instead of a cache:
  /// request r's from row key_start_loc[r] on (CommonAttentionMetadata). If both are of one size,
  /// they have one token_stride. `output` has output_head_size() elements a head. Bidirectional,
  /// except that encoder_only follows the batch's `causal`. Throws kUnsupported under others.
  virtual void forward_encoder(cl_command_queue queue, const AttentionTensors& tensors,
                               const AttentionMetadata& metadata,
                               const ForwardOptions& options = {}) const = 0;
  /// Throws what forward() would throw for these arguments; under contiguous_kv() what
  /// forward_encoder() would, without looking at `cache`.
  /// Enqueues and changes nothing, allocates nothing. Backends that do not override it check
  /// nothing.
  virtual void check_forward(cl_command_queue, const AttentionTensors&, const KVCache&,
                             const AttentionMetadata&, const ForwardOptions& = {}) const {}
  /// forward(), or under contiguous_kv() forward_encoder().
  /// For arguments that have passed check_forward(), whose checks need not be repeated.
  virtual void forward_checked(cl_command_queue queue, const AttentionTensors& tensors,
                               const KVCache& cache, const AttentionMetadata& metadata,
                               const ForwardOptions& options = {}) const;
  /// Launches each kernel that the calls above can need once, over no token and in memory of its
  /// own, and waits, so that what a driver leaves to a kernel's first launch (PoCL compiles it
  /// then) does not delay the first step (vLLM: compile_or_warm_up_model). One call per
  /// configuration is enough. Backends that do not override it do nothing.
  virtual void warm_up(cl_command_queue) const {}
  /// The kernels that its calls launch.
  virtual std::vector<KernelInfo> kernels() const = 0;
  /// Every kernel of the roles that it needs, chosen or not. Empty for third-party backends.
  virtual std::vector<Candidate> candidates() const;
};

}  // namespace clattn
