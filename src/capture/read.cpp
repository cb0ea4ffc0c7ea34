#include "capture/read.hpp"

#include <string>
#include <utility>

namespace clattn::detail {

std::vector<std::byte> read(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                            std::size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  if (size_bytes > 0) queue.read(Buffer::adopt(memory), bytes, offset_bytes);
  return bytes;
}

std::vector<std::byte> read_rows(const Queue& queue, cl_mem memory, std::size_t offset_bytes,
                                 std::int64_t count, std::size_t row_bytes,
                                 std::size_t stride_bytes) {
  if (count == 0) return {};
  const std::vector<std::byte> span =
      read(queue, memory, offset_bytes, size_of(count - 1) * stride_bytes + row_bytes);
  std::vector<std::byte> rows;
  rows.reserve(size_of(count) * row_bytes);
  for (std::size_t i = 0; i < size_of(count); ++i) {
    const auto row = span.begin() + static_cast<std::ptrdiff_t>(i * stride_bytes);
    rows.insert(rows.end(), row, row + static_cast<std::ptrdiff_t>(row_bytes));
  }
  return rows;
}

npy::NpyArray read_tensor(const Queue& queue, const TensorRef& tensor, DType dtype,
                          std::vector<std::int64_t> shape, std::int64_t num_rows) {
  const std::size_t element = element_size_bytes(dtype);
  std::int64_t row = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) row *= shape[i];
  const std::int64_t stride = tensor.token_stride == 0 ? row : tensor.token_stride;
  std::vector<std::byte> rows =
      read_rows(queue, tensor.buffer, size_of(tensor.offset) * element, num_rows,
                size_of(row) * element, size_of(stride) * element);
  rows.resize(size_of(shape[0] * row) * element);
  return {std::string(npy::descr_of(dtype)), std::move(shape), std::move(rows)};
}

npy::NpyArray read_tensor(const Queue& queue, const TensorRef& tensor, DType dtype,
                          std::vector<std::int64_t> shape) {
  const std::int64_t num_rows = shape[0];
  return read_tensor(queue, tensor, dtype, std::move(shape), num_rows);
}

}  // namespace clattn::detail
