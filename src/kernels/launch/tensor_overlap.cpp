// Whether the tensors of a call lie apart.
#include <algorithm>
#include <array>
#include <span>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/launch/step_launch.hpp"
#include "opencl/copy.hpp"

namespace clattn::detail {

namespace {

/// A tensor's rows in its buffer, in bytes.
struct Rows {
  std::string_view name;
  cl_mem buffer = nullptr;
  std::int64_t begin = 0, count = 0, stride = 0, width = 0;

  std::int64_t end() const { return begin + (count - 1) * stride + width; }
};

Rows rows_of(std::string_view name, const TensorRef& tensor, std::int64_t count, std::int64_t width,
             DType dtype) {
  const auto bytes = static_cast<std::int64_t>(element_size_bytes(dtype));
  const std::int64_t stride = token_stride(tensor, width);
  // What no buffer can hold is refused by the check of its size.
  std::int64_t end = 0, stride_bytes = 0;
  if (tensor.offset < 0 || __builtin_mul_overflow(stride, bytes, &stride_bytes) ||
      __builtin_mul_overflow(stride, count, &end) ||
      __builtin_add_overflow(end, tensor.offset, &end) ||
      __builtin_add_overflow(end, width, &end) || __builtin_mul_overflow(end, bytes, &end))
    return {name};
  return {name, tensor.buffer, tensor.offset * bytes, count, stride_bytes, width * bytes};
}

bool share_a_byte(const Rows& a, const Rows& b) {
  if (a.end() <= b.begin || b.end() <= a.begin) return false;
  if (a.stride != b.stride || a.stride <= 0) return true;
  // Columns of one larger matrix, such as queries, keys and values side by side: b's begin `at`
  // bytes after a's, in rows of `stride`.
  const std::int64_t at = ((b.begin - a.begin) % a.stride + a.stride) % a.stride;
  return at < a.width || at + b.width > a.stride;
}

}  // namespace

void check_apart(const AttentionTensors& tensors, cl_mem output_fp8, const KernelShape& shape,
                 std::int64_t tokens, const KeyRows& keys) {
  constexpr std::size_t kWritten = 3;  // the first ones
  const std::array buffers = {tensors.output.buffer, output_fp8,         tensors.lse,
                              tensors.query.buffer,  tensors.key.buffer, tensors.value.buffer};
  const bool debug = environment().debug;
  bool one_buffer = debug;
  for (std::size_t i = 0; i < kWritten; ++i) {
    const auto behind = std::span(buffers).subspan(i + 1);
    one_buffer = one_buffer || (buffers.at(i) != nullptr &&
                                std::ranges::find(behind, buffers.at(i)) != behind.end());
  }
  if (!one_buffer || tokens == 0) return;
  const DType dtype = shape.dtype;
  std::array rows = {
      rows_of("output", tensors.output, tokens, shape.output_row(), dtype),
      rows_of("output_fp8", {output_fp8}, tokens, shape.output_row(), DType::kFp8E4M3),
      rows_of("lse", {tensors.lse}, tokens, shape.num_heads, DType::kF32),
      rows_of("query", tensors.query, tokens, shape.query_row(), dtype),
      rows_of("key", tensors.key, keys.count, keys.key_width, dtype),
      rows_of("value", tensors.value, keys.count, keys.value_width, dtype)};
  for (Rows& each : rows) {
    if (each.buffer == nullptr || !debug) continue;
    const MemoryPlace place = place_of(each.buffer);  // in the whole buffer that it is a part of
    each.buffer = place.memory;
    each.begin += static_cast<std::int64_t>(place.offset_bytes);
  }
  for (std::size_t i = 0; i < kWritten; ++i) {
    const Rows& a = rows.at(i);
    for (const Rows& b : std::span(rows).subspan(i + 1)) {
      if (a.buffer == nullptr || a.buffer != b.buffer || b.count == 0) continue;
      throw_invalid_if(share_a_byte(a, b), "{}: it overlaps {}, legal: memory of its own", a.name,
                       b.name);
    }
  }
}

}  // namespace clattn::detail
