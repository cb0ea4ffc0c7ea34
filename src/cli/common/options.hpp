#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>
#include <type_traits>

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

}  // namespace clattn::cli
