#pragma once

#include <clattn/backend_abi.h>

#include <clattn/attention.hpp>
#include <memory>
#include <string>

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

/// The registry's view of a plugin. What it makes keeps the library open.
std::shared_ptr<const AttentionBackend> make_plugin_backend(
    std::shared_ptr<const PluginLibrary> library);

}  // namespace clattn::detail
