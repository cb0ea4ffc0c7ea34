#include "program/replay/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "program/common/error.hpp"
#include "program/common/text.hpp"

namespace clattn::cli {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kAzureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens";
constexpr std::int64_t kMooncakeBlockTokens = 512;

/// Where a line stands, so that every complaint can say so.
struct Place {
  const std::string& name;
  std::int64_t line = 0;
  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_invalid("{}:{}: {}", name, line, fmt::format(format, std::forward<Args>(args)...));
  }
};

std::int32_t check_tokens(const Place& place, std::string_view field, std::int64_t value,
                          std::int64_t low) {
  if (value < low || value > kMaxTraceTokens) {
    place.fail("{} is {}, legal is {} to {}", field, value, low, kMaxTraceTokens);
  }
  // Every served request samples at least one token, also one that asked for none.
  return static_cast<std::int32_t>(std::max<std::int64_t>(value, 1));
}

/// "2023-11-16 18:15:46.6805900", optionally with "+00:00" or "Z"; nothing if it is anything else.
std::optional<double> parse_timestamp(std::string_view text) {
  for (const std::string_view suffix : {"+00:00", "Z"}) {
    if (text.ends_with(suffix)) text.remove_suffix(suffix.size());
  }
  constexpr std::string_view kPattern = "dddd-dd-dd dd:dd:dd";
  if (text.size() < kPattern.size()) return {};
  for (std::size_t i = 0; i < kPattern.size(); ++i) {
    const bool digit = text[i] >= '0' && text[i] <= '9';
    const bool fits = kPattern[i] == 'd' ? digit : text[i] == kPattern[i] || text[i] == 'T';
    if (!fits) return {};
  }
  const auto number = [&](std::size_t from, std::size_t count) {
    return static_cast<int>(parse_number<std::int64_t>(text.substr(from, count)).value_or(-1));
  };
  const std::chrono::year_month_day date(std::chrono::year(number(0, 4)),
                                         std::chrono::month(static_cast<unsigned>(number(5, 2))),
                                         std::chrono::day(static_cast<unsigned>(number(8, 2))));
  const int hour = number(11, 2), minute = number(14, 2), second = number(17, 2);
  const std::string_view fraction = text.substr(kPattern.size());
  if (!date.ok() || hour > 23 || minute > 59 || second > 60) return {};
  double fraction_s = 0;
  if (!fraction.empty()) {
    const std::string_view digits = fraction.substr(1);
    const auto value = parse_number<std::int64_t>(digits);
    if (fraction[0] != '.' || !value || *value < 0 || digits.size() > 12 || digits[0] == '-') {
      return {};
    }
    fraction_s = static_cast<double>(*value) / std::pow(10.0, static_cast<double>(digits.size()));
  }
  const auto time = std::chrono::sys_days(date) + std::chrono::hours(hour) +
                    std::chrono::minutes(minute) + std::chrono::seconds(second);
  return static_cast<double>(time.time_since_epoch().count()) + fraction_s;
}

TraceRequest parse_azure_line(const Place& place, std::string_view line) {
  const auto columns = std::ranges::count(line, ',') + 1;
  if (columns != 3) place.fail("{} fields, legal is 3 ({})", columns, kAzureHeader);
  const std::size_t first = line.find(',');
  const std::size_t second = line.find(',', first + 1);
  const auto arrival = parse_timestamp(line.substr(0, first));
  if (!arrival) {
    place.fail("TIMESTAMP is '{}', legal is YYYY-MM-DD HH:MM:SS.fraction", line.substr(0, first));
  }
  const auto tokens = [&](std::string_view field, std::string_view text, std::int64_t low) {
    const auto value = parse_number<std::int64_t>(text);
    if (!value) {
      place.fail("{} is '{}', legal is an integer {} to {}", field, text, low, kMaxTraceTokens);
    }
    return check_tokens(place, field, *value, low);
  };
  return {*arrival,
          tokens("ContextTokens", line.substr(first + 1, second - first - 1), 1),
          tokens("GeneratedTokens", line.substr(second + 1), 0),
          {}};
}

