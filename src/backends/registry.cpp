#include "backends/registry.hpp"

#include <array>

namespace clattn {

std::span<const AttentionBackend* const> list_attn_backends() {
  static const std::array backends = {
#define CLATTN_BACKEND(function) &detail::function(),
#include "backends/backend_list.inc"
#undef CLATTN_BACKEND
  };
  return backends;
}

}  // namespace clattn
