#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace clattn::cli {

/// Refuses what is not a number of type T in [low, high], in one line with the legal range.
template <typename T>
CLI::Validator number_in(T low, T high) {
  const auto check = [low, high](std::string& text) -> std::string {
    T value{};
    const bool fits = CLI::detail::lexical_cast(text, value) && value >= low && value <= high;
    if (fits) return {};
    return fmt::format("'{}' is not legal: {} {} to {}", text,
                       std::is_integral_v<T> ? "an integer" : "a number", low, high);
  };
  return {check, fmt::format("{}..{}", low, high)};
}

/// The same for names. Of CLI::IsMember's, the message would have another form.
inline CLI::Validator one_of(std::span<const std::string_view> names) {
  const std::string list = fmt::format("{}", fmt::join(names, ", "));
  const auto check = [names = std::vector<std::string>(names.begin(), names.end()),
                      list](std::string& text) -> std::string {
    if (std::ranges::find(names, text) != names.end()) return {};
    return fmt::format("'{}' is not legal: one of {}", text, list);
  };
  return {check, list};
}
inline CLI::Validator one_of(std::initializer_list<std::string_view> names) {
  return one_of(std::span(names.begin(), names.size()));
}

inline CLI::Option* add_device(CLI::App& command, std::string& device,
                               std::string_view standard = "the one that programs use") {
  return command.add_option(
      "--device", device,
      fmt::format("gpu, cpu, PLATFORM:DEVICE or part of a name; default: {}", standard));
}

/// An option that takes A,B and may be given again.
inline CLI::Option* add_list(CLI::App& command, const char* name, std::vector<std::string>& list,
                             const char* help) {
  return command.add_option(name, list, help)->delimiter(',')->allow_extra_args(false);
}

}  // namespace clattn::cli
