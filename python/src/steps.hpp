#pragma once

#include <optional>

#include "tensors.hpp"

namespace clattn::python {

using Int32s = Values<std::int32_t, 1>;
using BlockTable = Values<std::int32_t, 2>;

/// A CommonAttentionMetadata with the arrays that it looks at.
struct Batch {
  Int32s query_start_loc;
  Int32s seq_lens;
  std::optional<BlockTable> block_table;
  std::optional<Values<std::int64_t, 1>> slot_mapping;
  std::optional<Int32s> key_start_loc;
  CommonAttentionMetadata common;  ///< what is not an array

  CommonAttentionMetadata view() const;
};

}  // namespace clattn::python
