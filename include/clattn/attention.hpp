#pragma once

#include <clattn/opencl.hpp>

#include <array>
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
#include <vector>

namespace clattn::detail {
struct PagedStepView;
}  // namespace clattn::detail

namespace CLATTN_API clattn {

struct CascadeQuery;  // cascade.hpp

/// The most bytes of partial results that a step may take, if the device can allocate that much;
/// work is cut more coarsely to stay below it (vLLM: FLASHINFER_WORKSPACE_BUFFER_SIZE, which is
/// allocated whole).
inline constexpr std::size_t kMaxWorkspaceBytes = std::size_t{256} << 20;

/// Device memory for counters and partial results, shared by launches and grown by the builders
/// that share it. Calls that use it must not overlap.
struct AttentionWorkspace {
  /// Counters, then tensor maps (how NVIDIA's copy engine finds keys and values; each launch writes
  /// its own before it reads), then partial results: LSE, accumulators.
  Buffer buffer;
  /// Counters are 0 between launches. They are used by kernels that take their work from a queue
  /// (CPUs) or merge splits themselves. Launches that overlapped on one workspace, or were aborted,
  /// leave other values; a new workspace is needed then.
  std::size_t counter_bytes = 0;
  std::size_t partial_lse2_bytes = 0;  ///< of the partial LSEs, base 2, after counters and maps
  bool counters_ready = false;         ///< they were set to 0; some kernels need none
};

/// How the steps of a builder are planned, and the most that they hold.
struct BuilderOptions {
  BatchLimits limits;                                 ///< the most that a step holds
  SplitPolicy split_policy = SplitPolicy::kBalanced;  ///< how keys are split
  std::int32_t num_splits = 0;        ///< force this many KV splits per query tile, 0 = planned
  std::int32_t decode_threshold = 1;  ///< most query tokens of a decode: 1 + speculative tokens
  /// > 0: every build() asks for the same launches, padded to what any batch of up to this many
  /// decodes (or fewer, see CommonAttentionMetadata::graph_pad_size) needs, so that a recorded step
  /// (graph.hpp) runs the next batch too. Other batches are refused. The memory never moves.
  std::int32_t graph_batch_size = 0;
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
  /// slot_mapping, common_prefix_len and update_block_table(). Each upload grows by 56 bytes per
  /// work item.
  bool device_seq_lens = false;
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
  /// Query tokens of the step.
  std::int32_t num_actual_tokens() const noexcept { return num_actual_tokens_; }
  /// The most query tokens of any request.
  std::int32_t max_query_len() const noexcept { return max_query_len_; }
  /// The most tokens of any request in the cache.
  std::int32_t max_seq_len() const noexcept { return max_seq_len_; }
  /// BuildOptions::common_prefix_len of the build.
  std::int32_t common_prefix_len() const noexcept { return common_prefix_len_; }
  /// What the library's own kernels are bound to; null for metadata of third-party backends.
  const detail::PagedStepView* step() const noexcept { return step_; }
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
  const detail::PagedStepView* step_ = nullptr;
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

/// Host arithmetic of a step plus one upload. Not thread-safe; one per KV cache group and stream of
/// steps.
class AttentionMetadataBuilder {
 public:
  virtual ~AttentionMetadataBuilder() = default;
  /// Validates the batch, plans the work and uploads everything by one non-blocking write to
  /// `queue` (in-order). Requests may come in any order, and results keep that order: the plan
  /// gives each request to the kernel for its query length. Allocates nothing once warm; throws
  /// kInvalidArgument naming request, field, value and legal range. The previous metadata becomes
  /// invalid; work already enqueued with it on the same queue stays correct.
  virtual const AttentionMetadata& build(cl_command_queue queue,
                                         const CommonAttentionMetadata& batch,
                                         Event* upload = nullptr,
                                         const BuildOptions& options = {}) = 0;
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

/// A kernel that an impl launches, for reports.
struct KernelInfo {
  std::string name;                  ///< variant, XNNPACK-style: what__how
  std::string role;                  ///< "decode", "prefill", "merge" or "cache"
  std::int32_t work_group_size = 0;  ///< work-items
  std::int32_t block_rows = 0;       ///< query rows (tokens x heads of a KV head) per work item
  std::int32_t block_kv = 0;         ///< keys per tile
  /// Whether probabilities are rounded to the queries' type before they meet V, as matrix units and
  /// products of bf16 pairs require; the other kernels keep them in f32.
  bool rounds_weights = false;
  std::int32_t concurrent_groups = 0;  ///< work-groups that the planner assumes to run at once
  /// Work items of up to so many query rows have costs of their own (`few:` rows of a tuning file);
  /// 0 = none have.
  std::int32_t few_rows = 0;
};

/// One launch of a forward(), for reports: which kernel ran over how many work-groups.
struct LaunchRecord {
  std::string_view kernel;  ///< KernelInfo::name; valid while the impl lives
  /// Tasks that the groups share: as many as groups, or more if groups are persistent.
  std::int64_t tasks = 0;
  std::int64_t work_groups = 0;      ///< groups that were launched
  std::int32_t work_group_size = 0;  ///< work-items
  bool rounds_weights = false;       ///< see KernelInfo
  bool multiplies_fp8 = false;       ///< as AttentionConfig::fp8_products says
  Event event;                       ///< completes with the launch
  bool beside_last = false;          ///< it runs beside the launch before it, not after it
};

/// The tensors of a forward(), each of the shape that the function gives.
struct AttentionTensors {
  TensorRef query = {};   ///< of the step's tokens
  TensorRef key = {};     ///< where the call has keys of its own
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
  /// position of its request; joins causality, window and chunk. Required if and only if the
  /// configuration says custom_mask. custom_mask.hpp and paged_bias.hpp make such masks on the
  /// host.
  cl_mem custom_mask = nullptr;
  std::int64_t custom_mask_stride = 0;  ///< bytes from token to token, >= the longest seq_len
  /// u8 [num_actual_tokens, num_heads, output_head_size()]: fp8 e4m3 of output / output_scale[0],
  /// from the unrounded output. Both required if and only if the configuration says output_fp8.
  cl_mem output_fp8 = nullptr;
  cl_mem output_scale = nullptr;  ///< f32 [1]
  /// For Attention::forward() only: rows of the output, and of an output_fp8, padding included;
  /// those that belong to no token are zeroed. 0 = the metadata's num_actual_tokens.
  std::int64_t num_rows = 0;
  /// For Attention::forward() only: false while profiling. While a step is recorded, no scales are
  /// calculated either.
  bool enable_kv_scales_calculation = true;
};

/// A backend or a kernel that was considered for a layer, and what became of it.
struct Candidate {
  std::string role;         ///< "backend", or a kernel's, as KernelInfo::role
  std::string name;         ///< of the backend or the kernel
  bool chosen = false;      ///< whether the layer runs on it
  std::string reason = {};  ///< why it was not chosen; otherwise empty, or "tuned"
};
/// A line for each, in columns.
std::string to_string(std::span<const Candidate> candidates);

/// One launch of a forward() as the step's plan has it, in the order of the launches.
struct PlannedLaunch {
  std::string kernel;            ///< KernelInfo::name
  std::int64_t items = 0;        ///< work items (a tile or split each); for a merge, query tokens
  std::int64_t tasks = 0;        ///< as LaunchRecord::tasks; for a merge, heads times query tokens
  std::int64_t split_tiles = 0;  ///< tiles whose keys are split
  std::int64_t splits = 0;       ///< their splits; for a merge, partial rows to merge
  std::int32_t concurrent_groups = 0;  ///< work-groups assumed to run at once; 0 for a merge
  double predicted_us = 0;             ///< when it runs in a queue of launches
  bool beside_last = false;            ///< it runs beside the launch before it, not after it
};
/// The launches of a step's plan, each with the time predicted from the costs of the tuning
/// database (docs/performance.md). Empty if the metadata has no plan of this library. The metadata
/// must be the last that its builder made.
std::vector<PlannedLaunch> planned_launches(const AttentionMetadata& metadata);

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
  /// num_heads, kv_lora_rank] (MLAImpl::forward() says what is computed). `lse`, if given, receives
  /// f32 [num_actual_tokens, num_heads]: the natural log of the softmax denominator, -inf where a
  /// query sees no key (its output is 0). `output` must overlap no other tensor of the call.
  /// Asynchronous.
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
  /// Throws what write_kv_cache(), if there is a key, and forward() would throw for these
  /// arguments; under contiguous_kv() what forward_encoder() would, without looking at `cache`.
  /// Enqueues and changes nothing, allocates nothing. Backends that do not override it check
  /// nothing.
  virtual void check_forward(cl_command_queue, const AttentionTensors&, const KVCache&,
                             const AttentionMetadata&, const ForwardOptions& = {}) const {}
  /// write_kv_cache(), if there is a key, then forward(); under contiguous_kv() forward_encoder().
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
  virtual std::vector<Candidate> candidates() const { return {}; }
};

/// A page size that a backend's kernels take: exactly `size` tokens, or every multiple of it.
struct SupportedBlockSize {
  std::int32_t size = 1;  ///< tokens
  bool multiples = true;  ///< whether multiples of size are taken, too
  bool operator==(const SupportedBlockSize&) const = default;
};

/// Where a backend comes from (vLLM: full_cls_name).
struct BackendOrigin {
  std::string library;  ///< path of the plugin; empty = linked into the process
  std::string symbol;   ///< the plugin's entry point; for others the backend's name
};

/// A registry entry: capability predicates, cache shape and the factory of its collaborators.
/// Immutable and thread-safe. Made by std::make_shared, so that shared_from_this() keeps one beyond
/// its registration.
class AttentionBackend : public std::enable_shared_from_this<AttentionBackend> {
 public:
  AttentionBackend() = default;
  AttentionBackend(const AttentionBackend&) = delete;
  AttentionBackend& operator=(const AttentionBackend&) = delete;
  virtual ~AttentionBackend() = default;
  /// Upper-case identifier, unique in the registry.
  virtual std::string_view name() const noexcept = 0;
  /// Where the backend was found, for messages and logs.
  virtual BackendOrigin full_cls_name() const { return {{}, std::string(name())}; }
  /// Whether it takes configurations with use_mla, and only those; its caches hold one latent row
  /// per token instead of K and V.
  virtual bool is_mla() const noexcept { return false; }
  /// Whether forward() writes to the caller's tensor instead of making one.
  virtual bool accept_output_buffer() const noexcept { return true; }
  /// Why this configuration cannot run here, one sentence each; empty = it can. `capabilities` may
  /// be null: then only the configuration is judged.
  virtual std::vector<std::string> validate_configuration(
      const AttentionConfig& config, const DeviceCapabilities* capabilities) const = 0;

