#include "program/run/case_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "files/files.hpp"
#include "program/common/error.hpp"
#include "program/common/text.hpp"

namespace clattn::cli {
namespace {

using nlohmann::json;

/// A value for a message: JSON, short, whatever bytes it holds. Of what can be nested only the kind
/// is told, because dump() calls itself once a level.
std::string shown(const json& value) {
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 40) text = text.substr(0, 37) + "...";
  return text;
}

[[noreturn]] void refuse_value(const std::string& key, std::string_view expected,
                               const json& value) {
  throw_invalid("case.json: {}: expected {}, got {}", key, expected, shown(value));
}

/// Notes every key of the outermost object, and the last of all; throws for a duplicate key, and
/// for nesting deeper than a case has, which would let a file take any amount of memory.
json::parser_callback_t checked_structure(std::set<std::string>& seen, std::string& last) {
  return [&](int depth, json::parse_event_t event, const json& parsed) {
    constexpr int kMostLevels = 16;
    if (depth > kMostLevels) throw_invalid("case.json: nested deeper than {} levels", kMostLevels);
    if (event == json::parse_event_t::key && depth == 1 &&
        !seen.insert(parsed.get<std::string>()).second) {
      throw_invalid("case.json: {}: given more than once", shown(parsed));
    }
    if (event == json::parse_event_t::key && depth == 1) last = parsed.get<std::string>();
    return true;
  };
}

/// Says what is wrong at a byte (from 1) of a text that JSON's grammar ends at, `key` being the
/// last read. Numbers that JSON cannot write are refused as those that it can.
[[noreturn]] void refuse_text(std::string_view text, std::size_t byte, const std::string& key,
                              std::string_view error) {
  constexpr std::string_view kBetween = " \t\r\n,:[]{}";
  const std::string_view before = text.substr(0, byte == 0 ? 0 : byte - 1);
  const std::size_t start = before.find_last_of(kBetween) + 1;  // of none: 0
  std::string_view word = text.substr(start, text.find_first_of(kBetween, start) - start);
  std::string name(word.substr(word.starts_with('-') || word.starts_with('+') ? 1 : 0, 9));
  std::ranges::transform(name, name.begin(), [](char c) { return c | 0x20; });  // to lower case
  if (name == "nan" || name == "inf" || name == "infinity") {
    const std::size_t line_start = text.substr(0, start).rfind('\n') + 1;  // of none: 0
    throw_invalid("case.json: {}: expected a finite number, got {} (line {}, column {})",
                  shown(json(key)), word, std::ranges::count(text.substr(0, start), '\n') + 1,
                  start - line_start + 1);
  }
  throw_invalid("case.json: not valid JSON: {}", error.substr(0, 200));
}

bool is_finite_f32(const json& value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return value.is_number() && std::abs(value.get<double>()) <= kLargest;  // false for NaN
}

template <typename From, typename To>
void widen(const NpyArray& array, std::vector<To>& values) {
  values.resize(to_size(num_elements(array)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    From value{};
    std::memcpy(&value, &array.data[i * sizeof(From)], sizeof(From));
    values[i] = value;
  }
}

bool shape_fits(std::span<const std::int64_t> shape, std::span<const std::int64_t> wanted) {
  return std::ranges::equal(
      shape, wanted, [](std::int64_t have, std::int64_t want) { return want < 0 || have == want; });
}

std::string wanted_text(std::span<const std::int64_t> wanted) {
  std::vector<std::string> extents;
  for (const std::int64_t extent : wanted) {
    extents.push_back(extent < 0 ? "any" : std::to_string(extent));
  }
  return fmt::format("[{}]", fmt::join(extents, ", "));
}

}  // namespace

CaseFile::CaseFile(std::filesystem::path directory) : directory_(std::move(directory)) {
  constexpr std::uintmax_t kLimitBytes = 16 << 20;
  const std::string text = files::read_file(directory_ / "case.json", kLimitBytes);
  std::set<std::string> seen;
  std::string last_key;
  try {
    object_ = json::parse(text, checked_structure(seen, last_key));
  } catch (const json::parse_error& error) {  // its message quotes the last token, however long
    refuse_text(text, error.byte, last_key, error.what());
  } catch (const json::out_of_range& error) {
    throw_invalid("case.json: {}: expected a finite number, got one that is too large: {}",
                  shown(json(last_key)), std::string_view(error.what()).substr(0, 200));
  }
  if (!object_.is_object()) throw_invalid("case.json: expected an object, got {}", shown(object_));
}

void CaseFile::refuse_unknown_keys() const {
  for (const auto& item : object_.items()) {
    if (known_.contains(item.key())) continue;
    throw_invalid("case.json: unknown key {}; this operation knows {}", shown(json(item.key())),
                  fmt::join(known_, ", "));
  }
}

void CaseFile::refuse_unknown_arrays() const {
  std::set<std::string> unknown;  // in an order that does not depend on the file system
  for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
    if (entry.path().extension() != ".npy") continue;
    std::string name = entry.path().stem().string();
    if (!known_arrays_.contains(name)) unknown.insert(std::move(name));
  }
  if (unknown.empty()) return;
  const std::string& name = *unknown.begin();
  const std::string nearest = nearest_name(name, known_arrays_);
  throw_invalid("{}.npy: unknown array{}; with this case.json the operation reads {}", name,
                nearest.empty() ? "" : fmt::format(", is it {}.npy?", nearest),
                known_arrays_.empty() ? "none" : fmt::format("{}", fmt::join(known_arrays_, ", ")));
}

