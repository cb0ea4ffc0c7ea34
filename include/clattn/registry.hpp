#pragma once

#include <clattn/attention.hpp>
#include <clattn/types.hpp>
#include <cstddef>
#include <limits>
#include <memory>
#include <string_view>

namespace CLATTN_API clattn {

/// The position behind every backend that is registered.
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
