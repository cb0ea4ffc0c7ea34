#pragma once

#include <clattn/attention_config.h>
#include <clattn/config_fields.hpp>
#include <cstdint>
#include <string_view>

#include "base/checked.hpp"

// The fields of attention_config.inc in C structs and back (clattn/attention_config.h).

namespace clattn::detail {

/// Sets a field from its value in C, where 0 and NULL are the default; `num_heads` is the length of
/// lists. Throws kInvalidArgument naming the field.
///@{
inline void from_c(std::string_view name, std::int64_t given, std::int64_t, std::int32_t& value) {
  const bool zero = given == CLATTN_ZERO;
  if (!zero) check_between(name, given, INT32_MIN, INT32_MAX);
  if (given != 0) value = zero ? 0 : static_cast<std::int32_t>(given);
}
inline void from_c(std::string_view, std::int64_t given, std::int64_t, bool& value) {
  value = given != 0 && given != CLATTN_ZERO;
}
inline void from_c(std::string_view, double given, std::int64_t, float& value) {
  value = static_cast<float>(given);
}
inline void from_c(std::string_view, double given, std::int64_t, std::optional<float>& value) {
  if (given != 0) value = static_cast<float>(given);
}
inline void from_c(std::string_view, const float* given, std::int64_t num_heads,
                   std::vector<float>& values) {
  if (given != nullptr && num_heads > 0) values.assign(given, given + num_heads);
}
inline void from_c(std::string_view, const char* given, std::int64_t, DType& value) {
  if (given != nullptr) value = parse_dtype(given);
}
inline void from_c(std::string_view, const char* given, std::int64_t,
                   std::optional<CacheFormat>& value) {
  if (given != nullptr) value = parse_kv_cache_dtype(given);
}
inline void from_c(std::string_view, const char* given, std::int64_t, AttentionType& value) {
  if (given != nullptr) value = parse_attention_type(given);
}
inline void from_c(std::string_view, const char* given, std::int64_t, KernelFamily& value) {
  if (given != nullptr) value = parse_kernel_family(given);
}
inline void from_c(std::string_view, const char* given, std::int64_t, SpanRule& value) {
  if (given != nullptr) value = parse_span_rule(given);
}
///@}

/// The configuration in a C struct that has all fields.
template <typename Given>
AttentionConfig config_from_c(const Given& given) {
  AttentionConfig config;
#define CLATTN_FIELD(kind, name, ...) from_c(#name, given.name, given.num_heads, config.name);
#include <clattn/attention_config.inc>
#undef CLATTN_FIELD
  return config;
}

/// A field's value in C. Texts are constants; lists are the configuration's.
///@{
inline std::int64_t in_c(std::int32_t value) {
  return value;
}
inline std::int64_t in_c(bool value) {
  return value ? 1 : 0;
}
inline double in_c(float value) {
  return static_cast<double>(value);
}
inline double in_c(const std::optional<float>& value) {
  return in_c(value.value_or(0));
}
inline const float* in_c(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}
template <typename Name>
const char* in_c(const Name& value) {
  return to_string(value).data();  // it ends in 0
}
template <typename Name>
const char* in_c(const std::optional<Name>& value) {
  return value ? in_c(*value) : "auto";
}
///@}

/// Sets all fields of a C struct. What it points to is as long-lived as `config`.
template <typename Made>
void config_in_c(const AttentionConfig& config, Made& made) {
#define CLATTN_FIELD(kind, name, ...) made.name = in_c(config.name);
#include <clattn/attention_config.inc>
#undef CLATTN_FIELD
}

}  // namespace clattn::detail
