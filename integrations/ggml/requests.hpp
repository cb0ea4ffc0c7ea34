#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "op.hpp"

namespace ggml_clattn {

/// What a mask adds to logits besides minus infinity.
enum class MaskValues : std::uint8_t {
  kZeros,      ///< nothing: a key is visible or hidden
  kDistances,  ///< key minus query position, which ALiBi's slopes multiply
  kOther       ///< what CLAttn cannot compute
};

/// A step of CLAttn for an op: consecutive rows that belong together are a request, whose pages are
/// those in which one of its rows sees a cell. Cells of one sequence may lie anywhere in a stream,
/// between those of others.
struct Requests {
  MaskValues values = MaskValues::kZeros;
  bool causal = false;  ///< each row sees the keys of its request up to its own, no matter what
                        ///< cells say; otherwise all of them that cells show
  bool masked = false;  ///< cells are needed
  std::vector<std::int32_t> query_start_loc = {};  ///< [requests + 1]
  std::vector<std::int32_t> seq_lens = {};         ///< [requests], keys
  std::vector<std::int32_t> block_table = {};      ///< [requests, block_table_stride]
  std::int64_t block_table_stride = 0;             ///< pages
  std::vector<std::uint8_t> cells = {};  ///< [all rows, cells_stride], 1 = the row sees the key
  std::int64_t cells_stride = 0;         ///< keys
};

/// The step of an op with `mask`, f16 as in Op, empty = every key is visible.
Requests read_requests(const Op& op, std::span<const std::uint16_t> mask);

}  // namespace ggml_clattn
