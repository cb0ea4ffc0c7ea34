#pragma once

#include <fmt/format.h>

#include <clattn/error.hpp>
#include <utility>

namespace clattn::detail {

/// Throws Error(kInvalidArgument) with a formatted message.
template <typename... Args>
[[noreturn]] void throw_invalid(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...));
}

/// Throws Error(kUnsupported) with a formatted message.
template <typename... Args>
[[noreturn]] void throw_unsupported(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kUnsupported, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace clattn::detail
