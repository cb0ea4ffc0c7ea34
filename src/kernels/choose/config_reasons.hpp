#pragma once

#include <clattn/attention.hpp>
#include <clattn/mla.hpp>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/choose/variants.hpp"

namespace clattn::detail {

inline constexpr std::int32_t kMaxHeads = 4096;  ///< keeps work-group counts far below 2^31

/// The fields by which layers look at what a batch says of its requests.
struct ListField {
  std::string_view name;
  bool AttentionConfig::*use;
};
inline constexpr ListField kListFields[] = {{"use_spans", &AttentionConfig::use_spans},
                                            {"use_directions", &AttentionConfig::use_directions},
                                            {"use_first_keys", &AttentionConfig::use_first_keys},
                                            {"use_keep_keys", &AttentionConfig::use_keep_keys},
                                            {"use_trees", &AttentionConfig::use_trees}};

/// Reasons that hold for every backend whatever its kernels: numbers without a meaning, and what
/// the engine means to do with the layer (AttentionConfig::use_…).
void append_config_reasons(const AttentionConfig& config, std::vector<std::string>& reasons);

/// Reasons against the type of a layer's tensors.
void append_type_reasons(DType dtype, std::vector<std::string>& reasons);

/// Elements of the largest heads that the library's own kernels support: over pages and without
/// them, and over x-packed pages.
inline constexpr std::int32_t kMaxHeadSize = 512, kMaxPackedHeadSize = 256;
constexpr bool takes_head_size(std::int32_t head_size, std::int32_t most = kMaxHeadSize) {
  return head_size >= 8 && head_size <= most && head_size % 8 == 0;
}
/// Appends that a cache with a scale for each token and head is not supported by whom, if it is
/// one.
void refuse_row_scales(const AttentionConfig& config, std::string_view by,
                       std::vector<std::string>& reasons);

/// Appends why a head size is not supported, if it is not.
void append_head_size_reason(std::int32_t head_size, std::vector<std::string>& reasons,
                             std::int32_t most = kMaxHeadSize);

/// append_config_reasons(), and what every backend on the library's own kernels refuses apart from
/// head sizes: MLA, a kv_cache_dtype of its own where there is no cache, and devices without
/// kernels of the wanted family. Appends one sentence each.
void append_common_reasons(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                           std::vector<std::string>& reasons);

/// The latent attention of a layer with use_mla.
MLAConfig mla_config(const AttentionConfig& config);

/// Reasons against a layer with use_mla: its shape, options that latent attention does not compute,
/// what the engine means to do with it and, unless `capabilities` is null, a device without
/// kernels.
void append_latent_reasons(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                           std::vector<std::string>& reasons);

/// A reason for every role of `roles` that has no kernel of the family for the device.
void append_missing_kernels(std::initializer_list<Role> roles, KernelFamily family,
                            const DeviceCapabilities& capabilities,
                            std::vector<std::string>& reasons);

/// Throws kUnsupported with the reasons unless there are none.
void require_valid(std::string_view backend, const std::vector<std::string>& reasons);

}  // namespace clattn::detail
