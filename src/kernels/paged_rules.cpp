#include "kernels/paged_rules.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "base/error.hpp"
#include "kernels/variants.hpp"

namespace clattn::detail {

namespace {

constexpr std::int32_t kMaxHeads = 4096;  // keeps work-group counts far below 2^31

bool role_has_variant(Role role, const AttentionConfig& config,
                      const DeviceCapabilities& capabilities) {
  for (const KernelFamily family : family_ladder(config.kernel_family, capabilities)) {
    for (const Variant& variant : variants()) {
      if (variant.role == role && variant.family == family &&
          why_not(variant, capabilities).empty()) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

void append_common_reasons(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                           std::vector<std::string>& reasons) {
  if (config.num_heads < 1 || config.num_heads > kMaxHeads) {
    reasons.push_back(
        fmt::format("num_heads is {}, supported: 1 … {}", config.num_heads, kMaxHeads));
  }
  if (config.num_kv_heads < 1) {
    reasons.push_back(fmt::format("num_kv_heads is {}, supported: >= 1", config.num_kv_heads));
  } else if (config.num_heads % config.num_kv_heads != 0) {
    reasons.push_back(fmt::format("num_heads ({}) is not divisible by num_kv_heads ({})",
                                  config.num_heads, config.num_kv_heads));
  }
  if (config.head_size < 8 || config.head_size > 256 || config.head_size % 8 != 0) {
    reasons.push_back(
        fmt::format("head_size {} not supported: 8 … 256 in steps of 8 are", config.head_size));
  }
  if (config.block_size < 1) {
    reasons.push_back(fmt::format("block_size is {}, supported: >= 1", config.block_size));
  }
  if (config.scale && !std::isfinite(*config.scale)) {
    reasons.push_back(fmt::format("scale is {}, supported: finite numbers", *config.scale));
  }
  if (capabilities == nullptr) return;
  if (config.kernel_family == KernelFamily::kGpuPtx && !capabilities->inline_ptx) {
    reasons.push_back(
        fmt::format("kernel family gpu_ptx needs inline PTX, which {} lacks", capabilities->name));
  }
  for (const Role role : {Role::kPrefill, Role::kMerge, Role::kCacheWrite}) {
    if (!role_has_variant(role, config, *capabilities)) {
      reasons.push_back(fmt::format("no {} kernel of family {} runs on {}", to_string(role),
                                    to_string(config.kernel_family), capabilities->name));
    }
  }
}

void require_valid(std::string_view backend, const std::vector<std::string>& reasons) {
  if (reasons.empty()) return;
  throw_unsupported("backend {} does not support this configuration: {}", backend,
                    fmt::join(reasons, "; "));
}

}  // namespace clattn::detail