  /// vLLM's capability predicates: what validate_configuration() says about one field when this
  /// backend supports all the others. Empty = supported.
  ///@{
  std::vector<std::string> supports_head_size(std::int32_t head_size) const;
  std::vector<std::string> supports_dtype(DType dtype) const;
  std::vector<std::string> supports_kv_cache_dtype(std::optional<DType> kv_cache_dtype) const;
  std::vector<std::string> supports_block_size(std::int32_t block_size) const;
  std::vector<std::string> supports_attn_type(AttentionType attn_type) const;
  std::vector<std::string> supports_sink() const;
  std::vector<std::string> supports_alibi() const;
  std::vector<std::string> supports_logits_soft_cap() const;
  std::vector<std::string> supports_sliding_window() const;
  std::vector<std::string> supports_mla() const;
  std::vector<std::string> supports_non_causal() const;
  std::vector<std::string> supports_batch_invariance() const;
  std::vector<std::string> supports_per_head_quant_scales() const;
  std::vector<std::string> supports_mm_prefix() const;
  std::vector<std::string> supports_kv_connector() const;
  std::vector<std::string> supports_pcp() const;
  std::vector<std::string> supports_device(const DeviceCapabilities& capabilities) const;
  ///@}
  /// Every head size from 1 to 1024 that supports_head_size() takes.
  std::vector<std::int32_t> get_supported_head_sizes() const;
  /// Every type of query and output that supports_dtype() takes.
  std::vector<DType> get_supported_dtypes() const;
  /// Throws kUnsupported with the reasons of supports_head_size(), if there are any.
  void validate_head_size(std::int32_t head_size) const;

