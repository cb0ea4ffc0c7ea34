#pragma once

#include <array>
#include <clattn/attention.hpp>
#include <clattn/attention_config.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace CLATTN_API clattn {

/// A page size that a backend's kernels take: exactly `size` tokens, or every multiple of it.
struct SupportedBlockSize {
  std::int32_t size = 1;  ///< tokens
  bool multiples = true;  ///< whether multiples of size are taken, too
  bool operator==(const SupportedBlockSize&) const = default;
};

/// A registry entry: capability predicates, cache shape and the factory of its collaborators.
/// Immutable and thread-safe. Made by std::make_shared, so that shared_from_this() keeps one beyond
/// its registration.
class AttentionBackend : public std::enable_shared_from_this<AttentionBackend> {
 public:
  AttentionBackend() = default;
  AttentionBackend(const AttentionBackend&) = delete;
  AttentionBackend& operator=(const AttentionBackend&) = delete;
  virtual ~AttentionBackend() = default;
  /// Upper-case identifier, unique in the registry.
  virtual std::string_view name() const noexcept = 0;
  /// Path of the plug-in that it comes from; empty = linked into the process.
  virtual std::string library() const { return {}; }
  /// Whether it takes configurations with use_mla, and only those; its caches hold one latent row
  /// per token instead of K and V.
  virtual bool is_mla() const noexcept { return false; }
  /// Why this configuration cannot run here, one sentence each; empty = it can. `capabilities` may
  /// be null: then only the configuration is judged.
  virtual std::vector<std::string> validate_configuration(
      const AttentionConfig& config, const DeviceCapabilities* capabilities) const = 0;

  /// What validate_configuration() says about one field when all others suit this backend, one
  /// sentence each; empty = it takes the value: why_not(&AttentionConfig::head_size, 96). Asked
  /// without a device.
  template <typename Value>
  std::vector<std::string> why_not(Value AttentionConfig::*field,
                                   const std::type_identity_t<Value>& value) const {
    AttentionConfig config = common_configuration();
    config.*field = value;
    return validate_configuration(config, nullptr);
  }
  /// A configuration that it takes, to ask about others that differ from it in a field or two; some
  /// configuration if it takes no common one.
  AttentionConfig common_configuration() const;
  /// Every head size from 1 to 1024 that it takes.
  std::vector<std::int32_t> get_supported_head_sizes() const;
  /// Every type of query and output that it takes.
  std::vector<DType> get_supported_dtypes() const;
  /// Throws kUnsupported with the reasons against this head size, if there are any.
  void validate_head_size(std::int32_t head_size) const;

