#pragma once

#include <clattn/config_fields.hpp>

#include "bindings.hpp"

// The fields of attention_config.inc as properties of Python's classes.

namespace clattn::python {

/// A value in Python: numbers, flags and lists as they are; names as str.
///@{
template <typename Value>
const Value& to_python(const Value& value) {
  return value;
}
inline std::string to_python(DType value) {
  return to_text(value);
}
inline std::string to_python(const std::optional<CacheFormat>& value) {
  return to_text(value);
}
inline std::string to_python(AttentionType value) {
  return to_text(value);
}
inline std::string to_python(KernelFamily value) {
  return to_text(value);
}
inline std::string to_python(SpanRule value) {
  return to_text(value);
}
///@}

/// A value from Python: names also as objects that print as one (torch.float16). Throws
/// InvalidArgument naming the field.
///@{
template <typename Value>
void from_python(const char* name, nb::handle given, Value& value) {
  // set_field() says what is legal.
  if (!nb::try_cast(given, value)) throw nb::type_error(name);
}
inline void from_python(const char*, nb::handle given, DType& value) {
  value = parse_dtype(name_of(given));
}
inline void from_python(const char*, nb::handle given, std::optional<CacheFormat>& value) {
  value = given.is_none() ? std::nullopt : parse_kv_cache_dtype(name_of(given));
}
inline void from_python(const char*, nb::handle given, AttentionType& value) {
  value = parse_attention_type(name_of(given));
}
inline void from_python(const char*, nb::handle given, KernelFamily& value) {
  value = parse_kernel_family(name_of(given));
}
inline void from_python(const char*, nb::handle given, SpanRule& value) {
  value = parse_span_rule(name_of(given));
}
///@}

/// A property for each field; `config_of(self)` is the configuration that has them.
template <typename Class, typename ConfigOf>
void bind_config_fields(Class& record, ConfigOf config_of) {
  using Self = typename Class::Type;
  for_each_field([&](const auto& row) {
    const auto member = row.member;
    const char* const name = row.name.data();  // a literal: it ends in 0
    record.def_prop_rw(
        name, [=](const Self& self) { return to_python(config_of(self).*member); },
        [=](Self& self, nb::handle value) { from_python(name, value, config_of(self).*member); },
        nb::for_setter(nb::arg().none()), row.doc);
  });
}

}  // namespace clattn::python
