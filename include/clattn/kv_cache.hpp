#pragma once

#include <clattn/opencl.hpp>

#include <array>
#include <clattn/context.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace CLATTN_API clattn {

class AttentionBackend;

/// The layout for caches that are made without naming one: the override of set_kv_cache_layout(),
/// else CLATTN_KV_CACHE_LAYOUT, else nullopt. For nullopt init_kv_cache() (attn_utils.hpp) takes
/// NHD and make_kv_cache() (attention.hpp) the backend's preference. Throws if the variable does
/// not name a layout. Thread-safe.
std::optional<KVCacheLayout> get_kv_cache_layout();
/// Overrides the environment from now on; nullopt removes the override. Thread-safe.
void set_kv_cache_layout(std::optional<KVCacheLayout> layout);

/// What one layer keeps per token (vLLM's AttentionSpec family; sizes in bytes, e = bytes per
/// element), or per request: kMamba.
enum class KVCacheKind : std::uint8_t {
  kFull,
  kSlidingWindow,
  kChunkedLocal,
  kEncoderOnly,
  kCross,
  kMamba  ///< a constant state for the application's own kernels: one page per request
};

/// One tensor of a constant state.
struct StateTensor {
  std::vector<std::int64_t> shape = {};  ///< of one request, each >= 1
  DType dtype = DType::kF32;             ///< of its elements
  bool operator==(const StateTensor&) const = default;
};

/// Where the factors of a quantized cache are stored.
enum class KVQuantMode : std::uint8_t {
  kNone,         ///< outside the pages: one per tensor or per KV head, if any (KVCache::scales)
  kPerTokenHead  ///< in the pages: one f32 for each head vector of each token
};

/// What a page of a layer's cache holds.
struct KVCacheSpec {
  KVCacheKind kind = KVCacheKind::kFull;  ///< what a page is for
  std::int32_t block_size = 16;           ///< tokens per block (page), >= 1
  std::int32_t num_kv_heads = 1;          ///< heads of a token
  std::int32_t head_size = 128;           ///< elements; of K where head_size_v differs
  DType dtype = DType::kF16;              ///< as stored
  /// kSlidingWindow: tokens, the current one included. kFull: the window of a layer that keeps all
  /// tokens nevertheless, 0 = none.
  std::int32_t sliding_window = 0;
  std::int32_t attention_chunk_size = 0;  ///< kChunkedLocal: tokens per chunk. kFull: as above
  bool use_mla = false;  ///< one latent vector of head_size serves as K and V: num_kv_heads is 1
  std::int32_t head_size_v = 0;                    ///< of V where it differs; 0 = head_size
  KVQuantMode kv_quant_mode = KVQuantMode::kNone;  ///< kPerTokenHead: 8-bit types only
  std::size_t page_size_padded = 0;  ///< bytes that a page takes, at least its own; 0 = its own
  /// kMamba: what a page holds, one after another; the fields of keys and values are not used.
  std::vector<StateTensor> states = {};

  /// block_size * num_kv_heads * ((head_size + head_size_v) * e + 8 if kPerTokenHead), with MLA
  /// block_size * (head_size * e + 4 if kPerTokenHead), of kMamba the bytes of all states; or
  /// page_size_padded. Throws on overflow or an illegal field.
  std::size_t page_size_bytes() const;
  /// Most bytes that one request of up to `max_model_len` tokens holds, by the formulas of vLLM's
  /// specs (full: every page; window: the pages of window - 1 + max_num_batched_tokens tokens, plus
  /// one; chunked-local: those of chunk + max_num_batched_tokens; cross: those of encoder_len;
  /// encoder-only: 0; kMamba: one page).
  std::size_t max_memory_usage_bytes(std::int64_t max_model_len,
                                     std::int64_t max_num_batched_tokens,
                                     std::int64_t encoder_len = 0) const;
  /// The spec of layers that share a block table. They must be equal, except that some kFull layers
  /// may have a window (or chunk) and others none: the merged spec has it.
  static KVCacheSpec merge(std::span<const KVCacheSpec> specs);
  bool operator==(const KVCacheSpec&) const = default;
};

/// Makes all pages equally large, so that layers of any kind may share tensors page by page. Pages
/// of keys and values, latent ones too, become as large as the largest of them, or the smallest
/// multiple of it that holds every state: by more tokens per block where their own size divides
/// that, else by padding. States are padded. A block_size that has grown counts for the allocator's
/// blocks; kernels keep the layer's (map_to_kernel_blocks()). Throws kInvalidArgument, with `specs`
/// as they were, for latent pages that would need padding. vLLM: unify_kv_cache_spec_page_size.
void unify_kv_cache_spec_page_size(std::map<std::string, KVCacheSpec>& specs);

/// One zeroed buffer of `size_bytes`, aliased by every layer of `shared_by`.
struct KVCacheTensor {
  std::size_t size_bytes = 0;          ///< whole pages
  std::vector<std::string> shared_by;  ///< names of layers
};

