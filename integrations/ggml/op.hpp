#pragma once

#include <ggml.h>

#include <clattn/clattn.hpp>
#include <cstdint>
#include <string>

namespace ggml_clattn {

/// The most tokens of a page: pages are cut out of ggml's caches, whose lengths are multiples of
/// 256. Large ones are read faster, small ones fit windows and interleaved sequences better.
inline constexpr std::int64_t kMostPageTokens = 128;

/// A FLASH_ATTN_EXT of ggml, its tensors (ne from the fastest dimension, nb in bytes) and what they
/// are to CLAttn. For each stream, ggml's name for an independent part of the batch:
///   query  f32  [head_size, rows, num_heads, streams], any order of rows and heads in memory
///   key    f16, bf16 or f32  [head_size, keys, num_kv_heads, streams]; value alike, with the same
///          strides
///   mask   f16  [keys, at least rows, 1, divides streams], added to the logits; or null
///   sinks  f32  [num_heads], or null
///   output f32  [head_size, num_heads, rows, streams], contiguous
struct Op {
  const ggml_tensor* query = nullptr;
  const ggml_tensor* key = nullptr;
  const ggml_tensor* value = nullptr;
  const ggml_tensor* mask = nullptr;
  const ggml_tensor* sinks = nullptr;
  ggml_tensor* output = nullptr;

  std::int64_t rows = 0;     ///< query tokens of a stream
  std::int64_t keys = 0;     ///< cells of a stream, visible or not
  std::int64_t streams = 0;  ///< at least 1
  float max_bias = 0;        ///< above 0: the mask is multiplied by a slope for each head (ALiBi)

  std::int64_t page_tokens = 0;      ///< divides keys, so that cells are whole pages
  std::int64_t pages_of_stream = 0;  ///< pages from a stream's first to the next stream's
  std::int64_t element_bytes = 0;    ///< of keys and values
  /// Of CLAttn's layer; without what depends on values (slopes, sinks, a mask).
  clattn::AttentionConfig config = {};

  /// Why CLAttn does not compute it, whatever its tensors hold; empty = it can.
  std::string refusal = {};
};

/// Reads shapes, strides and parameters, not memory: tensors need not be allocated.
Op read_op(const ggml_tensor& node);

/// [num_heads], ggml's slopes of a mask by a max_bias above 0.
std::vector<float> alibi_slopes(std::int64_t num_heads, float max_bias);

}  // namespace ggml_clattn
