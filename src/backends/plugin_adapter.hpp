#pragma once

#include <clattn/backend_abi.h>

#include <array>
#include <clattn/attention.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/step/cache_checks.hpp"
#include "metadata/validate.hpp"
#include "opencl/staging.hpp"

namespace clattn::detail {

/// An opened shared object with its filled function table: destroys the plugin, then closes the
/// object.
class PluginLibrary {
 public:
  /// Throws as load_backend_plugin() says.
  explicit PluginLibrary(std::string path);
  ~PluginLibrary();
  PluginLibrary(const PluginLibrary&) = delete;
  PluginLibrary& operator=(const PluginLibrary&) = delete;

  const ClattnBackendPlugin& table() const noexcept { return room_.table; }
  const std::string& path() const noexcept { return path_; }

 private:
  void open();
  void fill_table();
  void check_table() const;

  struct Close {
    void operator()(void* object) const noexcept;
  };
  std::string path_;
  std::unique_ptr<void, Close> object_;
  /// Room for the table of a plugin that was compiled against a longer one.
  union Room {
    ClattnBackendPlugin table;
    char bytes[4096];
  } room_{};
};

/// What a plugin says of its caches, against what the library asked for: throws kUnsupported naming
/// backend, place and numbers. `wanted`: K/V, blocks, tokens, heads, dims.
void check_plugin_shape(std::string_view backend, std::int32_t kv_dimension,
                        const std::array<std::int64_t, 5>& shape,
                        const std::array<std::int64_t, 5>& wanted);
/// The C contract has no stride of dims: they stand last.
void check_plugin_order(std::string_view backend, const std::array<std::int32_t, 5>& order);

/// Where a backend's own layouts put the elements of a cache.
class PluginCachePlaces {
 public:
  explicit PluginCachePlaces(const AttentionBackend& backend);
  /// Throws kInvalidArgument naming field, value and legal values for a cache of other strides.
  void check(const KVCache& cache) const;

 private:
  struct Layout {
    KVCacheLayout name;
    std::array<std::int32_t, 5> order;
  };
  std::string_view backend_;
  std::size_t kv_ = 0;  ///< logical dimension of K and V
  std::vector<Layout> layouts_;
};

/// What a plugin's forward() reads of a step.
class PluginMetadata final : public AttentionMetadata {
 public:
  const ClattnBatch& batch() const noexcept { return batch_; }
  std::int32_t block_size() const noexcept { return block_size_; }
  const BlockBound& block_ids() const noexcept { return block_ids_; }

 private:
  friend class PluginMetadataBuilder;
  ClattnBatch batch_{};
  std::int32_t block_size_ = 0;
  BlockBound block_ids_;
};

/// Checks a batch and gives plugins its arrays on the host and, by one upload, on the device.
class PluginMetadataBuilder final : public AttentionMetadataBuilder {
 public:
  PluginMetadataBuilder(std::shared_ptr<const AttentionBackend> backend,
                        std::shared_ptr<Context> context, const AttentionConfig& config,
                        const BuilderOptions& options);

  const AttentionMetadata& build(cl_command_queue queue, const CommonAttentionMetadata& batch,
                                 Event* upload, const BuildOptions& options) override;
  /// Plugins bring their own workspace.
  std::size_t workspace_bytes(const CommonAttentionMetadata& batch) const override {
    check(batch);
    return 0;
  }
  /// Plugins enqueue by themselves, which cannot be recorded.
  bool can_run_in_graph(const CommonAttentionMetadata&) const override { return false; }
  bool reorder_batch(std::span<const std::int32_t> num_scheduled_tokens,
                     std::span<std::int32_t> order) const override {
    return reorder_batch_to_split_decodes_and_prefills(num_scheduled_tokens, decode_threshold_,
                                                       order);
  }
  std::int32_t decode_threshold() const noexcept override { return decode_threshold_; }

 private:
  BatchSummary check(const CommonAttentionMetadata& batch) const;
  void copy_arrays(const CommonAttentionMetadata& batch, std::span<std::byte> bytes);
  std::size_t largest_step_bytes() const;
  void copy_table(const CommonAttentionMetadata& batch, std::span<std::int32_t> table) const;
  void copy_slots(const CommonAttentionMetadata& batch, std::span<std::int64_t> slots) const;

  std::shared_ptr<const AttentionBackend> backend_;  ///< keeps the plugin loaded
  std::shared_ptr<Context> context_;
  BatchLimits limits_;
  std::int32_t decode_threshold_;
  StagedUpload staging_;
  PluginMetadata metadata_;
};

/// The registry's view of a plugin. What it makes keeps the library open.
std::shared_ptr<const AttentionBackend> make_plugin_backend(
    std::shared_ptr<const PluginLibrary> library);

}  // namespace clattn::detail
