#pragma once

#include <charconv>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace clattn::cli {

/// The whole of a text as a number; nothing if it is anything else.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && rest == end ? std::optional(value) : std::nullopt;
}

/// How things are called, by a member or a function: for lists of what is legal.
template <typename Text = std::string, typename Things, typename Name>
std::vector<Text> names_of(const Things& things, Name name) {
  std::vector<Text> names;
  names.reserve(std::size(things));
  for (const auto& thing : things) names.emplace_back(std::invoke(name, thing));
  return names;
}

}  // namespace clattn::cli