bool fits_int64(const Json& value) {
  return value.is_number_integer() &&
         !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX);
}

std::int64_t json_integer(const Place& place, const Json& object, const char* field) {
  const auto found = object.find(field);
  if (found == object.end()) place.fail("field '{}' is missing", field);
  if (!fits_int64(*found)) place.fail("{} is not an integer of 64 bits", field);
  return found->get<std::int64_t>();
}

std::vector<std::int64_t> parse_hash_ids(const Place& place, const Json& object,
                                         std::int64_t prompt_tokens) {
  const auto found = object.find("hash_ids");
  if (found == object.end()) return {};
  const std::int64_t expected = (prompt_tokens + kMooncakeBlockTokens - 1) / kMooncakeBlockTokens;
  if (!found->is_array() || std::cmp_not_equal(found->size(), expected)) {
    place.fail("hash_ids must list {} ids, one per {} of the {} input tokens", expected,
               kMooncakeBlockTokens, prompt_tokens);
  }
  std::vector<std::int64_t> ids;
  ids.reserve(found->size());
  for (const Json& id : *found) {
    if (!fits_int64(id)) {
      place.fail("hash_ids holds something that is not an integer of 64 bits");
    }
    ids.push_back(id.get<std::int64_t>());
  }
  return ids;
}

TraceRequest parse_mooncake_line(const Place& place, std::string_view line) {
  const Json object = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) place.fail("not a JSON object");
  const auto time = object.find("timestamp");
  if (time == object.end()) place.fail("field 'timestamp' is missing");
  if (!time->is_number() || !(std::abs(time->get<double>()) < 1e18)) {
    place.fail("timestamp is not a number of milliseconds");
  }
  TraceRequest request;
  request.arrival_s = time->get<double>() / 1000.0;
  request.prompt_tokens =
      check_tokens(place, "input_length", json_integer(place, object, "input_length"), 1);
  request.output_tokens =
      check_tokens(place, "output_length", json_integer(place, object, "output_length"), 0);
  request.hash_ids = parse_hash_ids(place, object, request.prompt_tokens);
  return request;
}

using LineParser = TraceRequest (*)(const Place&, std::string_view);

/// The first line shows the format; a header line yields no request.
LineParser detect_format(const Place& place, std::string_view line) {
  if (line == kAzureHeader) return parse_azure_line;
  if (line.starts_with('{')) return parse_mooncake_line;
  place.fail("neither the Azure header '{}' nor a JSON object", kAzureHeader);
}

/// std::getline that refuses a line too long to be a request, instead of holding it.
bool read_line(std::istream& input, std::string& line, const Place& place) {
  constexpr std::size_t kMostBytes = 16 << 20;
  std::array<char, 1024> part{};
  for (line.clear();; input.clear()) {  // a part that was filled counts as a failure
    input.getline(part.data(), part.size());
    const bool ended = input.good();  // the last character was the line's end
    const auto count = to_size(input.gcount());
    line.append(part.data(), ended ? count - 1 : count);
    if (line.size() > kMostBytes) place.fail("longer than {} bytes", kMostBytes);
    if (ended) return true;
    if (input.bad()) return false;
    if (input.eof() || count == 0) return !line.empty();
  }
}

struct Quantile {
  double share;
  double tokens;
};

// Azure 2023 conversation trace (Splitwise, ISCA 2024). The 0 % and 100 % ends close the curve at
// that trace's 1 % and at its 99 % value: the extreme 1 % (up to 14 050 tokens) is left out.
constexpr Quantile kContextQuantiles[] = {{0.0, 29},    {0.10, 207},  {0.25, 396},  {0.50, 1020},
                                          {0.75, 1189}, {0.90, 2735}, {0.99, 4142}, {1.0, 4142}};
constexpr Quantile kGeneratedQuantiles[] = {{0.0, 16},   {0.10, 54},  {0.25, 85},  {0.50, 129},
                                            {0.75, 395}, {0.90, 424}, {0.99, 601}, {1.0, 601}};

