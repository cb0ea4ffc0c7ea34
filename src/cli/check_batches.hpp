#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cli/attention_call.hpp"

namespace clattn::cli {

/// Query and sequence length of one request.
struct RequestShape {
  std::int32_t query_len, seq_len;
};

/// A kind of batch, named for what it makes the kernels do.
struct BatchFamily {
  std::string_view name;
  std::vector<RequestShape> requests;
  std::int32_t num_splits = 0;
  bool causal = true;
};
const std::vector<BatchFamily>& batch_families();

/// A call with random tensors over shuffled pages: the history is in the cache, the new tokens are
/// to be stored, every slot that belongs to no token is NaN, every unused table entry out of range.
AttentionCall make_call(const BatchFamily& family, const AttentionConfig& config,
                        std::uint32_t seed);

/// `count` normally distributed values, stored as `dtype`.
std::vector<std::byte> random_elements(DType dtype, std::size_t count, std::uint32_t seed);

}  // namespace clattn::cli
