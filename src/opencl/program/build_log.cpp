#include <algorithm>
#include <charconv>

#include "base/error.hpp"
#include "opencl/program/source.hpp"

namespace clattn::detail {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// `:LINE:COLUMN` at the start of `text`: the line and the length of `:LINE`; zeros without one.
struct Position {
  std::size_t line = 0;
  std::size_t length = 0;
};

Position parse_position(std::string_view text) {
  const char* const end = text.data() + text.size();
  std::size_t line = 0, column = 0;
  const auto [colon, failed] = std::from_chars(text.data() + 1, end, line);
  if (failed != std::errc{} || colon == end || *colon != ':' ||
      std::from_chars(colon + 1, end, column).ec == std::errc::invalid_argument)
    return {};
  return {line, static_cast<std::size_t>(colon - text.data())};
}

/// Length of the compiler's name for our source at the end of `text`. The name is bracketed
/// (`<program source>`) or free of blanks (a path, `1`).
std::size_t source_name_length(std::string_view text) {
  if (text.ends_with('>')) {
    const std::size_t open = text.rfind('<');
    return open == std::string_view::npos ? 0 : text.size() - open;
  }
  const std::size_t before = text.find_last_of(" \t\n\r\"'(");
  return before == std::string_view::npos ? text.size() : text.size() - before - 1;
}

/// Whether a compiler may call our source `name`. It gets one text without headers, so a `.h` is
/// the compiler's own (notes on built-in functions point there); a bare number is a source only as
/// "1", else it is likely a clock.
bool may_name_our_source(std::string_view name) {
  const bool number = std::ranges::all_of(name, is_digit);
  return !name.empty() && !name.ends_with(".h") && (!number || name == "1");
}

}  // namespace

std::string rewrite_build_log(std::string_view log, const FlatSource& source) {
  std::string result;
  std::size_t copied = 0;  // log[0, copied) is in `result`
  for (std::size_t colon = log.find(':'); colon != std::string_view::npos;
       colon = log.find(':', std::max(colon + 1, copied))) {
    const Position position = parse_position(log.substr(colon));
    const std::string_view before = log.substr(copied, colon - copied);
    if (position.line == 0 || position.line > source.lines.size()) continue;
    const std::size_t name_at = before.size() - source_name_length(before);
    if (!may_name_our_source(before.substr(name_at))) continue;
    const FlatSource::Origin& origin = source.lines[position.line - 1];
    result.append(before.substr(0, name_at))
        .append(fmt::format("{}:{}", source.files[origin.file], origin.line));
    copied = colon + position.length;
  }
  return result.append(log.substr(copied));
}

}  // namespace clattn::detail
