#pragma once

#include <array>
#include <clattn/cache_ops.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "capture/capture.hpp"

namespace clattn::detail {

/// A copy_blocks() of one layer before it runs.
void capture_copy_blocks(cl_command_queue queue, CapturedCache cache,
                         std::span<const BlockPair> mapping);

/// A swap_blocks() of one plane (keys, values or latent rows) before it runs: blocks as they lie,
/// because a swap moves them whole.
struct CapturedSwap {
  cl_command_queue queue = nullptr;
  std::string_view direction;
  DType dtype = DType::kF16;
  std::array<std::int64_t, 3> block_shape{};  ///< tokens, heads, elements
  std::span<const BlockPair> mapping;
  // Block b of the source begins at offset_bytes + b * block_stride of the one that is not null.
  cl_mem device = nullptr;
  const std::byte* host = nullptr;
  std::size_t offset_bytes = 0;
  std::int64_t block_stride = 0;
  std::int64_t source_blocks = 0, destination_blocks = 0;
};
void capture_swap_blocks(const CapturedSwap& call);

/// An advance_step_…() before it runs.
void capture_advance_step(cl_command_queue queue, const AdvanceStep& step);

}  // namespace clattn::detail
