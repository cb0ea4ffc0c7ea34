#pragma once

#include <clattn/attention.hpp>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/choose/variants.hpp"

namespace clattn::detail {

/// Reasons against what the engine means to do with the layer (AttentionConfig::use_…), whatever
/// the kernels.
void append_engine_reasons(const AttentionConfig& config, std::vector<std::string>& reasons);

/// Reasons that hold for every backend whatever its kernels: numbers without a meaning, and those
/// of append_engine_reasons().
void append_config_reasons(const AttentionConfig& config, std::vector<std::string>& reasons);

/// What the library's own kernels take.
constexpr bool takes_head_size(std::int32_t head_size) {
  return head_size >= 8 && head_size <= 256 && head_size % 8 == 0;
}
/// The reason against any other.
void append_head_size_reason(std::int32_t head_size, std::vector<std::string>& reasons);

/// Those, and reasons that hold for every backend on the library's own kernels, head sizes aside:
/// MLA, and whether the device has kernels of the wanted family. `reasons` gets a sentence each.
void append_common_reasons(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                           std::vector<std::string>& reasons);

/// A reason for every role of `roles` that has no kernel of the family for the device.
void append_missing_kernels(std::initializer_list<Role> roles, KernelFamily family,
                            const DeviceCapabilities& capabilities,
                            std::vector<std::string>& reasons);

/// Throws kUnsupported with the reasons unless there are none.
void require_valid(std::string_view backend, const std::vector<std::string>& reasons);

}  // namespace clattn::detail
