#pragma once

#include <clattn/opencl.hpp>

#include <array>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace CLATTN_API clattn {

class DeviceErrors;  // cache_ops.hpp

/// RMSNorm of each head of queries and keys: n = x / sqrt(mean x^2 + eps) * weight, over all of
/// head_size, in f32. A head of zeros stays zeros, whatever eps is.
struct HeadNorm {
  Buffer q_weight = {};               ///< [head_size] of weight_dtype; none = 1
  Buffer k_weight = {};               ///< the same for keys
  DType weight_dtype = DType::kBF16;  ///< f32, f16 or bf16
  bool weight_plus_one = false;       ///< weights are 1 + what the buffers hold (Gemma, Qwen 3.5)
  float eps = 1e-6F;                  ///< >= 0
  /// n is rounded to the tensors' type before it is rotated, as norm and rotation apart do it; else
  /// it stays f32.
  bool rounds = true;
};

/// Rotation of pairs of a head's elements by the angles of a position:
///   o1 = x1 cos - x2 sin, o2 = x2 cos + x1 sin, in f32.
/// Scaled embeddings (YaRN, Llama 3, dynamic NTK) are tables: the call knows no formulas.
struct RotaryEmbedding {
  /// [max_position, rotary_dim] of `dtype`, as many rows as it holds: the cosines of rotary_dim / 2
  /// angles, then their sines (vLLM: cos_sin_cache).
  Buffer cos_sin_cache = {};
  DType dtype = DType::kF32;    ///< f32, f16 or bf16
  std::int32_t rotary_dim = 0;  ///< elements of a head that are rotated, even; 0 = all
  bool is_neox = true;        ///< pairs are elements i and i + rotary_dim / 2; else 2 i and 2 i + 1
  bool rotates_tail = false;  ///< a head's last rotary_dim elements are rotated, not its first
  /// Multimodal RoPE: how many angles are turned by a token's time, height and width; the sum is
  /// rotary_dim / 2. All 0: each token has one position.
  std::array<std::int32_t, 3> mrope_section = {};
  /// Of angle i, i % 3 chooses among the three as long as its section lasts, then it is time (Qwen
  /// 3 VL, Qwen 3.5); else the sections follow one another (Qwen 2 VL).
  bool mrope_interleaved = false;
};

/// What a layer does to the rows of its projection before it attends: norm, rotation and the write
/// into its cache. Each may be absent. Tensors are [num_tokens, heads, head_size] of `dtype`, rows
/// by stride, so that they may be slices of one fused projection.
struct PrepareQKV {
  std::int64_t num_tokens = 0;    ///< rows of each tensor
  std::int32_t num_heads = 1;     ///< of queries
  std::int32_t num_kv_heads = 1;  ///< of keys and values
  std::int32_t head_size = 128;   ///< 8 … 512 in steps of 8; with a cache what that takes
  DType dtype = DType::kBF16;     ///< f32, f16 or bf16
  TensorRef query = {};           ///< none: the call has keys alone
  TensorRef key = {};             ///< none: a layer that attends to another's keys
  TensorRef value = {};           ///< stored as it is; given if and only if there is a cache
  /// With query. It and key_out may be the inputs themselves (but not a query with gates);
  /// otherwise outputs overlap no tensor.
  TensorRef query_out = {};
  TensorRef key_out = {};  ///< none: keys go to the cache alone
  /// Of models whose attention has an output gate: each head of `query` is head_size elements of
  /// query, then head_size of gate, [num_tokens, num_heads, 2, head_size], and the gates are copied
  /// here, [num_tokens, num_heads, head_size], bit for bit, before any sigmoid. None: no gates.
  TensorRef gate_out = {};
  std::optional<HeadNorm> norm = std::nullopt;         ///< nullopt: none
  std::optional<RotaryEmbedding> rope = std::nullopt;  ///< nullopt: none
  /// With rope: where tokens stand, [num_tokens], or with mrope_section time, height and width
  /// [3, num_tokens]. A token with a position outside the table gets NaN in its rotated elements
  /// and stores nothing.
  Buffer positions = {};
  std::int64_t positions_offset = 0;  ///< elements before the first
  std::int64_t positions_stride = 0;  ///< elements from row to row of [3, …]; 0 = num_tokens
  std::int32_t position_bits = 64;    ///< of a position: 64 (int64) or 32 (int32)
  /// Where keys and values are stored, as reshape_and_cache_flash() stores key_out and value. No
  /// buffer: nowhere.
  KVCache cache = {};
  cl_mem slot_mapping = nullptr;      ///< with a cache: int64, not retained
  std::size_t slot_offset_bytes = 0;  ///< bytes before token 0's slot
  /// Tokens from this one on have no slot; as those with a negative slot, or one past the cache,
  /// they are normed and rotated but not stored. Negative: all have one.
  std::int64_t num_slots = -1;
  /// Where the lowest token with a position outside the table is noted; null: nowhere.
  DeviceErrors* errors = nullptr;
};

/// Prepares a layer's queries, keys and values in one launch (vLLM: rotary_embedding,
/// fused_qk_norm_rope, reshape_and_cache_flash). Results have the bits of the same done in separate
/// calls of it and of reshape_and_cache_flash(). Asynchronous; may be recorded. Throws
/// kInvalidArgument, naming the field, its value and what is legal, for sizes, types, buffers and
/// outputs that do not fit, and for a tensor that nothing would be done with.
void prepare_qkv(const Context& context, cl_command_queue queue, const PrepareQKV& call,
                 Event* event = nullptr);

}  // namespace clattn
