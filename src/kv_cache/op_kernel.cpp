#include "kv_cache/op_kernel.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/device/device_info.hpp"

namespace clattn::detail {

OpKernel op_kernel(const Context& context, std::string_view entry, std::string_view file,
                   std::string_view options, std::int32_t most_items) {
  const auto size = static_cast<std::size_t>(
      std::min(cache_op_work_group_size(context.capabilities()), most_items));
  return {
      context.runtime().kernel({std::string(file), std::string(entry),
                                fmt::format("-DCLA_WG_SIZE={} -DCLA_PTX={} {}", size,
                                            context.capabilities().inline_ptx ? 1 : 0, options)}),
      size};
}

std::string dtype_options(DType dtype, DType cache_dtype) {
  require_whole_bytes(cache_dtype);
  if (is_quantized(dtype)) throw_invalid("dtype is {}, legal: f32, f16, bf16", to_string(dtype));
  return fmt::format("-DCLA_Q_DTYPE={} -DCLA_KV_DTYPE={}", static_cast<int>(dtype),
                     static_cast<int>(cache_dtype));
}

}  // namespace clattn::detail

namespace clattn {

std::int32_t cache_op_work_group_size(const DeviceCapabilities& device) {
  constexpr std::uint64_t kGroup = 128;
  if (detail::takes_single_items(device)) return 1;
  return static_cast<std::int32_t>(std::min<std::uint64_t>(kGroup, device.max_work_group_size));
}

}  // namespace clattn