const json* CaseFile::find(const std::string& key) {
  known_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

const json& CaseFile::require(const std::string& key, std::string_view expected) {
  const json* value = find(key);
  if (value == nullptr) throw_invalid("case.json: {}: missing; expected {}", key, expected);
  return *value;
}

bool CaseFile::has(const std::string& key) {
  return find(key) != nullptr;
}

std::int64_t CaseFile::integer(const std::string& key, Range range,
                               std::optional<std::int64_t> fallback) {
  if (fallback && !has(key)) return *fallback;
  const std::string expected = fmt::format("an integer in [{}, {}]", range.low, range.high);
  const json& value = require(key, expected);
  // get<int64_t>() would wrap what only an unsigned 64-bit integer holds.
  const bool fits =
      value.is_number_integer() &&
      (!value.is_number_unsigned() || std::cmp_less_equal(value.get<std::uint64_t>(), INT64_MAX));
  const std::int64_t number = fits ? value.get<std::int64_t>() : 0;
  if (!fits || number < range.low || number > range.high) refuse_value(key, expected, value);
  return number;
}

double CaseFile::number(const std::string& key) {
  const json& value = require(key, "a finite number");
  if (!is_finite_f32(value)) refuse_value(key, "a finite number", value);
  return value.get<double>();
}

bool CaseFile::boolean(const std::string& key, bool fallback) {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) refuse_value(key, "true or false", *value);
  return value->get<bool>();
}

std::string CaseFile::text(const std::string& key, const std::optional<std::string>& fallback) {
  if (fallback && !has(key)) return *fallback;
  const json& value = require(key, "a string");
  if (!value.is_string()) refuse_value(key, "a string", value);
  return value.get<std::string>();
}

std::string CaseFile::choice(const std::string& key, std::span<const std::string_view> names,
                             const std::optional<std::string>& fallback, Spelling* spelt) {
  const std::string value = text(key, fallback);
  std::string name = spelt != nullptr ? spelt(value) : value;
  if (std::ranges::find(names, name) == names.end()) {
    refuse_value(key, fmt::format("one of {}", fmt::join(names, ", ")), json(value));
  }
  return name;
}

