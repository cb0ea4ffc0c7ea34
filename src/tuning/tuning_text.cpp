#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <clattn/tuning.hpp>
#include <concepts>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "tuning/tuning_table.hpp"

namespace clattn {
namespace {

constexpr std::string_view kHeader = "clattn-tuning 2";
constexpr std::string_view kCost = "cost";  // what lines of costs begin with
constexpr std::size_t kMaxRows = 100000;
constexpr std::size_t kMaxProblems = 100, kMaxLineBytes = 4096;  // bytes of one row

// ---- one field: how it is written, and what may stand in its place ----

/// Quotes a name if needed. A quote or line end inside it becomes a blank: drivers choose names,
/// and the format has no escapes.
std::string quoted(std::string text) {
  std::ranges::replace_if(
      text, [](char c) { return c == '"' || c == '\n' || c == '\r'; }, ' ');
  const bool plain = !text.empty() && text != "*" && text != "-" && text != kCost &&
                     text.find_first_of(" \t#") == std::string::npos;
  return plain ? text : '"' + text + '"';
}

/// `none` stands for no value.
template <typename Value>
std::string write(const Value& value, const char* none) {
  if (value == Value{}) return none;
  if constexpr (std::same_as<Value, std::string>) return quoted(value);
  if constexpr (std::same_as<Value, std::optional<DType>>) return std::string(to_string(*value));
  if constexpr (std::integral<Value>) return fmt::format("{}", value);
  if constexpr (std::floating_point<Value>) return fmt::format("{:.4g}", value);
}

/// A field as it was read; a quoted * or - is text.
struct Token {
  std::string text;
  bool quoted = false;
  bool is(std::string_view none) const { return !quoted && text == none; }
};

template <typename Value>
void read(Value& value, const Token& token, std::string_view field, double most) {
  if constexpr (std::same_as<Value, std::string>) {
    value = token.text;
  } else if constexpr (std::same_as<Value, std::optional<DType>>) {
    value = parse_dtype(token.text);
  } else {
    const char* end = token.text.data() + token.text.size();
    const auto [rest, error] = std::from_chars(token.text.data(), end, value);
    if (error == std::errc{} && rest == end && value > 0 && value <= most) return;
    const char* const wanted = std::integral<Value> ? "number from 1" : "positive number up";
    detail::throw_invalid("{} is '{}', legal: a {} to {:.7g}", field, token.text, wanted, most);
  }
}

// ---- a row: for each kind the one list of its fields in their order ----

constexpr double kMostNumber = 1 << 20;
constexpr double kMostMeasured = detail::kMostMeasured;

/// Calls f(value, name, what stands for no value, largest legal number) for each field.
template <typename Row, typename Function>
void each_field(Row& row, Function&& f) {
  constexpr bool kTile = std::same_as<std::remove_const_t<Row>, TuningRow>;
  f(row.device, "device", "*", 0);
  f(row.driver, "driver", "*", 0);
  if constexpr (kTile) f(row.role, "role", "*", 0);
  if constexpr (!kTile) f(row.kernel, "kernel", "*", 0);
  f(row.head_size, "head_size", "*", kMostNumber);
  f(row.group, "group", "*", kMostNumber);
  f(row.dtype, "dtype", "*", 0);
  f(row.cache_dtype, "cache_dtype", "*", 0);
  if constexpr (kTile) {
    f(row.pages, "pages", "*", 0);
    f(row.variant, "variant", "-", 0);
    f(row.block_rows, "block_rows", "-", kMostNumber);
    f(row.block_kv, "block_kv", "-", kMostNumber);
    f(row.work_group_size, "work_group_size", "-", kMostNumber);
    f(row.time_us, "time_us", "-", kMostMeasured);
    f(row.error, "error", "-", kMostMeasured);
  } else {
    f(row.costs.launch_us, "launch_us", "-", kMostMeasured);
    f(row.costs.task_us, "task_us", "-", kMostMeasured);
    f(row.costs.split_us, "split_us", "-", kMostMeasured);
    f(row.costs.read_gbs, "read_gbs", "-", kMostMeasured);
    f(row.costs.math_gflops, "math_gflops", "-", kMostMeasured);
    f(row.costs.groups, "groups", "-", kMostMeasured);
  }
  f(row.version, "version", "-", 0);
  f(row.date, "date", "-", 0);
}

template <typename Row>
std::size_t num_fields() {
  std::size_t count = 0;
  Row row;
  each_field(row, [&](auto&&...) { ++count; });
  return count;
}

template <typename Row>
std::string format_row(const Row& row, std::string line) {
  each_field(row, [&](const auto& value, std::string_view, const char* none, double) {
    line += fmt::format("{}{}", line.empty() ? "" : " ", write(value, none));
  });
  return line + '\n';
}

/// The words of a line; a quoted one may hold blanks. Throws for a quote without end.
std::vector<Token> split_line(std::string_view line) {
  std::vector<Token> tokens;
  while (true) {
    line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
    if (line.empty() || line.front() == '#') return tokens;
    const bool in_quotes = line.front() == '"';
    if (in_quotes) line.remove_prefix(1);
    const std::size_t end = in_quotes ? line.find('"') : line.find_first_of(" \t\r");
    detail::throw_invalid_if(in_quotes && end == std::string_view::npos, "a quote without its end");
    const std::size_t size = std::min(end, line.size());
    tokens.push_back({std::string(line.substr(0, size)), in_quotes});
    line.remove_prefix(std::min(size + (in_quotes ? 1 : 0), line.size()));
  }
}

/// Throws kInvalidArgument saying what is wrong.
template <typename Row>
Row parse_row(std::span<const Token> tokens) {
  detail::throw_invalid_if(tokens.size() != num_fields<Row>(), "{} fields, legal: {}",
                           tokens.size(), num_fields<Row>());
  Row row;
  std::size_t at = 0;
  each_field(row, [&](auto& value, std::string_view field, std::string_view none, double most) {
    const Token& token = tokens[at++];
    if (!token.is(none)) read(value, token, field, most);
  });
  if (row.device.empty()) detail::throw_invalid("device is missing, legal: a name or a class");
  return row;
}

/// Adds the row of a line that has one. Throws kInvalidArgument saying what is wrong.
void parse_line(std::string_view line, TuningText& result) {
  const std::vector<Token> tokens = split_line(line);
  if (tokens.empty()) return;
  if (tokens.front().is(kCost)) {
    auto row = parse_row<CostRow>(std::span(tokens).subspan(1));
    const std::string fault = detail::cost_fault(row.costs);
    detail::throw_invalid_if(!fault.empty(), "{}", fault);
    result.costs.push_back(std::move(row));
    return;
  }
  auto row = parse_row<TuningRow>(tokens);
  constexpr std::array<std::string_view, 5> kPages = {"", "none", "small", "medium", "large"};
  detail::throw_invalid_if(std::ranges::find(kPages, row.pages) == kPages.end(),
                           "pages is '{}', legal: *, none, small, medium, large", row.pages);
  result.rows.push_back(std::move(row));
}

}  // namespace

std::string format_tuning_row(const TuningRow& row) {
  return format_row(row, {});
}

std::string format_cost_row(const CostRow& row) {
  return format_row(row, std::string(kCost));
}

std::string format_tuning(std::span<const TuningRow> rows, std::span<const CostRow> costs) {
  std::string text = fmt::format("{}\n", kHeader);
  for (const TuningRow& row : rows) text += format_tuning_row(row);
  for (const CostRow& row : costs) text += format_cost_row(row);
  return text;
}

TuningText parse_tuning(std::string_view text, const std::string& name) {
  TuningText result;
  const auto complain = [&](std::size_t line, std::string_view what) {
    if (result.problems.size() == kMaxProblems) return;
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
    if (result.rows.size() + result.costs.size() == kMaxRows) {
      complain(number, fmt::format("more than {} rows", kMaxRows));
      break;
    }
    try {
      detail::throw_invalid_if(end > kMaxLineBytes, "a line of {} bytes, legal: up to {}", end,
                               kMaxLineBytes);
      parse_line(text.substr(0, end), result);
    } catch (const Error& error) {
      complain(number, error.what());
    }
    text.remove_prefix(end + 1);
  }
  return result;
}

}  // namespace clattn
