#pragma once

#include <clattn/registry.hpp>
#include <clattn/types.hpp>
#include <memory>
#include <string>

namespace CLATTN_API clattn {

/// A backend out of a shared object (clattn/backend_abi.h), registered for as long as this handle
/// lives. The code is unloaded when the handle and every user (impls, builders, layers, snapshots
/// of the registry) are gone, whichever goes last. Move-only.
class BackendPlugin {
 public:
  /// Registers the backend at `position` (register_backend()), whose errors it throws.
  explicit BackendPlugin(std::shared_ptr<const AttentionBackend> backend,
                         std::size_t position = kLowestPriority);
  BackendPlugin(BackendPlugin&&) noexcept = default;
  BackendPlugin& operator=(BackendPlugin&& other) noexcept;
  ~BackendPlugin();

  /// Null after reset().
  const std::shared_ptr<const AttentionBackend>& backend() const noexcept { return backend_; }
  /// Unregisters and lets go of the backend; the destructor's work, earlier.
  void reset() noexcept;

 private:
  std::shared_ptr<const AttentionBackend> backend_;
};

/// Loads the shared object and registers its backend. Refused, with the path and the reason, when
/// it cannot be opened (kIo), has no entry point, speaks another version of the ABI, has a struct
/// of another size, lacks a function, refuses by itself (kUnsupported), or brings a name that is
/// taken (kInvalidArgument). Thread-safe.
BackendPlugin load_backend_plugin(const std::string& path, std::size_t position = kLowestPriority);

}  // namespace clattn
