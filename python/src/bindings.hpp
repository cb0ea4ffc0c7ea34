#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <optional>
#include <string>
#include <utility>

namespace clattn::python {

namespace nb = nanobind;
// NOLINTNEXTLINE(google-build-using-namespace): "name"_a, as nanobind's users write it
using namespace nb::literals;

// One for each area of the module; module.cpp calls them in an order in which types precede uses.
void bind_errors(nb::module_& module);
void bind_log(nb::module_& module);
void bind_devices(nb::module_& module);
void bind_context(nb::module_& module);
void bind_config(nb::module_& module);
void bind_cache(nb::module_& module);
void bind_steps(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_functions(nb::module_& module);
void bind_backends(nb::module_& module);
void bind_specs(nb::module_& module);
void bind_layer(nb::module_& module);
void bind_groups(nb::module_& module);
void bind_packed(nb::module_& module);
void bind_latent(nb::module_& module);
void bind_cache_ops(nb::module_& module);
void bind_device_steps(nb::module_& module);
void bind_prepare_qkv(nb::module_& module);
void bind_recurrent(nb::module_& module);
void bind_gdn_attn(nb::module_& module);
void bind_cascade(nb::module_& module);
void bind_graph(nb::module_& module);
void bind_session(nb::module_& module);
// host/: what needs no device
void bind_batches(nb::module_& module);
void bind_derived_batches(nb::module_& module);
void bind_block_pool(nb::module_& module);
void bind_tuning(nb::module_& module);

/// Runs `call` while other Python threads run too. It must touch no Python object.
template <typename Call>
decltype(auto) without_gil(Call&& call) {
  const nb::gil_scoped_release released;
  return std::forward<Call>(call)();
}

/// The text of a name, or of an object that prints as one: torch.float32, numpy.dtype("float32").
inline std::string name_of(nb::handle object) {
  // NumPy's scalar types are classes, whose text is no name: np.float16.
  if (PyType_Check(object.ptr())) return nb::str(object.attr("__name__")).c_str();
  return nb::str(object).c_str();
}

/// The name of a type in a cache, where the C++ type says std::nullopt for "none".
inline std::optional<std::string> name_of(std::optional<DType> dtype) {
  if (!dtype) return std::nullopt;
  return std::string(to_string(*dtype));
}

/// A class that is bound already, for further members.
template <typename T>
nb::class_<T> bound() {
  return nb::borrow<nb::class_<T>>(nb::type<T>());
}

/// Throws InvalidArgument.
[[noreturn]] void throw_invalid(const std::string& message);

/// Sets an attribute. What its type refuses is InvalidArgument with the field's name.
void set_field(nb::handle self, nb::handle field, nb::handle value);

/// A struct whose fields are keywords of its constructor: T(field=value, ...).
template <typename T>
class Record : public nb::class_<T> {
 public:
  Record(nb::module_& module, const char* name, const char* doc)
      : nb::class_<T>(module, name, doc) {
    this->def(
        "__init__",
        [name](nb::pointer_and_handle<T> self, const nb::kwargs& fields) {
          new (self.p) T{};
          nb::inst_mark_ready(self.h);
          for (const auto& [field, value] : fields) {
            if (!nb::hasattr(self.h, field)) {
              throw_invalid(std::string(name) + ": no field '" + name_of(field) + "'");
            }
            nb::setattr(self.h, field, value);
          }
        },
        nb::sig("def __init__(self, **fields: object) -> None"));
    this->def(
        "__setattr__",
        [](nb::handle self, nb::handle field, nb::handle value) { set_field(self, field, value); },
        nb::arg(), nb::arg().none(),
        nb::sig("def __setattr__(self, field: str, value: object, /) -> None"));
  }

  /// A field whose enumerators have names in Python.
  template <typename E>
  Record& named(const char* name, E T::*field, E (*parse)(std::string_view), const char* doc) {
    this->def_prop_rw(
        name, [field](const T& self) { return std::string(to_string(self.*field)); },
        [field, parse](T& self, nb::handle value) { self.*field = parse(name_of(value)); }, doc);
    return *this;
  }
  /// The type of a cache: "auto" is the layer's own.
  Record& cache_dtype(const char* name, std::optional<DType> T::*field) {
    this->def_prop_rw(
        name,
        [field](const T& self) {
          return std::string(self.*field ? to_string(*(self.*field)) : "auto");
        },
        [field](T& self, nb::handle value) {
          const auto format = parse_kv_cache_dtype(name_of(value));
          if (format && format->scales_per_row())
            throw Error(ErrorCode::kUnsupported, "kv_cache_dtype " +
                                                     std::string(to_string(*format)) +
                                                     " not supported by MLA: types are");
          self.*field = format ? std::optional(format->k.code) : std::nullopt;
        },
        "Element type of the cache; \"auto\" is dtype.");
    return *this;
  }
};

}  // namespace clattn::python
