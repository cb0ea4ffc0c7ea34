#pragma once

#include <clattn/opencl.hpp>

// What layers keep in their caches, and memory for the caches of a whole model.

#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

class AttentionBackend;  // attention_backend.hpp

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

/// Which states of a request a kMamba layer keeps (vLLM: mamba_cache_mode).
enum class MambaCacheMode : std::uint8_t {
  kNone,   ///< the newest alone: no prefix is shared
  kAlign,  ///< also those at ends of blocks at which a step ended
  kAll     ///< those at the end of every block
};
/// "none", "align" or "all".
std::string_view to_string(MambaCacheMode mode);
/// Inverse of to_string; throws kInvalidArgument naming the legal values.
MambaCacheMode parse_mamba_cache_mode(std::string_view name);

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
  std::int32_t head_size_v = 0;  ///< of V where it differs; 0 = head_size
  /// kPerTokenHead: types of a byte only; kernels read int8, fp8_e4m3 and uint4x2 (CacheFormat),
  /// the last in this mode alone.
  KVQuantMode kv_quant_mode = KVQuantMode::kNone;
  std::size_t page_size_padded = 0;  ///< bytes that a page takes, at least its own; 0 = its own
  /// kMamba: what a page holds, one after another; the fields of keys and values are not used.
  std::vector<StateTensor> states = {};
  MambaCacheMode mamba_cache_mode = MambaCacheMode::kNone;  ///< kMamba
  /// kMamba: pages of a request for states after drafts, the most drafts of a step; >= 0.
  std::int32_t num_speculative_blocks = 0;

  /// block_size * num_kv_heads * ((head_size + head_size_v) * e + 8 if kPerTokenHead), with MLA
  /// block_size * (head_size * e + 4 if kPerTokenHead), e being the bytes of a number (1/2 of
  /// uint4x2), of kMamba the bytes of all states; or page_size_padded. Throws on overflow or an
  /// illegal field.
  std::size_t page_size_bytes() const;
  /// Elements of a head's value.
  std::int32_t value_size() const { return head_size_v != 0 ? head_size_v : head_size; }
  /// Most pages that one request of up to `max_model_len` tokens holds, by the formulas of vLLM's
  /// specs (full: every page; window: the pages of window - 1 + max_num_batched_tokens tokens, plus
  /// one; chunked-local: those of chunk + max_num_batched_tokens; cross: those of encoder_len;
  /// encoder-only: 0; kMamba: num_speculative_blocks and 1, with kAlign 2, with kAll a page for
  /// each block_size tokens). Throws kInvalidArgument for a length below 0.
  std::int64_t max_admission_blocks_per_request(std::int64_t max_model_len,
                                                std::int64_t max_num_batched_tokens,
                                                std::int64_t encoder_len = 0) const;
  /// The bytes of these pages.
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
  std::size_t size_bytes = 0;               ///< whole pages
  std::vector<std::string> shared_by = {};  ///< names of layers
};

/// Layers that share one block table.
struct KVCacheGroupSpec {
  std::vector<std::string> layer_names = {};  ///< layers of the group
  KVCacheSpec spec = {};                      ///< of each that has none in layer_specs
  /// Layers whose pages hold the same tokens in other bytes: other heads, head sizes, types or
  /// states (vLLM: UniformTypeKVCacheSpecs). What follows throws kInvalidArgument if one of them is
  /// not of the group, or has another kind or block_size than `spec`, or, unless kFull, another
  /// window or chunk.
  std::map<std::string, KVCacheSpec> layer_specs = {};
  /// The layer's spec; valid as long as this object.
  const KVCacheSpec& spec_of(const std::string& layer) const;
  /// Bytes that one block takes in the caches of all layers: the sum of their pages.
  std::size_t page_size_bytes() const;
  /// Most bytes of all layers' caches that one request holds (KVCacheSpec's function).
  std::size_t max_memory_usage_bytes(std::int64_t max_model_len,
                                     std::int64_t max_num_batched_tokens,
                                     std::int64_t encoder_len = 0) const;
};

/// The caches of a model, as an engine lays them out.
struct KVCacheConfig {
  std::int64_t num_blocks = 0;  ///< pages of every tensor; 0 = what each tensor's bytes hold
  std::vector<KVCacheTensor> tensors = {};    ///< memory
  std::vector<KVCacheGroupSpec> groups = {};  ///< layers that share a block table
};

/// One zeroed device buffer per tensor, keyed by layer name; layers of one tensor share the buffer.
/// Every layer of every group must be named by exactly one tensor. A tensor larger than the
/// device's largest allocation, or a sum larger than its memory, is refused with the numbers.
/// Blocks until zeroed.
std::map<std::string, Buffer> allocate_kv_cache(const Context& context, cl_command_queue queue,
                                                const KVCacheConfig& config);

/// Views a raw buffer of `spec` pages as `backend` orders them. The bytes must be a multiple of the
/// page size. Padded pages are contiguous
/// whatever the backend's order: block b's K and V, then the padding, lie at b * page_size_padded
/// bytes, which must be a multiple of 8 elements. Pages with a scale for each token and head are
/// contiguous, too: a block's keys, their scales, its values, their scales; where the number of
/// tokens times heads is odd, the keys' scales come third. Throws kUnsupported for a layout that
/// the backend does not support, for latent pages with a backend of keys and values or the reverse,
/// and for such scales with values narrower than keys. Where head_size_v is less than head_size,
/// each head's value follows its key, as in vLLM's TRITON_ATTN_DIFFKV: the logical shape has 1 in
/// place of K and V, and head_size + head_size_v elements a head.
KVCache reshape_kv_cache(const Buffer& raw, const KVCacheSpec& spec,
                         const AttentionBackend& backend, KVCacheLayout layout);

/// A state tensor in a buffer's pages: that of page b is contiguous from element offset + b *
/// block_stride of `tensor.dtype` on.
struct StateView {
  Buffer buffer = {};             ///< kept alive by every copy of this struct
  StateTensor tensor = {};        ///< what each page holds
  std::int64_t num_blocks = 0;    ///< pages
  std::int64_t offset = 0;        ///< elements before page 0's
  std::int64_t block_stride = 0;  ///< elements from page to page
};

/// Views a raw buffer of kMamba pages, one view for each of `spec.states`. Throws kInvalidArgument
/// unless the bytes are a multiple of the page size, and unless that and the bytes of the states in
/// front of each are multiples of its element.
std::vector<StateView> view_state_pages(const Buffer& raw, const KVCacheSpec& spec);

}  // namespace clattn
