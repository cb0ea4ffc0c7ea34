#pragma once

#include <fmt/format.h>

#include <array>
#include <clattn/log.hpp>
#include <string_view>
#include <utility>

namespace clattn::detail {

/// By LogLevel.
inline constexpr std::array<std::string_view, 4> kLogLevels = {"off", "info", "debug", "trace"};

/// Whether messages of the level are wanted.
bool logs(LogLevel level);

void write_log(LogLevel level, std::string_view message);

/// Formats only what is wanted.
template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (logs(level)) write_log(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace clattn::detail
