#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <clattn/tuning.hpp>
#include <cmath>
#include <optional>

#include "base/error.hpp"

namespace clattn {
namespace {

constexpr std::string_view kHeader = "clattn-tuning 1";
constexpr std::size_t kMaxRows = 100000;

// ---- one field: how it is written, and what may stand in its place ----

std::string quoted(const std::string& text) {
  const bool plain = !text.empty() && text != "*" && text != "-" &&
                     text.find_first_of(" \t\"#") == std::string::npos;
  return plain ? text : '"' + text + '"';
}

std::string write(const std::string& text, const char* none) {
  return text.empty() ? none : quoted(text);
}
std::string write(std::int32_t value, const char* none) {
  return value == 0 ? none : fmt::format("{}", value);
}
std::string write(std::optional<DType> type, const char* none) {
  return type ? std::string(to_string(*type)) : none;
}
std::string write(double value, const char* none) {
  return value == 0 ? none : fmt::format("{:.4g}", value);
}

/// A field as it was read; a quoted * or - is text.
struct Token {
  std::string text;
  bool quoted = false;
  bool is(std::string_view none) const { return !quoted && text == none; }
};

template <typename Number>
Number parse_number(const std::string& text, Number most, std::string_view field) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || rest != end || !(value > 0) || value > most) {
    detail::throw_invalid("{} is '{}', legal: a number from 1 to {}", field, text, most);
  }
  return value;
}

void read(std::string& value, const Token& token, std::string_view /*field*/, double /*most*/) {
  value = token.text;
}
void read(std::int32_t& value, const Token& token, std::string_view field, double most) {
  value = parse_number(token.text, static_cast<std::int32_t>(most), field);
}
void read(std::optional<DType>& value, const Token& token, std::string_view /*field*/,
          double /*most*/) {
  value = parse_dtype(token.text);
}
void read(double& value, const Token& token, std::string_view field, double most) {
  if (token.text.find_first_not_of("0123456789.e+-") != std::string::npos) {
    detail::throw_invalid("{} is '{}', legal: a positive number", field, token.text);
  }
  value = parse_number(token.text, most, field);
}

// ---- a row: the one list of its fields in their order ----

constexpr double kMostNumber = 1 << 20;
constexpr double kMostMeasured = 1e12;

/// Calls f(value, name, what stands for no value, largest legal number) for each field.
template <typename Row, typename Function>
void each_field(Row& row, Function&& f) {
  f(row.device, "device", "*", 0);
  f(row.driver, "driver", "*", 0);
  f(row.role, "role", "*", 0);
  f(row.head_size, "head_size", "*", kMostNumber);
  f(row.group, "group", "*", kMostNumber);
  f(row.dtype, "dtype", "*", 0);
  f(row.cache_dtype, "cache_dtype", "*", 0);
  f(row.pages, "pages", "*", 0);
  f(row.variant, "variant", "-", 0);
  f(row.block_rows, "block_rows", "-", kMostNumber);
  f(row.block_kv, "block_kv", "-", kMostNumber);
  f(row.work_group_size, "work_group_size", "-", kMostNumber);
  f(row.items_per_compute_unit, "items_per_compute_unit", "-", 1024);
  f(row.min_split_keys, "min_split_keys", "-", kMostNumber);
  f(row.time_us, "time_us", "-", kMostMeasured);
  f(row.error, "error", "-", kMostMeasured);
  f(row.version, "version", "-", 0);
  f(row.date, "date", "-", 0);
}
constexpr std::size_t kNumFields = 18;

/// The words of a line; a quoted one may hold blanks. Throws for a quote without end.
std::vector<Token> split_line(std::string_view line) {
  std::vector<Token> tokens;
  while (true) {
    line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
    if (line.empty() || line.front() == '#') return tokens;
    const bool in_quotes = line.front() == '"';
    if (in_quotes) line.remove_prefix(1);
    const std::size_t end = in_quotes ? line.find('"') : line.find_first_of(" \t\r");
    if (in_quotes && end == std::string_view::npos) {
      throw Error(ErrorCode::kInvalidArgument, "a quote without its end");
    }
    const std::size_t size = std::min(end, line.size());
    tokens.push_back({std::string(line.substr(0, size)), in_quotes});
    line.remove_prefix(std::min(size + (in_quotes ? 1 : 0), line.size()));
  }
}

/// Nothing for a line without a row. Throws kInvalidArgument saying what is wrong.
std::optional<TuningRow> parse_line(std::string_view line) {
  const std::vector<Token> tokens = split_line(line);
  if (tokens.empty()) return std::nullopt;
  if (tokens.size() != kNumFields) {
    detail::throw_invalid("{} fields, legal: {}", tokens.size(), kNumFields);
  }
  TuningRow row;
  std::size_t at = 0;
  each_field(row, [&](auto& value, std::string_view field, std::string_view none, double most) {
    const Token& token = tokens[at++];
    if (!token.is(none)) read(value, token, field, most);
  });
  if (row.device.empty()) detail::throw_invalid("device is missing, legal: a name or a class");
  constexpr std::array<std::string_view, 5> kPages = {"", "none", "small", "medium", "large"};
  if (std::find(kPages.begin(), kPages.end(), row.pages) == kPages.end()) {
    detail::throw_invalid("pages is '{}', legal: *, none, small, medium, large", row.pages);
  }
  return row;
}

}  // namespace

std::string format_tuning_row(const TuningRow& row) {
  std::string line;
  each_field(row, [&](const auto& value, std::string_view, const char* none, double) {
    line += (line.empty() ? "" : " ") + write(value, none);
  });
  return line + '\n';
}

std::string format_tuning(std::span<const TuningRow> rows) {
  std::string text(kHeader);
  text += '\n';
  for (const TuningRow& row : rows) text += format_tuning_row(row);
  return text;
}

TuningText parse_tuning(std::string_view text, const std::string& name) {
  TuningText result;
  const auto complain = [&](std::size_t line, std::string_view what) {
    result.problems.push_back(fmt::format("{}:{}: {}; ignored", name, line, what));
  };
  const std::string_view first = text.substr(0, text.find('\n'));
  if (first != kHeader && first != std::string(kHeader) + '\r') {
    complain(1, fmt::format("not a tuning file of this version, which begin with '{}'", kHeader));
    return result;
  }
  text.remove_prefix(std::min(first.size() + 1, text.size()));
  for (std::size_t number = 2; !text.empty(); ++number) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) {
      complain(number, "cut off before the line's end");
      break;
    }
    if (result.rows.size() == kMaxRows) {
      complain(number, fmt::format("more than {} rows", kMaxRows));
      break;
    }
    try {
      if (auto row = parse_line(text.substr(0, end))) result.rows.push_back(std::move(*row));
    } catch (const Error& error) {
      complain(number, error.what());
    }
    text.remove_prefix(end + 1);
  }
  return result;
}

}  // namespace clattn