/// Layers that share one block table.
struct KVCacheGroupSpec {
  std::vector<std::string> layer_names;  ///< layers of the group
  KVCacheSpec spec;                      ///< of each of them
};

/// The caches of a model, as an engine lays them out.
struct KVCacheConfig {
  std::int64_t num_blocks = 0;         ///< pages of every tensor; 0 = what each tensor's bytes hold
  std::vector<KVCacheTensor> tensors;  ///< memory
  std::vector<KVCacheGroupSpec> groups;  ///< layers that share a block table
};

/// One layer's cache as kernels read it. Element (kv, block, token, head, dim) of the logical shape
/// lies at {k,v}_offset + block * block_stride + token * token_stride + head * head_stride + dim,
/// but K's at k_offset + block * block_stride + head * head_stride + dim * key_dim_stride + token
/// where keys lie by dim (key_dim_stride not 1). The strides determine the layout; results never
/// depend on it. Offsets and strides count elements of `dtype`; layers take multiples of 8, a
/// block_stride above 0 where there are several blocks, and heads that lie less than 2^30 /
/// num_kv_heads blocks and as many elements apart.
struct KVCache {
  Buffer buffer;                          ///< kept alive by every copy of this struct
  DType dtype = DType::kF16;              ///< as stored
  std::int64_t num_blocks = 0;            ///< pages
  std::int32_t block_size = 0;            ///< tokens
  std::int32_t num_kv_heads = 0;          ///< heads of a token
  std::int32_t head_size = 0;             ///< elements
  std::array<std::int64_t, 5> shape{};    ///< the backend's logical shape
  std::array<std::int64_t, 5> strides{};  ///< of that shape; where keys lie by dim, of V alone
  std::int64_t k_offset = 0;              ///< elements before the first K
  std::int64_t v_offset = 0;              ///< elements before the first V
  std::int64_t block_stride = 0;          ///< from page to page
  std::int64_t token_stride = 0;          ///< from token to token; where keys lie by dim, of V
  std::int64_t head_stride = 0;           ///< from head to head
  /// 1: K lies as V does. At least block_size: it lies by dim (KVCacheLayout::kHDN), which CPU
  /// kernels read, of blocks of a multiple of 16 tokens.
  std::int64_t key_dim_stride = 1;
  /// Quantized types only: f32 [2][1 or num_kv_heads], the factors of K, then those of V
  /// (real = stored * factor), one per tensor or per KV head. Empty = 1, except that int8 requires
  /// factors: with 1 it could hold whole numbers only.
  Buffer scales;
  bool scales_per_head = false;  ///< num_kv_heads factors for K and as many for V, not one each
  /// One more factor follows V's: queries are divided by it before they are rounded to 8 bits
  /// (AttentionConfig::fp8_products); it is above 0. Without it they are rounded undivided.
  bool scales_query = false;

  /// Whether the keys of a head lie by dim (KVCacheLayout::kHDN).
  /// Values never do.
  bool keys_by_dim() const { return key_dim_stride != 1; }
  /// The buffer's element that holds element (block, token, head, dim) of V.
  std::int64_t value_at(std::int64_t block, std::int64_t token, std::int64_t head,
                        std::int64_t dim) const {
    return v_offset + block * block_stride + head * head_stride + token * token_stride + dim;
  }
  /// And of K.
  std::int64_t key_at(std::int64_t block, std::int64_t token, std::int64_t head,
                      std::int64_t dim) const {
    const std::int64_t at = k_offset + block * block_stride + head * head_stride;
    return keys_by_dim() ? at + dim * key_dim_stride + token : at + token * token_stride + dim;
  }
};

/// One zeroed device buffer per tensor, keyed by layer name; layers of one tensor share the buffer.
/// Every layer of every group must be named by exactly one tensor. A tensor larger than the
/// device's largest allocation, or a sum larger than its memory, is refused with the numbers.
/// Blocks until zeroed.
std::map<std::string, Buffer> allocate_kv_cache(const Context& context, cl_command_queue queue,
                                                const KVCacheConfig& config);

/// Views a raw buffer of `spec` pages as `backend` orders them. The bytes must be a multiple of the
/// page size; kHDN takes block sizes that are multiples of 16. Padded pages are contiguous
/// whatever the backend's order: block b's K and V, then the padding, lie at b * page_size_padded
/// bytes, which must be a multiple of 8 elements. Throws kUnsupported for a layout that the backend
/// does not support, for latent pages with a backend of keys and values or the reverse, and for
/// pages that are more than K and V of one head size: a head_size_v of its own, scales of each
/// token.
KVCache reshape_kv_cache(const Buffer& raw, const KVCacheSpec& spec,
                         const AttentionBackend& backend, KVCacheLayout layout);

