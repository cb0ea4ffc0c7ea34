#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"

// Tables of values and their names.

namespace clattn::detail {

template <typename Value>
struct Named {
  Value value;
  std::string_view name;
};

/// `what`: what errors call the value, here and below.
template <typename Rows, typename Value>
const auto& row_of(const Rows& rows, Value value, std::string_view what) {
  for (const auto& row : rows) {
    if (row.value == value) return row;
  }
  throw_invalid("{}: {} is no legal value", what, static_cast<int>(value));
}

/// "f32, f16"
template <typename Rows>
std::string names_of(const Rows& rows) {
  std::string list;
  for (const auto& row : rows) list += fmt::format("{}{}", list.empty() ? "" : ", ", row.name);
  return list;
}

template <typename Rows>
auto find_named(const Rows& rows, std::string_view name) {
  const auto* const row = std::ranges::find(rows, name, [](const auto& each) { return each.name; });
  return row == std::end(rows) ? std::nullopt : std::optional(row->value);
}

template <typename Rows>
auto parse_named(const Rows& rows, std::string_view name, std::string_view what) {
  if (const auto value = find_named(rows, name)) return *value;
  throw_invalid("{}: '{}' is not one of {}", what, name, names_of(rows));
}

}  // namespace clattn::detail
