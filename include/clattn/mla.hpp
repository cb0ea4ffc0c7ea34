#pragma once

#include <clattn/opencl.hpp>

#include <clattn/attention.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

/// The cache of one multi-head latent attention layer: [num_blocks, block_size, kv_lora_rank +
/// rope_dim], contiguous; an entry is a token's latent vector followed by its rotary key part.
struct MLACache {
  Buffer buffer = {};             ///< kept alive by every copy of this struct
  DType dtype = DType::kF16;      ///< as stored
  std::int64_t num_blocks = 0;    ///< pages
  std::int32_t block_size = 0;    ///< tokens per block, >= 1
  std::int32_t kv_lora_rank = 0;  ///< elements of the latent part
  std::int32_t rope_dim = 0;      ///< elements of the rotary part
  /// Quantized types only: f32 [1] on the device, real = stored * scale. Empty = 1, except that
  /// int8 requires a scale: with 1 it could hold whole numbers only.
  Buffer scale = {};
};

/// The cache of a layer with AttentionConfig::use_mla as the calls here and copy_blocks_mla() take
/// it, the same memory; K's scale is the row's. Throws kInvalidArgument unless it has one KV head,
/// its rows lie without gaps and `rope_dim` is a multiple of 8 below the row's size.
MLACache make_mla_cache(const KVCache& cache, std::int32_t rope_dim);

/// Stores kv_c[i] [kv_lora_rank] followed by k_pe[i] [rope_dim] at slot_mapping[i] (block *
/// block_size + offset; negative or past the cache = do not store) for i < num_tokens, divided by
/// the cache's scale where it is quantized, converting `dtype` to the cache's type.
/// `slot_mapping` holds int64 at byte offset `slot_offset_bytes`. Both widths are multiples of 8.
/// Throws kInvalidArgument unless the buffers of `kv_c`, `k_pe` and `slot_mapping` hold num_tokens
/// rows. Asynchronous; if two tokens have the same slot, which of them is stored is undefined.
/// vLLM: concat_and_cache_mla.
void concat_and_cache_mla(const Context& context, cl_command_queue queue, TensorRef kv_c,
                          TensorRef k_pe, DType dtype, const MLACache& cache, cl_mem slot_mapping,
                          std::size_t slot_offset_bytes, std::int64_t num_tokens,
                          Event* event = nullptr);

/// Which tokens of a latent cache to gather; host memory, read before the call returns.
struct MLAGather {
  std::span<const std::int32_t> cu_seq_lens = {};  ///< [num_reqs + 1], prefix sums of the tokens
  std::span<const std::int32_t> block_table = {};  ///< [num_reqs, block_table_stride]
  std::int64_t block_table_stride = 0;             ///< columns of a row
  /// [num_reqs] or empty: tokens of each request to pass over, multiples of block_size.
  std::span<const std::int32_t> seq_starts = {};
};

/// Copies the requests' tokens, one request after another, to destination [cu_seq_lens.back(),
/// kv_lora_rank + rope_dim] of `dtype`, times the cache's scale where it is quantized.
/// Asynchronous. Throws kInvalidArgument for prefix sums that fall, a start inside a page, and
/// pages that the table or the cache does not have. vLLM: gather_and_maybe_dequant_cache.
void gather_and_maybe_dequant_cache(const Context& context, cl_command_queue queue,
                                    const MLACache& cache, TensorRef destination, DType dtype,
                                    const MLAGather& gather, Event* event = nullptr);

/// The registry's MLA backend, which runs what this header declares behind AttentionBackend.
inline constexpr std::string_view kMLABackendName = "CLATTN_MLA";

/// The largest latent part, in elements.
inline constexpr std::int32_t kMaxKVLoraRank = 512;
/// What every latent part is a multiple of, in elements.
inline constexpr std::int32_t kKVLoraRankStep = 16;

