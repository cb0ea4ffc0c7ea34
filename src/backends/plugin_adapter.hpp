#pragma once

#include <clattn/backend_abi.h>
#include <clattn/attention_backend.hpp>

#include <array>
#include <clattn/attention.hpp>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/step/cache_checks.hpp"
#include "kernels/step/paged_builder.hpp"

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

using StrideOrder = std::array<std::int32_t, 5>;

/// What a plugin's `validate` or `impl_create` is to be given, all defaults resolved.
struct PluginConfig {
  explicit PluginConfig(const AttentionConfig& given);
  PluginConfig(const PluginConfig&) = delete;  // pointers in `config` are into `resolved`
  PluginConfig& operator=(const PluginConfig&) = delete;

  AttentionConfig resolved;
  ClattnAttentionConfig config{};
};

/// Throws what a plugin's call reported.
void check_status(ClattnStatus& status, std::string_view backend, std::string_view call);

/// What a plugin's forward() reads of a step.
class PluginMetadata final : public AttentionMetadata {
 public:
  ClattnBatch batch{};
  std::int32_t block_size = 0;
  ListRules lists;   ///< what of the batch's lists is in seen_keys
  KeyWindow window;  ///< that they keep to
  KeptLists kept;    ///< the batch's
  BlockBound block_ids;

 private:
  friend class PluginMetadataBuilder;
};

/// The builder of a plugin's steps, which keeps the plugin loaded.
std::unique_ptr<AttentionMetadataBuilder> make_plugin_builder(
    std::shared_ptr<const AttentionBackend> backend, std::shared_ptr<Context> context,
    const AttentionConfig& config, const BuilderOptions& options);

/// A layer of a plugin, which it keeps loaded.
std::shared_ptr<const AttentionImpl> make_plugin_impl(std::shared_ptr<const PluginLibrary> library,
                                                      const AttentionBackend& backend,
                                                      std::shared_ptr<Context> context,
                                                      const AttentionConfig& config);

}  // namespace clattn::detail
