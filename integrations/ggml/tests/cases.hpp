#pragma once

#include <ggml.h>

#include <functional>
#include <vector>

/// What is added to the logit of a key in a row of a stream.
using Mask = std::function<float(int stream, int row, int key)>;

/// A FLASH_ATTN_EXT over caches that have 256 cells more than `keys` for each stream.
struct Case {
  const char* name;
  int rows = 1, keys = 512, streams = 1;
  int heads = 8, kv_heads = 2, head_size = 64;
  ggml_type type = GGML_TYPE_F16;  ///< of keys and values
  Mask mask = nullptr;             ///< none: all keys are visible
  Mask second_mask = nullptr;      ///< written to the same tensor for a second computation
  float max_bias = 0, soft_cap = 0;
  bool sinks = false;
  bool values_first = false;  ///< V's cache in front of K's
  bool two_buffers = false;   ///< K's and V's cache in buffers of their own
  bool fused = false;         ///< queries are a part of wider rows
  bool by_head = false;       ///< queries and cache are [head][token] in memory
  bool hidden_nan = false;    ///< cells that no row sees hold no numbers
  bool computed = true;       ///< by CLAttn; else handed on
};

std::vector<Case> cases();
