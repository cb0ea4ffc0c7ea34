#pragma once

#include <clattn/context.hpp>
#include <cstddef>
#include <cstdint>

namespace clattn::detail {

/// Whether the library was built with CLBlast.
bool has_clblast() noexcept;

/// C = alpha A B, or with `transposed` alpha A B^T, `count` times: row-major matrices of m x k,
/// k x n (n x k) and m x n elements, one behind the other from these elements of a buffer on.
struct Product {
  bool transposed = false;
  std::size_t m = 0, n = 0, k = 0, count = 0;
  float alpha = 1;
  std::int64_t a = 0, b = 0, c = 0;
};

/// Enqueues it. Throws kOpenCL with the sizes where CLBlast fails, kUnsupported without CLBlast.
void multiply(cl_command_queue queue, cl_mem work, const Product& product);

}  // namespace clattn::detail