  /// The page sizes, in tokens, that its kernels read; an allocator's larger blocks consist of
  /// several such pages (map_to_kernel_blocks()).
  virtual std::vector<SupportedBlockSize> get_supported_kernel_block_sizes() const {
    return {SupportedBlockSize{}};
  }
  /// What AttentionState can record for this backend's layers. kUniformBatch here means more than
  /// vLLM's: requests of a recorded step may differ in their query tokens, up to decode_threshold.
  virtual AttentionCGSupport graph_support() const noexcept { return AttentionCGSupport::kNever; }
  /// Logical shape of one layer's cache. MLA backends: (1, num_blocks, block_size, 1, head_size),
  /// which is the memory of vLLM's (num_blocks, block_size, head_size).
  virtual std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t num_blocks,
                                                         std::int32_t block_size,
                                                         std::int32_t num_kv_heads,
                                                         std::int32_t head_size) const = 0;
  /// Which logical dimension stands at each place in memory, slowest first; for kHDN, that of V.
  /// Throws kUnsupported for a layout that is not among supported_layouts().
  virtual std::array<std::int32_t, 5> get_kv_cache_stride_order(KVCacheLayout layout) const = 0;
  /// The logical dimension that holds K (0) and V (1); of size 1 where one row is both (MLA).
  virtual std::int32_t kv_dimension() const noexcept = 0;
  /// The layouts that get_kv_cache_stride_order() takes; the span is valid as long as the backend.
  virtual std::span<const KVCacheLayout> supported_layouts() const noexcept = 0;
  /// Why caches of `layout` do not serve layers of this configuration here, one sentence each;
  /// empty = they do. `capabilities` may be null: then the device is not judged.
  std::vector<std::string> validate_layout(KVCacheLayout layout, const AttentionConfig& config,
                                           const DeviceCapabilities* capabilities) const;
  /// The one layout that works, or nullopt when there is a choice.
  std::optional<KVCacheLayout> get_required_kv_cache_layout() const {
    const auto layouts = supported_layouts();
    return layouts.size() == 1 ? std::optional(layouts.front()) : std::nullopt;
  }
  /// The layout that is fastest on this device.
  virtual KVCacheLayout preferred_layout(const DeviceCapabilities& capabilities) const noexcept = 0;
  /// The kernels of a configuration, compiled, which takes seconds at first use, or taken from the
  /// program cache. Layers of one configuration can share it. Throws kUnsupported with the reasons
  /// of validate_configuration(), and kOpenCL if the driver builds none of the kernels.
  virtual std::shared_ptr<const AttentionImpl> make_impl(std::shared_ptr<Context> context,
                                                         const AttentionConfig& config) const = 0;
  /// Plans steps for layers of this configuration; takes device memory at its first build(). Throws
  /// what make_impl() throws, and kInvalidArgument for options out of range.
  virtual std::unique_ptr<AttentionMetadataBuilder> make_builder(
      std::shared_ptr<Context> context, const AttentionConfig& config,
      const BuilderOptions& options = {}) const = 0;
};

/// The registered backends at one moment, in priority order. Keeps them alive, whatever the
/// registry does meanwhile.
class BackendList {
 public:
  /// In priority order.
  using Entries = std::vector<std::shared_ptr<const AttentionBackend>>;
  /// Takes its entries as they are.
  explicit BackendList(Entries entries);
  /// Of pointers, in priority order.
  auto begin() const noexcept { return pointers_.begin(); }
  /// As begin().
  auto end() const noexcept { return pointers_.end(); }
  /// Number of backends.
  std::size_t size() const noexcept { return pointers_.size(); }
  /// Throws std::out_of_range past the end.
  const AttentionBackend* operator[](std::size_t i) const { return pointers_.at(i); }

