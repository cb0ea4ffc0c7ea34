#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "oracle/recurrent.hpp"

namespace oracle {

/// RMSNorm and rotation of the heads of queries or keys, and what a call may be off by:
///   n = x / sqrt(mean x^2 + eps) (weight + beta),
///   o1 = n1 cos - n2 sin,  o2 = n2 cos + n1 sin  of each pair.
struct PreparedHeads {
  std::int32_t heads = 1, head_size = 0;
  std::vector<double> x;  // [tokens, heads, head_size]
  bool norm = false;
  std::vector<double> weight;  // [head_size]; empty: no weight, beta is not added
  double beta = 0, eps = 1e-6;
  bool rounds_norm = true;      // calls round n to the element type before they rotate
  std::int32_t rotary_dim = 0;  // 0: no rotation
  std::int32_t rotary_at = 0;   // first rotated element
  bool neox = true;             // pairs (i, i + rotary_dim / 2), else (2 i, 2 i + 1)
  std::vector<double> table;    // [rows, rotary_dim]: cosines, then sines
  std::vector<std::vector<std::int64_t>> positions;  // [1 or 3][tokens]
  std::array<std::int32_t, 3> sections = {};  // angles of each of three positions, one after the
  bool sections_in_turn = false;              // other, or every third one until a section ends
};
/// Allowed: `floor`; sigma is 0. A position outside the table makes rotated elements NaN.
JudgedTensor prepared_heads(const PreparedHeads& call, Element out);

}  // namespace oracle