  /// The page sizes, in tokens, that its kernels read; an allocator's larger blocks consist of
  /// several such pages (map_to_kernel_blocks()).
  virtual std::vector<SupportedBlockSize> get_supported_kernel_block_sizes() const {
    return {SupportedBlockSize{}};
  }
  /// `default_size` if its kernels read such pages, else the smallest page that they read.
  std::int32_t get_preferred_block_size(std::int32_t default_size = 16) const;
  /// The most that AttentionState can record for layers of this backend. kAlways: mixed batches
  /// (BuilderOptions::graph_mixed). kUniformBatch here means more than vLLM's: requests of a
  /// recorded step may differ in their query tokens, up to decode_threshold.
  virtual AttentionCGSupport graph_support() const noexcept { return AttentionCGSupport::kNever; }
  /// The same for layers of this configuration; decoders alone take mixed batches.
  virtual AttentionCGSupport get_cudagraph_support(const AttentionConfig&) const {
    return graph_support();
  }
  /// Whether its builders take BuilderOptions::device_query_lens: decodes whose query lengths are
  /// others on the device than on the host, as adaptive verification makes them.
  virtual bool supports_device_cpu_query_lens_mismatch() const noexcept { return false; }
  /// The most query tokens that decodes of one recorded step may have, each another number (vLLM:
  /// get_varlen_cudagraph_max_query_len); nullopt: all must have equally many, or nothing is
  /// recorded. `decode_threshold`: of the builder that records.
  virtual std::optional<std::int32_t> get_varlen_cudagraph_max_query_len(
      const AttentionConfig&, std::int32_t decode_threshold) const {
    static_cast<void>(decode_threshold);
    return std::nullopt;
  }
  /// Logical shape of one layer's cache. MLA backends: (1, num_blocks, block_size, 1, head_size),
  /// which is the memory of vLLM's (num_blocks, block_size, head_size).
  virtual std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t num_blocks,
                                                         std::int32_t block_size,
                                                         std::int32_t num_kv_heads,
                                                         std::int32_t head_size) const = 0;
  /// Which logical dimension is at each place in memory, slowest first.
  /// Throws kUnsupported for a layout that is not among supported_layouts().
  virtual std::array<std::int32_t, 5> get_kv_cache_stride_order(KVCacheLayout layout) const = 0;
  /// The logical dimension that holds K (0) and V (1); of size 1 where one row is both (MLA).
  virtual std::int32_t kv_dimension() const noexcept = 0;
  /// The layouts that get_kv_cache_stride_order() takes; the span is valid as long as the backend.
  virtual std::span<const KVCacheLayout> supported_layouts() const noexcept = 0;
  /// Why caches of `layout` do not serve its layers, one sentence each; empty = they do.
  std::vector<std::string> validate_layout(KVCacheLayout layout) const;
  /// The one layout that works, or nullopt when there is a choice.
  std::optional<KVCacheLayout> get_required_kv_cache_layout() const {
    const auto layouts = supported_layouts();
    return layouts.size() == 1 ? std::optional(layouts.front()) : std::nullopt;
  }
  /// The layout that is fastest on this device.
  virtual KVCacheLayout preferred_layout(const DeviceCapabilities& capabilities) const noexcept = 0;
  /// The kernels of a configuration, compiled, which takes seconds at first use, or taken from the
  /// program cache. Layers of one configuration can share it. Throws kUnsupported with the reasons
  /// of validate_configuration(), and kOpenCL if the driver builds none of the kernels.
  virtual std::shared_ptr<const AttentionImpl> make_impl(std::shared_ptr<Context> context,
                                                         const AttentionConfig& config) const = 0;
  /// Plans steps for layers of this configuration; takes device memory at its first build(). Throws
  /// what make_impl() throws, and kInvalidArgument for options out of range.
  virtual std::unique_ptr<AttentionMetadataBuilder> make_builder(
      std::shared_ptr<Context> context, const AttentionConfig& config,
      const BuilderOptions& options = {}) const = 0;
};

/// The backend for a configuration. `name` (or, when empty, the environment's CLATTN_BACKEND)
/// forces one; it is looked up, and refused if unknown, by find_attn_backend(). A forced backend
/// that does not fit throws kUnsupported with its reasons. "auto" and "" choose. An attention-free
/// configuration gets NO_ATTENTION, whatever is forced. The result keeps the
/// backend, also beyond unregister_backend().
std::shared_ptr<const AttentionBackend> get_attn_backend(const AttentionConfig& config,
                                                         const DeviceCapabilities* capabilities,
                                                         std::string_view name = {});

/// vLLM's form, judged without a device: the backend for layers of this kind, whatever their head
/// counts. Remembers its answers until the registry changes.
std::shared_ptr<const AttentionBackend> get_attn_backend(std::int32_t head_size, DType dtype,
                                                         std::optional<CacheFormat> kv_cache_dtype,
                                                         std::int32_t block_size,
                                                         bool is_attention_free = false,
                                                         bool use_mla = false,
                                                         bool has_sink = false);

/// The layout of caches that are made without naming one, in whatever way: get_kv_cache_layout(),
/// else the backend's preferred one.
KVCacheLayout default_kv_cache_layout(const AttentionBackend& backend,
                                      const DeviceCapabilities& capabilities);

/// One layer's zeroed cache of `num_blocks` pages, in that layout (nullopt =
/// default_kv_cache_layout()): the short form of allocate_kv_cache and reshape_kv_cache. Throws
/// kUnsupported with the reasons of validate_layout(), if there are any.
KVCache make_kv_cache(const Context& context, cl_command_queue queue,
                      const AttentionBackend& backend, const AttentionConfig& config,
                      std::int64_t num_blocks, std::optional<KVCacheLayout> layout = std::nullopt);

}  // namespace clattn
