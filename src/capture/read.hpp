#pragma once

#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <cstdint>
#include <cstring>
#include <vector>

#include "npy/npy.hpp"

// Device memory as a case keeps it. All of it waits for what the queue was given before.

namespace clattn::detail {

inline std::size_t size_of(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

/// A part of any cl_mem; throws for bytes that it does not have.
std::vector<std::byte> read(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                            std::size_t size_bytes);

template <typename T>
std::vector<T> read_as(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                       std::int64_t count) {
  const std::vector<std::byte> bytes =
      read(queue, memory, offset_bytes, size_of(count) * sizeof(T));
  std::vector<T> values(size_of(count));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// `count` rows of `row_bytes` each, `stride_bytes` apart, packed.
std::vector<std::byte> read_rows(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                                 std::int64_t count, std::size_t row_bytes,
                                 std::size_t stride_bytes);

/// The rows of a tensor, shape[0] of them; zeros from row `num_rows` on, which may lie past its
/// end.
npy::NpyArray read_tensor(const Queue& queue, const TensorRef& tensor, DType dtype,
                          std::vector<std::int64_t> shape, std::int64_t num_rows);
/// The rows of a tensor, shape[0] of them.
npy::NpyArray read_tensor(const Queue& queue, const TensorRef& tensor, DType dtype,
                          std::vector<std::int64_t> shape);

}  // namespace clattn::detail
