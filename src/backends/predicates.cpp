#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/attention.hpp>
#include <optional>

#include "backends/registry.hpp"
#include "base/error.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/device_info.hpp"

namespace clattn {

std::string detail::unsupported_layout(const AttentionBackend& backend, KVCacheLayout layout) {
  std::vector<std::string_view> names;
  for (const KVCacheLayout each : backend.supported_layouts()) names.push_back(to_string(each));
  if (names.empty()) names.emplace_back("none");
  return fmt::format("layout {} not supported by {}: {} {}", to_string(layout), backend.name(),
                     fmt::join(names, ", "), names.size() == 1 ? "is" : "are");
}

void AttentionImpl::forward_checked(cl_command_queue queue, const AttentionTensors& tensors,
                                    const KVCache& cache, const AttentionMetadata& metadata,
                                    const ForwardOptions& options) const {
  if (config().contiguous_kv()) return forward_encoder(queue, tensors, metadata, options);
  if (tensors.key.buffer != nullptr) {
    write_kv_cache(queue, tensors.key, tensors.value, cache, metadata);
  }
  forward(queue, tensors, cache, metadata, options);
}

void AttentionMetadataBuilder::set_workspace_buffer(
    std::shared_ptr<AttentionWorkspace>) {  // NOLINT(*-unnecessary-value-param): overriders keep it
  detail::throw_unsupported("set_workspace_buffer: this builder has no workspace to replace");
}

const AttentionMetadata& AttentionMetadataBuilder::update_block_table(cl_command_queue,
                                                                      const AttentionMetadata&,
                                                                      const GroupPages&, Event*) {
  detail::throw_unsupported("update_block_table: not supported by this builder; use build()");
}

namespace {

/// The first common configuration that the backend takes, to be asked about when only one of its
/// fields matters; the very first when it takes none.
AttentionConfig accepted_configuration(const AttentionBackend& backend) {
  std::optional<AttentionConfig> first;
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const std::int32_t block_size : {16, 32, 64, 128, 1}) {
      for (const std::int32_t head_size : {128, 64, 256, 96, 80, 32, 16, 8, 512, 576}) {
        for (const bool use_mla : {false, true}) {
          const AttentionConfig config{.num_heads = 1,
                                       .num_kv_heads = 1,
                                       .head_size = head_size,
                                       .block_size = block_size,
                                       .dtype = dtype,
                                       .use_mla = use_mla};
          if (backend.validate_configuration(config, nullptr).empty()) return config;
          if (!first) first = config;
        }
      }
    }
  }
  return first.value();
}

template <typename Change>
std::vector<std::string> reasons_against(const AttentionBackend& backend, Change change) {
  AttentionConfig config = accepted_configuration(backend);
  change(config);
  return backend.validate_configuration(config, nullptr);
}

}  // namespace

std::vector<std::string> AttentionBackend::supports_head_size(std::int32_t head_size) const {
  return reasons_against(*this, [&](AttentionConfig& c) { c.head_size = head_size; });
}

std::vector<std::string> AttentionBackend::supports_dtype(DType dtype) const {
  return reasons_against(*this, [&](AttentionConfig& c) { c.dtype = dtype; });
}

std::vector<std::string> AttentionBackend::supports_kv_cache_dtype(
    std::optional<DType> kv_cache_dtype) const {
  return reasons_against(*this, [&](AttentionConfig& c) { c.kv_cache_dtype = kv_cache_dtype; });
}

std::vector<std::string> AttentionBackend::supports_block_size(std::int32_t block_size) const {
  return reasons_against(*this, [&](AttentionConfig& c) { c.block_size = block_size; });
}

std::vector<std::string> AttentionBackend::supports_attn_type(AttentionType attn_type) const {
  return reasons_against(*this, [&](AttentionConfig& c) { c.attn_type = attn_type; });
}

std::vector<std::string> AttentionBackend::supports_sink() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.sinks = {0.0F}; });
}

std::vector<std::string> AttentionBackend::supports_alibi() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.alibi_slopes = {0.5F}; });
}

std::vector<std::string> AttentionBackend::supports_logits_soft_cap() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.logits_soft_cap = 30.0F; });
}

std::vector<std::string> AttentionBackend::supports_sliding_window() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.sliding_window = 128; });
}

std::vector<std::string> AttentionBackend::supports_mla() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.use_mla = true; });
}

std::vector<std::string> AttentionBackend::supports_non_causal() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.use_non_causal = true; });
}

std::vector<std::string> AttentionBackend::supports_batch_invariance() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.use_batch_invariant = true; });
}

std::vector<std::string> AttentionBackend::supports_per_head_quant_scales() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.use_per_head_quant_scales = true; });
}

std::vector<std::string> AttentionBackend::supports_mm_prefix() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.use_mm_prefix = c.custom_mask = true; });
}

std::vector<std::string> AttentionBackend::supports_kv_connector() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.use_kv_connector = true; });
}

std::vector<std::string> AttentionBackend::supports_pcp() const {
  return reasons_against(*this, [](AttentionConfig& c) { c.use_pcp = true; });
}

std::vector<std::string> AttentionBackend::supports_device(
    const DeviceCapabilities& capabilities) const {
  return validate_configuration(accepted_configuration(*this), &capabilities);
}

std::vector<std::string> AttentionBackend::validate_layout(
    KVCacheLayout layout, const AttentionConfig& config,
    const DeviceCapabilities* capabilities) const {
  std::vector<std::string> reasons;
  const auto layouts = supported_layouts();
  if (std::ranges::find(layouts, layout) == layouts.end()) {
    reasons.push_back(detail::unsupported_layout(*this, layout));
  }
  if (layout != KVCacheLayout::kHDN) return reasons;
  const bool gpu_kernels =
      config.kernel_family != KernelFamily::kAuto && config.kernel_family != KernelFamily::kCpu;
  detail::append_if(
      reasons,
      gpu_kernels || (capabilities != nullptr && !detail::takes_single_items(*capabilities)),
      "layout HDN needs the kernels of CPUs: those of GPUs read keys by token");
  detail::append_if(reasons, config.block_size % detail::kKeysByDimTokens != 0,
                    "layout HDN with block_size {} not supported: multiples of {} are",
                    config.block_size, detail::kKeysByDimTokens);
  return reasons;
}

std::vector<std::int32_t> AttentionBackend::get_supported_head_sizes() const {
  constexpr std::int32_t kLargest = 1024;
  AttentionConfig config = accepted_configuration(*this);
  std::vector<std::int32_t> sizes;
  for (config.head_size = 1; config.head_size <= kLargest; ++config.head_size) {
    if (validate_configuration(config, nullptr).empty()) sizes.push_back(config.head_size);
  }
  return sizes;
}

std::vector<DType> AttentionBackend::get_supported_dtypes() const {
  std::vector<DType> supported;
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8}) {
    if (supports_dtype(dtype).empty()) supported.push_back(dtype);
  }
  return supported;
}

void AttentionBackend::validate_head_size(std::int32_t head_size) const {
  const auto reasons = supports_head_size(head_size);
  if (!reasons.empty()) detail::throw_unsupported("{}", fmt::join(reasons, "; "));
}

}  // namespace clattn
