#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "program/common/error.hpp"

namespace clattn::cli {

/// The whole of a text as a number; nothing if it is anything else.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && rest == end ? std::optional(value) : std::nullopt;
}

/// Calls `take` with the words of each line that is neither empty nor all comment, which begins
/// with
/// #, and with "NAME:LINE". Throws kInvalidArgument for lines that are too long.
template <typename Take>
void each_line(std::string_view text, std::string_view name, const Take& take) {
  constexpr std::size_t kMostBytes = 1 << 14;
  std::istringstream lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const std::string where = fmt::format("{}:{}", name, number);
    throw_invalid_if(line.size() > kMostBytes, "{}: a line of {} bytes, legal: up to {}", where,
                     line.size(), kMostBytes);
    line.erase(std::min(line.find('#'), line.size()));
    std::istringstream words(line);
    std::vector<std::string> found;
    for (std::string word; words >> word;) found.push_back(word);
    if (!found.empty()) take(found, where);
  }
}

/// How things are called, by a member or a function: for lists of what is legal.
template <typename Text = std::string, typename Things, typename Name>
std::vector<Text> names_of(const Things& things, Name name) {
  std::vector<Text> names;
  names.reserve(std::size(things));
  for (const auto& thing : things) names.emplace_back(std::invoke(name, thing));
  return names;
}

/// The name that the fewest changes of a character turn a misspelt one into, the first of equals;
/// empty if more than half of the characters would change.
template <typename Names>
std::string nearest_name(std::string_view misspelt, const Names& names) {
  std::string nearest;
  std::size_t fewest = std::string::npos;
  for (const std::string_view name : names) {
    std::vector<std::size_t> changes(misspelt.size() + 1);  // of each beginning of `misspelt`
    std::iota(changes.begin(), changes.end(), 0U);
    for (std::size_t n = 0; n < name.size(); ++n) {
      std::size_t diagonal = std::exchange(changes[0], n + 1);
      for (std::size_t m = 0; m < misspelt.size(); ++m) {
        const std::size_t replaced = diagonal + (name[n] == misspelt[m] ? 0 : 1);
        diagonal = changes[m + 1];
        changes[m + 1] = std::min({replaced, diagonal + 1, changes[m] + 1});
      }
    }
    if (changes.back() >= fewest) continue;
    fewest = changes.back();
    nearest = name;
  }
  return fewest <= misspelt.size() / 2 ? nearest : std::string();
}

}  // namespace clattn::cli