/// Inverse of the piecewise linear distribution through `quantiles`.
std::int32_t invert_quantiles(std::span<const Quantile> quantiles, double share) {
  std::size_t upper = 1;
  while (upper + 1 < quantiles.size() && quantiles[upper].share < share) ++upper;
  const Quantile& from = quantiles[upper - 1];
  const Quantile& to = quantiles[upper];
  const double inside = (share - from.share) / (to.share - from.share);
  return static_cast<std::int32_t>(std::lround(from.tokens + inside * (to.tokens - from.tokens)));
}

}  // namespace

std::uint64_t mix64(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ (value >> 30U)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27U)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31U);
}

Trace read_trace(std::istream& input, const std::string& name, std::int64_t max_requests) {
  Trace trace{.source = name};
  Place place{name};
  LineParser parse = nullptr;
  double first_s = 0;
  double previous_s = 0;
  std::int64_t count = 0;
  std::string line;
  for (place.line = 1; read_line(input, line, place); ++place.line) {
    std::string_view text = line;
    if (place.line == 1 && text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
    while (!text.empty() && (text.back() == '\r' || text.back() == ' ')) text.remove_suffix(1);
    if (text.empty()) continue;
    if (parse == nullptr) {
      parse = detect_format(place, text);
      if (text == kAzureHeader) continue;
    }
    TraceRequest request = parse(place, text);
    if (count == 0) first_s = previous_s = request.arrival_s;
    if (request.arrival_s < previous_s) {
      place.fail("arrives {} s before the request above; sort the trace by time",
                 previous_s - request.arrival_s);
    }
    previous_s = request.arrival_s;
    request.arrival_s -= first_s;
    if (max_requests == 0 || count < max_requests) trace.requests.push_back(std::move(request));
    ++count;
  }
  if (input.bad()) throw_io("{}: cannot be read", name);
  throw_invalid_if(count == 0, "{}: holds no request", name);
  return trace;
}

Trace read_trace_file(const std::string& path, std::int64_t max_requests) {
  std::ifstream input(path, std::ios::binary);
  // A directory opens but cannot be read: the first peek tells.
  if (!input || (input.peek(), input.bad())) {
    throw_io("{}: cannot be opened for reading", path);
  }
  input.clear();
  return read_trace(input, path, max_requests);
}

Trace make_builtin_trace(std::int64_t num_requests, double requests_per_s, std::uint64_t seed,
                         std::int32_t system_prompt) {
  Trace trace{.source = "built-in profile (Azure 2023 conversation quantiles)"};
  trace.system_prompt = system_prompt;
  if (system_prompt > 0) trace.hash_block_tokens = system_prompt;
  std::uint64_t counter = mix64(seed);
  const auto uniform = [&] { return static_cast<double>(mix64(counter++) >> 11U) * 0x1p-53; };
  double now_s = 0;
  for (std::int64_t i = 0; i < num_requests; ++i) {
    const std::int32_t prompt = invert_quantiles(kContextQuantiles, uniform());
    const std::int32_t output = invert_quantiles(kGeneratedQuantiles, uniform());
    trace.requests.push_back({now_s, prompt, output, {}});
    // The last id stands for the rest of the prompt.
    if (system_prompt > 0) trace.requests.back().hash_ids = {0, i + 1};
    now_s += -std::log1p(-uniform()) / requests_per_s;
  }
  return trace;
}

void scale_lengths(Trace& trace, double factor) {
  const auto scaled = [&](std::int32_t tokens) {
    const double product = std::round(static_cast<double>(tokens) * factor);
    throw_invalid_if(product > static_cast<double>(kMaxTraceTokens),
                     "--length-scale: {} makes {} tokens longer than {}", factor, tokens,
                     kMaxTraceTokens);
    return std::max(1, static_cast<std::int32_t>(product));
  };
  for (TraceRequest& request : trace.requests) {
    request.prompt_tokens = scaled(request.prompt_tokens);
    request.output_tokens = scaled(request.output_tokens);
  }
  trace.hash_block_tokens *= factor;
  if (trace.system_prompt > 0)
    trace.hash_block_tokens = trace.system_prompt = scaled(trace.system_prompt);
}

}  // namespace clattn::cli
