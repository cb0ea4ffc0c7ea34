#pragma once

#include <clattn/attention_config.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace CLATTN_API clattn {

/// The values that a field may have by itself: what other fields and the backend add are reasons of
/// AttentionBackend::validate_configuration().
struct LegalValues {
  double least = -std::numeric_limits<double>::max();  ///< of numbers
  double most = std::numeric_limits<double>::max();    ///< of numbers
  bool minus_infinity = false;                         ///< whether -inf is legal, too
  std::string_view words = {};                         ///< for messages and documents
  std::string_view array = {};  ///< the array of a case that says that it is set; empty = a key
};

/// How random calls set a field.
struct RandomValues {
  std::int32_t percent =
      0;                  ///< of the calls that set it; 0 = none by a rule that knows the row alone
  std::int32_t most = 0;  ///< the largest value, of numbers
};

/// A row of attention_config.inc.
template <typename Value>
struct ConfigField {
  std::string_view name;           ///< as in every language and file
  Value AttentionConfig::*member;  ///< where it lies
  Value standard;                  ///< its default
  LegalValues legal;               ///< its values
  unsigned uses = 0;               ///< field::Use, joined by |
  unsigned takers = 0;             ///< field::Taker, joined by |
  RandomValues random;             ///< for random calls
  const char* doc = "";            ///< one sentence or more
  /// Whether a configuration has another value than the default.
  bool is_set(const AttentionConfig& config) const { return config.*member != standard; }
};

/// What the rows of attention_config.inc are made of.
namespace field {
/// What the value of a field decides.
enum Use : unsigned {
  kKernels = 1,    ///< which kernels are compiled, and with which options
  kPlan = 2,       ///< how a step is cut: layers that share metadata differ in nothing else of it
  kCache = 4,      ///< the shape of the cache, or which of its pages are needed
  kArguments = 8,  ///< an argument of launches alone
  kSelection = 16  ///< which backends fit; no kernel
};

/// Who takes other values than the default, apart from layers over K and V in pages or tensors.
enum Taker : unsigned {
  kLatent = 1,    ///< layers with use_mla
  kPacked = 2,    ///< PagedAttention over x-packed caches
  kPlugins = 4,   ///< backends in shared objects
  kCascades = 8,  ///< CascadeAttention
  kAll = 15       ///< all of them
};

/// What a row says of its values.
///@{
constexpr LegalValues any(std::string_view words) {
  return {.words = words};
}
constexpr LegalValues finite(std::string_view words) {
  return {.words = words};
}
constexpr LegalValues between(double least, double most, std::string_view words) {
  return {.least = least, .most = most, .words = words};
}
constexpr LegalValues at_least(double least, std::string_view words) {
  return {.least = least, .words = words};
}
constexpr LegalValues not_negative(std::string_view words) {
  return at_least(0, words);
}
constexpr LegalValues finite_or_minus_infinity(std::string_view words) {
  return {.minus_infinity = true, .words = words};
}
constexpr LegalValues brings(std::string_view array) {
  return {.words = "true or false", .array = array};
}
constexpr RandomValues random(std::int32_t percent, std::int32_t most) {
  return {percent, most};
}
constexpr RandomValues never() {
  return {};
}
///@}
}  // namespace field

/// Calls `visit` with the ConfigField of each field, in the order of the rows.
template <typename Visit>
void for_each_field(Visit&& visit) {
  using namespace field;  // NOLINT(google-build-using-namespace): what the rows are made of
#define CLATTN_FIELD(kind, name, standard, legal, uses, takers, random, doc)                 \
  visit(ConfigField<config_kind::kind>{#name, &AttentionConfig::name, standard, legal, uses, \
                                       takers, random, doc});
#include <clattn/attention_config.inc>
#undef CLATTN_FIELD
}

/// A field's value as text: a number, "true", a name, "auto" for nullopt, "0.5,0.25" for a list.
///@{
std::string to_text(std::int32_t value);
std::string to_text(bool value);
std::string to_text(float value);
std::string to_text(const std::optional<float>& value);
std::string to_text(const std::vector<float>& values);
std::string to_text(DType value);
std::string to_text(const std::optional<CacheFormat>& value);
std::string to_text(AttentionType value);
std::string to_text(KernelFamily value);
std::string to_text(SpanRule value);
///@}

/// The same as JSON: null for nullopt, names in quotes, and NaN and infinities, which JSON does not
/// know, in quotes, too.
template <typename Value>
std::string json_text(const Value& value) {
  const std::string text = to_text(value);
  if (text == "auto" && !std::is_same_v<Value, KernelFamily>) return "null";
  const bool is_number = !text.empty() && (text.find_first_of("0123456789") <= 1) &&
                         text.find_first_not_of("+-.0123456789e") == std::string::npos;
  return is_number || std::is_same_v<Value, bool> ? text : '"' + text + '"';
}

/// Sets the field of this name from a text as to_text() writes it ("yes" and "no" are flags, too).
/// Throws kInvalidArgument naming the field, the text and what is legal, or the fields that there
/// are. Whether a backend takes the value is for validate_configuration() to say.
void set_field(AttentionConfig& config, std::string_view name, std::string_view text);

/// For people: "num_heads=8, head_size=64, scale=0.5": heads, sizes and types, and what
/// else is set; of a list its length alone.
std::string to_string(const AttentionConfig& config);

/// The fields whose own values are illegal, one sentence each, and nothing about what fields mean
/// together.
std::vector<std::string> illegal_fields(const AttentionConfig& config);

/// The names of the fields that are set and that `taker` does not take; attn_type with its value.
std::vector<std::string> fields_not_taken(const AttentionConfig& config, field::Taker taker);

/// Whether cases of attention have a key for a field of this type: it is not in an array, not for
/// use_mla alone, and decides more than the choice of a backend.
template <typename Value>
bool is_case_key(const ConfigField<Value>& row) {
  return row.legal.array.empty() && !std::is_same_v<Value, std::vector<float>> &&
         row.uses != field::kSelection && row.name != "use_mla" && row.name != "rope_dim";
}

/// A page about all fields in Markdown: docs/configuration.md.
std::string configuration_page();

}  // namespace clattn
