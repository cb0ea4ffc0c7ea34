#pragma once

#include <fmt/format.h>

#include <clattn/error.hpp>
#include <concepts>
#include <cstddef>
#include <utility>

namespace clattn::cli {

/// Throw an Error of their kind with a formatted message.
template <typename... Args>
[[noreturn]] void throw_invalid(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
[[noreturn]] void throw_unsupported(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kUnsupported, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
[[noreturn]] void throw_io(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kIo, fmt::format(format, std::forward<Args>(args)...));
}
/// A check; its arguments are evaluated either way.
template <typename... Args>
void throw_invalid_if(bool wrong, fmt::format_string<Args...> format, Args&&... args) {
  if (wrong) throw_invalid(format, std::forward<Args>(args)...);
}

/// A number of things that is known not to be negative.
constexpr std::size_t to_size(std::integral auto count) {
  return static_cast<std::size_t>(count);
}

template <std::integral T>
constexpr T ceil_div(T a, T b) {
  return static_cast<T>(a / b + (a % b != 0 ? 1 : 0));
}

}  // namespace clattn::cli
