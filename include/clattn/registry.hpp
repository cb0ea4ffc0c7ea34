#pragma once

#include <clattn/attention_backend.hpp>
#include <clattn/types.hpp>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

/// The backends that are registered now, in priority order, kept alive by the result. The first
/// call of the process loads the plugins of CLATTN_PLUGINS and throws what load_backend_plugin()
/// throws. Thread-safe.
std::vector<std::shared_ptr<const AttentionBackend>> list_attn_backends();

/// The registered backend of this name. Null for "auto", which leaves the choice to whoever is
/// given it (AttentionOptions::attn_backend). Also accepts vLLM's names for the built-in ones
/// (XFORMERS_VLLM_V1, class paths). Throws kInvalidArgument listing the registered names for any
/// other; for vLLM's name of another library's backend (FLASH_ATTN, in any letter case) the message
/// also says which backend computes the same here, or what none computes.
std::shared_ptr<const AttentionBackend> find_attn_backend(std::string_view name);

/// What the selector decided and why the others were passed over.
struct BackendChoice {
  std::shared_ptr<const AttentionBackend> backend = {};  ///< null when every backend was rejected
  /// A backend and why it cannot serve the configuration, one sentence each.
  struct Rejection {
    std::string name = {};                  ///< AttentionBackend::name()
    std::vector<std::string> reasons = {};  ///< at least one
  };
  std::vector<Rejection> rejected = {};  ///< in the order in which they were asked
};

/// Asks every backend in order; the first without reasons wins. Never throws for an unsupported
/// configuration.
BackendChoice choose_attn_backend(const AttentionConfig& config,
                                  const DeviceCapabilities* capabilities);

/// The position after every backend that is registered.
inline constexpr std::size_t kLowestPriority = std::numeric_limits<std::size_t>::max();

/// Adds a backend at a place of the priority order: 0 = before all others. Throws kInvalidArgument
/// for null, a name that is empty, reserved ("auto", "NO_ATTENTION") or taken, or a place beyond
/// the end. Thread-safe.
void register_backend(std::shared_ptr<const AttentionBackend> backend,
                      std::size_t position = kLowestPriority);

/// Takes a backend out, built-in ones too, and returns it; throws kInvalidArgument with the names
/// that exist when there is none of this name. Never waits for users: impls, builders, layers and
/// snapshots of it stay valid, and whoever holds them (or the result) keeps what they need alive.
/// Plain references are valid only while it is registered. Thread-safe.
std::shared_ptr<const AttentionBackend> unregister_backend(std::string_view name);

}  // namespace clattn
