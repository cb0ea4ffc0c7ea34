#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <iterator>

#include "opencl/program/source.hpp"

namespace clattn::detail {
namespace {

bool is_word(char c) {
  return c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0;
}

bool is_ours(std::string_view word) {
  const bool type = word.starts_with("Cla") && word.size() > 3 &&
                    std::isupper(static_cast<unsigned char>(word[3])) != 0;
  return type || word.starts_with("cla_") || word.starts_with("CLA_") ||
         word.starts_with("CLATTN_");
}

/// Appends `text` with the part's number in every name of ours: cla_dot of part 2 is cla2_dot.
void append_numbered(std::string& result, std::string_view text, std::size_t part) {
  const std::string number = std::to_string(part);
  while (!text.empty()) {
    const auto at = std::ranges::find_if(text, is_word);
    const auto end = std::find_if_not(at, text.end(), is_word);
    const std::string_view word(at, end);
    result.append(text.begin(), at);
    if (word.starts_with("clattn_")) {
      result.append(bundled_entry(word, part));
    } else if (is_ours(word)) {
      result.append(word.substr(0, 3)).append(number).append(word.substr(3));
    } else {
      result.append(word);
    }
    text = {end, text.end()};
  }
}

/// "-DNAME=VALUE …" as lines "#define NAME VALUE"; nothing where an option is of another kind.
std::optional<std::string> definitions(std::string_view options) {
  std::string lines;
  while (!options.empty()) {
    const std::string_view option = options.substr(0, options.find(' '));
    options.remove_prefix(std::min(option.size() + 1, options.size()));
    if (option.empty()) continue;
    const std::size_t equals = option.find('=');
    if (!option.starts_with("-D") || equals == std::string_view::npos) return std::nullopt;
    fmt::format_to(std::back_inserter(lines), "#define {} {}\n", option.substr(2, equals - 2),
                   option.substr(equals + 1));
  }
  return lines;
}

}  // namespace

std::optional<std::string> bundle_sources(std::span<const BundlePart> parts) {
  std::string result;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::optional<std::string> macros = definitions(parts[i].options);
    if (!macros) return std::nullopt;
    append_numbered(result, *macros, i);
    append_numbered(result, parts[i].text, i);
  }
  return result;
}

std::string bundled_entry(std::string_view entry, std::size_t part) {
  return fmt::format("{}_{}", entry, part);
}

}  // namespace clattn::detail
