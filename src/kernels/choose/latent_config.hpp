#pragma once

#include <clattn/attention.hpp>
#include <clattn/mla.hpp>
#include <string>
#include <vector>

namespace clattn::detail {

/// The latent attention of a layer with use_mla.
MLAConfig mla_config(const AttentionConfig& config);

/// Reasons against a layer with use_mla: its shape, options that latent attention does not compute,
/// those of append_engine_reasons() and, unless `capabilities` is null, a device without kernels.
void append_latent_reasons(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                           std::vector<std::string>& reasons);

}  // namespace clattn::detail
