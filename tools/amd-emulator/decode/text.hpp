// What the decoder does with text.
#pragma once
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace amdemu {

[[noreturn]] inline void not_understood(const std::string& what) {
  throw std::runtime_error(what);
}

inline std::string_view trim(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}
/// Takes `prefix` from the front of a text, if it begins so.
inline bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}
/// Decimal or, with 0x, hexadecimal; what follows is left alone.
inline long number(std::string_view text) {
  return std::strtol(std::string(text).c_str(), nullptr, 0);
}
/// Parts between separators outside of brackets, trimmed, without the empty ones.
std::vector<std::string_view> split(std::string_view text, char separator);

}  // namespace amdemu
