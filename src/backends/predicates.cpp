#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/attention.hpp>
#include <optional>

#include "backends/registry.hpp"
#include "base/checked.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/device/device_info.hpp"

namespace clattn {

std::array<std::int32_t, 5> detail::DescribedBackend::get_kv_cache_stride_order(
    KVCacheLayout layout) const {
  const auto reasons = validate_layout(layout);
  if (!reasons.empty()) throw_unsupported("{}", reasons.front());
  // A latent row has one head: both layouts are the same memory.
  if (layout == KVCacheLayout::kNHD || is_mla()) return {0, 1, 2, 3, 4};
  return {0, 1, 3, 2, 4};
}

void AttentionImpl::forward_checked(cl_command_queue queue, const AttentionTensors& tensors,
                                    const KVCache& cache, const AttentionMetadata& metadata,
                                    const ForwardOptions& options) const {
  if (config().contiguous_kv()) return forward_encoder(queue, tensors, metadata, options);
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

AttentionConfig AttentionBackend::common_configuration() const {
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
          if (validate_configuration(config, nullptr).empty()) return config;
          if (!first) first = config;
        }
      }
    }
  }
  return first.value();
}

std::vector<std::string> AttentionBackend::validate_layout(KVCacheLayout layout) const {
  const auto layouts = supported_layouts();
  if (std::ranges::find(layouts, layout) != layouts.end()) return {};
  std::vector<std::string_view> names;
  for (const KVCacheLayout each : layouts) names.push_back(to_string(each));
  if (names.empty()) names.emplace_back("none");
  return {fmt::format("layout {} not supported by {}: {} {}", to_string(layout), name(),
                      fmt::join(names, ", "), names.size() == 1 ? "is" : "are")};
}

std::int32_t AttentionBackend::get_preferred_block_size(std::int32_t default_size) const {
  detail::check_at_least("default_size", default_size, 1);
  std::int32_t smallest = default_size;
  for (bool first = true; const SupportedBlockSize& pages : get_supported_kernel_block_sizes()) {
    if (detail::takes(pages, default_size)) return default_size;
    smallest = first ? pages.size : std::min(smallest, pages.size);
    first = false;
  }
  return smallest;
}

std::vector<std::int32_t> AttentionBackend::get_supported_head_sizes() const {
  constexpr std::int32_t kLargest = 1024;
  AttentionConfig config = common_configuration();
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
    if (why_not(&AttentionConfig::dtype, dtype).empty()) supported.push_back(dtype);
  }
  return supported;
}

void AttentionBackend::validate_head_size(std::int32_t head_size) const {
  const auto reasons = why_not(&AttentionConfig::head_size, head_size);
  if (!reasons.empty()) detail::throw_unsupported("{}", fmt::join(reasons, "; "));
}

}  // namespace clattn
