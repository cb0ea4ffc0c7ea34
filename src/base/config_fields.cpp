#include <clattn/config_fields.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <utility>

#include "base/checked.hpp"

namespace clattn {

namespace {

constexpr std::string_view kAuto = "auto";

/// Sets a value from a text; false if the text says none.
///@{
template <typename Number>
bool parse_text(std::string_view text, Number& value) {
  return detail::parse_number(text, value);
}

bool parse_text(std::string_view text, bool& value) {
  value = text == "true" || text == "yes" || text == "1";
  return value || text == "false" || text == "no" || text == "0";
}

bool parse_text(std::string_view text, std::vector<float>& values) {
  values.clear();
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    if (!parse_text(text.substr(0, comma), values.emplace_back())) return false;
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return true;
}

bool parse_text(std::string_view text, DType& value) {
  const auto found = find_dtype(text);
  value = found.value_or(value);
  return found.has_value();
}

bool parse_text(std::string_view text, std::optional<CacheFormat>& value) {
  try {
    value = parse_kv_cache_dtype(text);
  } catch (const Error&) {
    return false;  // set_field() names what is legal
  }
  return true;
}

bool parse_text(std::string_view text, AttentionType& value) {
  value = parse_attention_type(text);  // throws naming the legal ones
  return true;
}

bool parse_text(std::string_view text, KernelFamily& value) {
  value = parse_kernel_family(text);
  return true;
}

bool parse_text(std::string_view text, SpanRule& value) {
  value = parse_span_rule(text);
  return true;
}

template <typename Value>
bool parse_text(std::string_view text, std::optional<Value>& value) {
  value.reset();
  return text == kAuto || parse_text(text, value.emplace());
}
///@}

template <typename Value>
std::string or_auto(const std::optional<Value>& value) {
  return value ? to_text(*value) : std::string(kAuto);
}

/// Every number that a value holds, in the type that messages show.
template <typename Value>
auto numbers_of(const Value& value) {
  if constexpr (std::is_same_v<Value, std::vector<float>>)
    return value;
  else if constexpr (std::is_same_v<Value, std::int32_t>)
    return std::vector<double>{static_cast<double>(value)};
  else if constexpr (std::is_same_v<Value, float>)
    return std::vector<float>{value};
  else if constexpr (std::is_same_v<Value, std::optional<float>>)
    return std::vector<float>{value.value_or(0)};
  else
    return std::vector<float>{};
}

bool is_legal(double value, const LegalValues& legal) {
  if (legal.minus_infinity && std::isinf(value) && value < 0) return true;
  return value >= legal.least && value <= legal.most;  // false of NaN
}

/// What comes before the options: they say which layer it is.
bool is_shape(std::string_view name) {
  return name.ends_with("heads") || name == "head_size" || name == "block_size" ||
         name.ends_with("dtype");
}

/// An entry of a list in Markdown, in lines of at most 100 columns.
std::string wrapped(std::string_view text) {
  constexpr std::size_t kColumns = 100;
  std::string lines;
  for (std::string_view indent; !text.empty(); indent = "  ") {
    std::size_t end = text.size();
    const std::size_t room = kColumns - indent.size();
    if (end > room) end = text.rfind(' ', room);
    lines += fmt::format("{}{}\n", indent, text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string uses_of(unsigned uses) {
  constexpr std::pair<field::Use, std::string_view> kNames[] = {
      {field::kKernels, "kernels"},
      {field::kPlan, "plan"},
      {field::kCache, "cache"},
      {field::kArguments, "arguments"},
      {field::kSelection, "choice of backend"}};
  std::vector<std::string_view> names;
  for (const auto& [use, name] : kNames)
    if ((uses & use) != 0) names.push_back(name);
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::string to_text(std::int32_t value) {
  return fmt::format("{}", value);
}
std::string to_text(bool value) {
  return value ? "true" : "false";
}
std::string to_text(float value) {
  return fmt::format("{}", value);
}
std::string to_text(const std::optional<float>& value) {
  return or_auto(value);
}
std::string to_text(const std::vector<float>& values) {
  return fmt::format("{}", fmt::join(values, ","));
}
std::string to_text(DType value) {
  return std::string(to_string(value));
}
std::string to_text(const std::optional<CacheFormat>& value) {
  return value ? std::string(to_string(*value)) : std::string(kAuto);
}
std::string to_text(AttentionType value) {
  return std::string(to_string(value));
}
std::string to_text(KernelFamily value) {
  return std::string(to_string(value));
}
std::string to_text(SpanRule value) {
  return std::string(to_string(value));
}

void set_field(AttentionConfig& config, std::string_view name, std::string_view text) {
  bool found = false;
  std::vector<std::string_view> names;
  for_each_field([&]<typename Value>(const ConfigField<Value>& field) {
    names.push_back(field.name);
    if (field.name != name) return;
    found = true;
    Value value{};
    bool legal = parse_text(text, value);
    if constexpr (std::is_same_v<Value, DType>) legal = legal && !is_quantized(value);
    for (const auto number : numbers_of(value))
      legal = legal && is_legal(static_cast<double>(number), field.legal);
    detail::throw_invalid_if(!legal, "{} is '{}', legal: {}", name, text, field.legal.words);
    config.*field.member = std::move(value);
  });
  detail::throw_invalid_if(!found, "configuration: there is no field '{}', legal: {}", name,
                           fmt::join(names, ", "));
}

std::string to_string(const AttentionConfig& config) {
  std::vector<std::string> shape, options;
  for_each_field([&]<typename Value>(const ConfigField<Value>& field) {
    const Value& value = config.*field.member;
    if (!is_shape(field.name) && !field.is_set(config)) return;
    std::string text = to_text(value);
    if constexpr (std::is_same_v<Value, std::vector<float>>)
      text = fmt::format("[{}]", value.size());
    auto& list = is_shape(field.name) ? shape : options;
    list.push_back(fmt::format("{}={}", field.name, text));
  });
  shape.insert(shape.end(), options.begin(), options.end());
  return fmt::format("{}", fmt::join(shape, ", "));
}

std::vector<std::string> illegal_fields(const AttentionConfig& config) {
  std::vector<std::string> reasons;
  for_each_field([&]<typename Value>(const ConfigField<Value>& field) {
    const Value& value = config.*field.member;
    if constexpr (std::is_same_v<Value, std::vector<float>>) {
      detail::append_if(reasons,
                        !value.empty() && std::cmp_not_equal(value.size(), config.num_heads),
                        "{} holds {} values, supported: num_heads ({}) or none", field.name,
                        value.size(), config.num_heads);
    }
    if constexpr (std::is_same_v<Value, std::optional<CacheFormat>>) {
      const std::string why = value ? why_not(*value) : std::string();
      detail::append_if(reasons, !why.empty(), "{}: {}", field.name, why);
    }
    for (const auto number : numbers_of(value)) {
      if (is_legal(static_cast<double>(number), field.legal)) continue;
      constexpr bool kOneOfMany = std::is_same_v<Value, std::vector<float>>;
      reasons.push_back(fmt::format("{} {} {}, supported: {}", field.name,
                                    kOneOfMany ? "has the value" : "is", number,
                                    field.legal.words));
      return;
    }
  });
  return reasons;
}

std::vector<std::string> fields_not_taken(const AttentionConfig& config, field::Taker taker) {
  std::vector<std::string> names;
  const bool equal_sizes = config.head_size_v == config.head_size;  // the default in other words
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    if ((row.takers & taker) != 0 || !row.is_set(config)) return;
    if (row.name == "head_size_v" && equal_sizes) return;
    names.emplace_back(row.name);
    if (std::is_same_v<Value, AttentionType>) names.back() += ' ' + to_text(config.*row.member);
  });
  return names;
}

std::string configuration_page() {
  std::string table, meanings;
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    const std::string standard = to_text(row.standard);
    table += fmt::format("| `{}` | {} | {} | {} |\n", row.name,
                         standard.empty() ? "none" : standard, row.legal.words, uses_of(row.uses));
    meanings += wrapped(fmt::format("- `{}`: {}.", row.name, row.doc));
  });
  return "# The configuration of a layer\n\n"
         "Made by `clattn options` from the rows of `include/clattn/attention_config.inc`, which "
         "are\n"
         "the fields of `AttentionConfig`, of C's `ClattnLayerConfig`, of Python's "
         "`AttentionConfig`\n"
         "and `AttentionOptions`, and the keys of [cases](cases.md) and of benchmarks'\n"
         "[shapes](benchmark.md#shapes).\n\n"
         "| field | default | legal | decides |\n| --- | --- | --- | --- |\n" +
         table + "\n" + meanings;
}

}  // namespace clattn