 private:
  Entries entries_;
  std::vector<const AttentionBackend*> pointers_;
};

/// A snapshot of the registry. The first call of the process loads the plugins of CLATTN_PLUGINS
/// and throws what load_backend_plugin() throws. Thread-safe.
BackendList list_attn_backends();

/// The registered backend of this name. Also accepts vLLM's names for the built-in ones
/// (XFORMERS_VLLM_V1, class paths). Throws kInvalidArgument listing the registered names for any
/// other; for vLLM's name of another library's backend (FLASH_ATTN) the message also says which
/// backend computes the same here.
std::shared_ptr<const AttentionBackend> find_attn_backend(std::string_view name);

/// What the selector decided and why the others were passed over.
struct BackendChoice {
  std::shared_ptr<const AttentionBackend> backend;  ///< null when every backend was rejected
  /// A backend and why it cannot serve the configuration, one sentence each.
  struct Rejection {
    std::string name;                  ///< AttentionBackend::name()
    std::vector<std::string> reasons;  ///< at least one
  };
  std::vector<Rejection> rejected;  ///< in the order in which they were asked
};

/// Asks every backend in order; the first without reasons wins. Never throws for an unsupported
/// configuration.
BackendChoice choose_attn_backend(const AttentionConfig& config,
                                  const DeviceCapabilities* capabilities);

/// The backend for a configuration. `name` (or, when empty, the environment's CLATTN_BACKEND)
/// forces one; it is looked up, and refused if unknown, by find_attn_backend(). A forced backend
/// that does not fit throws kUnsupported with its reasons. "auto" and "" choose. An attention-free
/// configuration gets NO_ATTENTION, whatever is forced. The reference is valid until
/// unregister_backend(); its shared_from_this() keeps the backend for longer.
const AttentionBackend& get_attn_backend(const AttentionConfig& config,
                                         const DeviceCapabilities* capabilities,
                                         std::string_view name = {});

/// vLLM's form, judged without a device: the backend for layers of this kind, whatever their head
/// counts. Remembers its answers until the registry changes.
const AttentionBackend& get_attn_backend(std::int32_t head_size, DType dtype,
                                         std::optional<DType> kv_cache_dtype,
                                         std::int32_t block_size, bool is_attention_free = false,
                                         bool use_mla = false, bool has_sink = false);

/// One layer's zeroed cache of `num_blocks` pages, in that layout (nullopt = the backend's
/// preferred one): the short form of allocate_kv_cache and reshape_kv_cache. Throws kUnsupported
/// with the reasons of validate_layout(), if there are any.
KVCache make_kv_cache(const Context& context, cl_command_queue queue,
                      const AttentionBackend& backend, const AttentionConfig& config,
                      std::int64_t num_blocks, std::optional<KVCacheLayout> layout = std::nullopt);

}  // namespace clattn