/// One layer of multi-head latent attention in its absorbed form: every query head attends to the
/// same latent rows.
struct MLAConfig {
  std::int32_t num_heads = 0;       ///< query heads
  std::int32_t kv_lora_rank = 512;  ///< multiples of 16 up to 512; also the width of the output
  std::int32_t rope_dim = 64;       ///< multiples of 8 up to 64
  std::int32_t block_size = 64;     ///< tokens per cache page
  DType dtype = DType::kF16;        ///< of query and output: f32, f16 or bf16
  std::optional<DType> kv_cache_dtype = std::nullopt;  ///< nullopt = "auto" = dtype
  /// Softmax scale; nullopt = 1 / sqrt(kv_lora_rank + rope_dim). Models want 1 / sqrt of the head
  /// size before absorption (DeepSeek: 128 + 64).
  std::optional<float> scale = std::nullopt;
  KernelFamily kernel_family = KernelFamily::kAuto;  ///< kAuto: the device decides
  /// Which lists of a batch (CommonAttentionMetadata) the layer looks at. Without a window
  /// keep_keys changes nothing.
  ///@{
  bool use_spans = false;       ///< tokens of a span see one another, others ignore spans
  bool use_directions = false;  ///< each request may have a direction
  bool use_first_keys = false;  ///< each request may have a first key
  bool use_trees = false;       ///< the newest tokens of a request may be drafts in a tree
  ///@}

  /// The type that the cache has: kv_cache_dtype, or dtype without one.
  DType cache_dtype() const { return kv_cache_dtype.value_or(dtype); }
};

/// Why this configuration cannot run, one sentence each; empty = it can. `capabilities` may be
/// null: then only the configuration is judged.
std::vector<std::string> validate_mla_configuration(const MLAConfig& config,
                                                    const DeviceCapabilities* capabilities);

/// One MLA layer configuration, compiled. Immutable and thread-safe; layers with equal
/// configurations share their kernels.
class MLAImpl {
 public:
  virtual ~MLAImpl() = default;
  /// What it was made from.
  virtual const MLAConfig& config() const noexcept = 0;
  /// output[t, h, :] = the probabilities of query token t and head h over its request's cache rows,
  /// times the rows' latent parts. `query` [num_actual_tokens, num_heads, kv_lora_rank + rope_dim],
  /// logits run over all of a row; `output` [num_actual_tokens, num_heads, kv_lora_rank]; both of
  /// config().dtype; no key or value, which concat_and_cache_mla() stores. `metadata` comes from
  /// make_mla_builder() for an equal shape. `lse`, if given, receives f32 [num_actual_tokens,
  /// num_heads]: the natural log of the softmax denominator, -inf where a query sees no key (its
  /// output is 0). `launches`, if given, is cleared and gets one record per kernel. Asynchronous,
  /// allocates nothing; `event` completes with the last kernel.
  virtual void forward(cl_command_queue queue, const AttentionTensors& tensors,
                       const MLACache& cache, const AttentionMetadata& metadata,
                       Event* event = nullptr,
                       std::vector<LaunchRecord>* launches = nullptr) const = 0;
  /// Throws what forward() would throw for these arguments, and enqueues nothing.
  virtual void check_forward(cl_command_queue queue, const AttentionTensors& tensors,
                             const MLACache& cache, const AttentionMetadata& metadata) const = 0;
  /// As AttentionImpl::warm_up().
  virtual void warm_up(cl_command_queue queue) const = 0;
  /// The kernels that forward() launches.
  virtual std::vector<KernelInfo> kernels() const = 0;
  /// As AttentionImpl::candidates().
  virtual std::vector<Candidate> candidates() const = 0;
};

/// Compiles a configuration. Throws kUnsupported with the reasons that
/// validate_mla_configuration() gives. The context must outlive the impl.
std::shared_ptr<const MLAImpl> make_mla_impl(Context& context, const MLAConfig& config);

/// The builder of a group of MLA layers. Queries of any length are planned alike, so requests may
/// be in any order: decode_threshold() is the largest int32. Unless the batch's causal is false or
/// its lists say more, query i of a request sees the keys up to its own position, seq_len -
/// query_len + i; else all.
std::unique_ptr<AttentionMetadataBuilder> make_mla_builder(std::shared_ptr<Context> context,
                                                           const MLAConfig& config,
                                                           const BuilderOptions& options = {});

}  // namespace clattn
