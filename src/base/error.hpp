#pragma once

#include <fmt/format.h>

#include <clattn/error.hpp>
#include <string>
#include <utility>
#include <vector>

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

/// Checks: throw what the two above throw where `wrong`. The arguments are evaluated either way.
template <typename... Args>
void throw_invalid_if(bool wrong, fmt::format_string<Args...> format, Args&&... args) {
  if (wrong) throw_invalid(format, std::forward<Args>(args)...);
}
template <typename... Args>
void throw_unsupported_if(bool wrong, fmt::format_string<Args...> format, Args&&... args) {
  if (wrong) throw_unsupported(format, std::forward<Args>(args)...);
}

/// Appends a formatted sentence where `holds`. The arguments are evaluated either way.
template <typename... Args>
void append_if(std::vector<std::string>& reasons, bool holds, fmt::format_string<Args...> format,
               Args&&... args) {
  if (holds) reasons.push_back(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace clattn::detail
