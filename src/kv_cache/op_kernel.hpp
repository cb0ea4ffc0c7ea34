#pragma once

#include <clattn/context.hpp>
#include <clattn/types.hpp>
#include <memory>
#include <string>
#include <string_view>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// The kernel of a cache operation: one code for all devices, in groups as they like them.
struct OpKernel {
  std::shared_ptr<KernelPool> pool;
  std::size_t group_size = 1;
};

/// `options`: the -D options beside CLA_WG_SIZE and CLA_PTX.
OpKernel op_kernel(const Context& context, std::string_view entry, std::string_view file,
                   std::string_view options = {});

/// "-DCLA_Q_DTYPE=… -DCLA_KV_DTYPE=…": a tensor's type, which must not be quantized, and a cache's.
std::string dtype_options(DType dtype, DType cache_dtype);

/// Throws kInvalidArgument unless 0 <= count <= INT32_MAX.
void check_count(std::int64_t count, std::string_view field);

/// An event of a call that may enqueue nothing, left empty then.
inline void clear(Event* event) {
  if (event != nullptr) event->reset();
}

}  // namespace clattn::detail