/// A state tensor in a buffer's pages: that of page b is contiguous from element offset + b *
/// block_stride of `tensor.dtype` on.
struct StateView {
  Buffer buffer;                  ///< kept alive by every copy of this struct
  StateTensor tensor;             ///< what each page holds
  std::int64_t num_blocks = 0;    ///< pages
  std::int64_t offset = 0;        ///< elements before page 0's
  std::int64_t block_stride = 0;  ///< elements from page to page
};

/// Views a raw buffer of kMamba pages, one view for each of `spec.states`. Throws kInvalidArgument
/// unless the bytes are a multiple of the page size, and unless that and the bytes of the states in
/// front of each are multiples of its element.
std::vector<StateView> view_state_pages(const Buffer& raw, const KVCacheSpec& spec);

/// A [tokens, heads, head_size] tensor on the device: heads and dims are contiguous, tokens may be
/// strided.
struct TensorRef {
  cl_mem buffer = nullptr;        ///< not retained
  std::int64_t offset = 0;        ///< elements before token 0
  std::int64_t token_stride = 0;  ///< elements from token to token; 0 = heads * head_size
};

/// Stores token i's key and value at slot_mapping[i] (block * block_size + offset; negative = do
/// not store) for i < num_tokens, divided by the cache's scales where it is quantized, converting
/// `dtype` to the cache's type (round to nearest even). `slot_mapping` holds int64 at byte offset
/// `slot_offset_bytes`. A slot past the cache stores nothing. Throws kInvalidArgument unless the
/// buffers of `key`, `value` and `slot_mapping` hold num_tokens rows and the cache's buffer all its
/// blocks, and kUnsupported for a cache of keys by dim on any device but a CPU. Asynchronous; if
/// two tokens have the same slot, which of them is stored is undefined. vLLM:
/// reshape_and_cache_flash.
void reshape_and_cache_flash(const Context& context, cl_command_queue queue, TensorRef key,
                             TensorRef value, DType dtype, const KVCache& cache,
                             cl_mem slot_mapping, std::size_t slot_offset_bytes,
                             std::int64_t num_tokens, Event* event = nullptr);

/// The x-packed caches of the original paged-attention kernels: keys [num_blocks, num_kv_heads,
/// head_size / x, block_size, x] with x = 16 / element bytes, values [num_blocks, num_kv_heads,
/// head_size, block_size].
struct PackedKVCache {
  cl_mem key = nullptr;           ///< not retained, as value
  cl_mem value = nullptr;         ///< not retained
  DType dtype = DType::kF16;      ///< as stored
  std::int64_t num_blocks = 0;    ///< pages
  std::int32_t block_size = 0;    ///< tokens, a page
  std::int32_t num_kv_heads = 0;  ///< heads of a token
  std::int32_t head_size = 0;     ///< elements
  Buffer scales = {};             ///< as KVCache's
  bool scales_per_head = false;   ///< as KVCache's
  std::int64_t key_offset = 0;    ///< elements before the keys; attention wants multiples of 8
  std::int64_t value_offset = 0;  ///< of the values, as key_offset

  /// The element of `key` that holds (block, token, head, dim).
  std::int64_t key_at(std::int64_t block, std::int64_t token, std::int64_t head,
                      std::int64_t dim) const {
    const auto x = static_cast<std::int64_t>(16 / element_size_bytes(dtype));
    const std::int64_t vectors = (block * num_kv_heads + head) * (head_size / x) + dim / x;
    return key_offset + (vectors * block_size + token) * x + dim % x;
  }
  /// And of `value`.
  std::int64_t value_at(std::int64_t block, std::int64_t token, std::int64_t head,
                        std::int64_t dim) const {
    return value_offset + ((block * num_kv_heads + head) * head_size + dim) * block_size + token;
  }
};

/// {2, num_blocks, block_size * num_kv_heads * head_size}: one allocation of all x-packed keys,
/// then all values. vLLM: PagedAttention.get_kv_cache_shape.
std::array<std::int64_t, 3> get_packed_kv_cache_shape(std::int64_t num_blocks,
                                                      std::int32_t block_size,
                                                      std::int32_t num_kv_heads,
                                                      std::int32_t head_size);

/// Views such an allocation of `spec` pages as the pair; `raw` must outlive the view. Throws
/// kInvalidArgument unless the bytes are a multiple of the page size and head_size one of x, and
/// kUnsupported as reshape_kv_cache and for padding. vLLM: PagedAttention.split_kv_cache.
PackedKVCache split_kv_cache(const Buffer& raw, const KVCacheSpec& spec);

/// As reshape_and_cache_flash, into an x-packed cache. head_size must be a multiple of x. vLLM:
/// reshape_and_cache.
void reshape_and_cache(const Context& context, cl_command_queue queue, TensorRef key,
                       TensorRef value, DType dtype, const PackedKVCache& cache,
                       cl_mem slot_mapping, std::size_t slot_offset_bytes, std::int64_t num_tokens,
                       Event* event = nullptr);

}  // namespace clattn
