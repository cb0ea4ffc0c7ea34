#pragma once

#include <clattn/opencl.hpp>

#include <array>
#include <clattn/context.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <optional>

namespace CLATTN_API clattn {

/// The layout that was set for caches that are made without naming one: the override of
/// set_kv_cache_layout(), else CLATTN_KV_CACHE_LAYOUT, else nullopt: each backend's preference
/// (default_kv_cache_layout()). Throws if the variable does not name a layout. Thread-safe.
std::optional<KVCacheLayout> get_kv_cache_layout();
/// Overrides the environment from now on; nullopt removes the override. Thread-safe.
void set_kv_cache_layout(std::optional<KVCacheLayout> layout);

/// One layer's cache as kernels read it. Element (kv, block, token, head, dim) of the logical shape
/// lies at {k,v}_offset + block * block_stride + token * token_stride + head * head_stride + dim;
/// of uint4x2, + dim / 2, and the shape's last extent is head_size / 2. The strides determine the
/// layout; results never depend on it. Values of fewer elements than keys follow their key:
/// v_offset = k_offset + head_size. Offsets and strides count elements of `dtype`; layers take
/// multiples of 8 numbers (of uint4x2, 4 elements), a block_stride above 0 where there are several
/// blocks, and heads that lie less than 2^30 / num_kv_heads blocks and as many elements apart.
struct KVCache {
  Buffer buffer = {};                        ///< kept alive by every copy of this struct
  DType dtype = DType::kF16;                 ///< as stored
  std::int64_t num_blocks = 0;               ///< pages
  std::int32_t block_size = 0;               ///< tokens
  std::int32_t num_kv_heads = 0;             ///< heads of a token
  std::int32_t head_size = 0;                ///< numbers; of K where head_size_v is less
  std::int32_t head_size_v = 0;              ///< of V: 8 … head_size in steps of 8; 0 = head_size
  std::array<std::int64_t, 5> shape = {};    ///< the backend's logical shape
  std::array<std::int64_t, 5> strides = {};  ///< of that shape
  std::int64_t k_offset = 0;                 ///< elements before the first K
  std::int64_t v_offset = 0;                 ///< elements before the first V
  std::int64_t block_stride = 0;             ///< from page to page
  std::int64_t token_stride = 0;             ///< from token to token
  std::int64_t head_stride = 0;              ///< from head to head
  /// 8-bit types only: f32 [2][1 or num_kv_heads], the factors of K, then those of V
  /// (real = stored * factor), one per tensor or per KV head. Empty = 1, except that int8 requires
  /// factors: with 1 it could hold whole numbers only.
  Buffer scales = {};
  bool scales_per_head = false;  ///< num_kv_heads factors for K and as many for V, not one each
  /// One more factor follows V's: queries are divided by it before they are rounded to 8 bits
  /// (AttentionConfig::fp8_products); it is above 0. Without it they are rounded undivided.
  bool scales_query = false;
  /// Where the scales of tokens and heads lie (CacheFormat::scales_per_row()), in elements of
  /// `scales`, f32: K's of (block, token, head) at k_offset + block * block_stride + token *
  /// token_stride + head * head_stride, V's the same from v_offset.
  struct RowScales {
    std::int64_t k_offset = 0;      ///< before the first K's
    std::int64_t v_offset = 0;      ///< before the first V's
    std::int64_t block_stride = 0;  ///< from page to page
    std::int64_t token_stride = 0;  ///< from token to token
    std::int64_t head_stride = 0;   ///< from head to head
    bool operator==(const RowScales&) const = default;
  };
  /// Set: each token and head has a scale of its own, which is found when it is stored; of uint4x2
  /// its 4 lowest bits are a zero (CacheFormat::Side::Zero). With
  /// reshape_kv_cache() they lie in the pages, `scales` being `buffer`. Whoever stores scales by
  /// other means keeps them finite and at least 0: what others give is undefined.
  std::optional<RowScales> row_scales = {};

  /// What it holds.
  CacheFormat format() const { return row_scales ? CacheFormat::per_row(dtype) : dtype; }
  /// Elements of a head's value.
  std::int32_t value_size() const { return head_size_v != 0 ? head_size_v : head_size; }
  /// Elements of `dtype` that a head's key takes.
  std::int64_t key_elements() const { return head_size / codes_per_element(dtype); }
  /// And its value.
  std::int64_t value_elements() const { return value_size() / codes_per_element(dtype); }
  /// The buffer's element that holds number (block, token, head, dim) of V.
  std::int64_t value_at(std::int64_t block, std::int64_t token, std::int64_t head,
                        std::int64_t dim) const {
    return v_offset + block * block_stride + head * head_stride + token * token_stride +
           dim / codes_per_element(dtype);
  }
  /// And of K.
  std::int64_t key_at(std::int64_t block, std::int64_t token, std::int64_t head,
                      std::int64_t dim) const {
    return k_offset + block * block_stride + head * head_stride + token * token_stride +
           dim / codes_per_element(dtype);
  }
};

/// A [tokens, heads, head_size] tensor on the device, values and results with head_size_v: heads
/// and dims are contiguous, tokens may be strided.
struct TensorRef {
  cl_mem buffer = nullptr;        ///< not retained
  std::int64_t offset = 0;        ///< elements before token 0
  std::int64_t token_stride = 0;  ///< elements from token to token; 0 = heads * head_size
};

/// Stores token i's key and value at slot_mapping[i] (block * block_size + offset; negative = do
/// not store) for i < num_tokens, divided by the cache's scales where it is quantized, converting
/// `dtype` to the cache's type (round to nearest even). With row_scales a row's scale is stored,
/// too: its largest finite magnitude / 127 (int8) or / 448 (fp8 e4m3); below 2^-126 it is 0. That
/// of uint4x2 is (hi - lo) / 15, of its largest and smallest finite numbers and 0, so that 0 is one
/// of its values: zero = round(-lo / scale), code = round(x / scale) + zero within 0 … 15, of a NaN
/// 0. `slot_mapping` holds int64 at byte offset `slot_offset_bytes`. A slot past the cache stores
/// nothing. Throws kInvalidArgument unless the buffers of `key`, `value` and `slot_mapping` hold
/// num_tokens rows and the cache's buffer all its blocks. Asynchronous; if two tokens have the same
/// slot, which of them is stored is undefined. vLLM: reshape_and_cache_flash.
void reshape_and_cache_flash(const Context& context, cl_command_queue queue, TensorRef key,
                             TensorRef value, DType dtype, const KVCache& cache,
                             cl_mem slot_mapping, std::size_t slot_offset_bytes,
                             std::int64_t num_tokens, Event* event = nullptr);

}  // namespace clattn