std::vector<double> CaseFile::numbers(const std::string& key, std::int64_t count, double fallback) {
  const json* value = find(key);
  if (value == nullptr) return {fallback};
  if (!value->is_array()) return {number(key)};
  const std::string expected = fmt::format("a finite number or a list of {}", count);
  if (std::cmp_not_equal(value->size(), count)) refuse_value(key, expected, *value);
  std::vector<double> result;
  for (const json& element : *value) {
    if (!is_finite_f32(element)) refuse_value(key, expected, *value);
    result.push_back(element.get<double>());
  }
  return result;
}

bool CaseFile::has_array(std::string_view name) const {
  known_arrays_.emplace(name);
  std::error_code ignored;  // a link to nothing is there: reading it tells what is wrong
  return std::filesystem::exists(
      std::filesystem::symlink_status(directory_ / fmt::format("{}.npy", name), ignored));
}

NpyArray CaseFile::array(std::string_view name, std::string_view descr,
                         const Extents& shape) const {
  known_arrays_.emplace(name);
  const auto accept = [&](const NpyArray& array) {
    throw_invalid_if(!descr.empty() && array.descr != descr,
                     "{}.npy: expected element type {}, got {}", name, descr, array.descr);
    throw_invalid_if(!shape_fits(array.shape, shape), "{}.npy: expected shape {}, got {}", name,
                     wanted_text(shape), shape_text(array.shape));
  };
  return read_npy(directory_ / fmt::format("{}.npy", name), accept);
}

std::vector<std::int64_t> CaseFile::indices64(std::string_view name, const Extents& shape) const {
  const NpyArray array = this->array(name, "", shape);
  std::vector<std::int64_t> values;
  if (array.descr == "<i4") {
    widen<std::int32_t>(array, values);
  } else if (array.descr == "<i8") {
    widen<std::int64_t>(array, values);
  } else {
    throw_invalid("{}.npy: expected element type <i4 or <i8, got {}", name, array.descr);
  }
  return values;
}

std::vector<std::int32_t> CaseFile::indices32(std::string_view name, const Extents& shape,
                                              Extents* actual_shape) const {
  if (actual_shape != nullptr) *actual_shape = array(name, "", shape).shape;
  std::vector<std::int32_t> values;
  // Saturation keeps a wrong value wrong, and an unused table entry harmless.
  for (const std::int64_t value : indices64(name, shape)) {
    values.push_back(
        static_cast<std::int32_t>(std::clamp<std::int64_t>(value, INT32_MIN, INT32_MAX)));
  }
  return values;
}

void CaseOutputs::refuse_obstacles(const std::filesystem::path& target) const {
  namespace fs = std::filesystem;
  const auto refuse_obstacle = [&](const std::string& name) {
    std::error_code ignored;
    const fs::path path = target / name;
    if (fs::exists(path, ignored) && !fs::is_regular_file(path, ignored)) {
      throw_io("{}: cannot be written: it is no regular file", path.string());
    }
  };
  for (const auto& [name, array] : arrays_) refuse_obstacle(name);
  for (const auto& [name, object] : objects_) refuse_obstacle(name);
}

const NpyArray* CaseOutputs::find(const std::string& name) const {
  const auto found = arrays_.find(name + ".npy");
  return found == arrays_.end() ? nullptr : &found->second;
}

void CaseOutputs::write(const std::filesystem::path& directory) const {
  refuse_obstacles(directory);
  std::filesystem::create_directories(directory);
  std::vector<files::PendingFile> written;
  for (const auto& [name, array] : arrays_) {
    written.emplace_back(directory / name).write(npy::npy_head(array));
    written.back().write(array.data);
  }
  for (const auto& [name, object] : objects_) {
    const std::string text = object.dump(2, ' ', false, json::error_handler_t::replace) + '\n';
    written.emplace_back(directory / name).write(text);
  }
  for (files::PendingFile& file : written) file.commit();
}

}  // namespace clattn::cli
