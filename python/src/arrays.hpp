#pragma once

#include <nanobind/ndarray.h>

#include <optional>
#include <span>
#include <vector>

#include "bindings.hpp"

namespace clattn::python {

// ---- from Python -------------------------------------------------------------------------------

/// Numbers of the host, which this keeps.
template <typename T, std::size_t N>
using Values = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Int32s = Values<std::int32_t, 1>;
using Int64s = Values<std::int64_t, 1>;

/// clattn.arrays.numbers(): throws InvalidArgument naming the field.
nb::object converted(nb::handle given, const char* dtype, std::size_t dims, const char* name);

template <typename T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, float>) return "float32";
  if constexpr (std::is_same_v<T, std::uint8_t>) return "uint8";
  return sizeof(T) == 8 ? "int64" : "int32";
}

/// An array, or lists in one another, of N dimensions; copied where its elements have another type
/// or gaps.
template <typename T, std::size_t N = 1>
Values<T, N> numbers(nb::handle given, const char* name) {
  Values<T, N> array;
  if (nb::try_cast(given, array, false)) return array;
  return nb::cast<Values<T, N>>(converted(given, type_name<T>(), N, name));
}

/// As numbers(), of what may be None.
template <typename T, std::size_t N = 1>
std::optional<Values<T, N>> optional_numbers(nb::handle given, const char* name) {
  if (!given.is_valid() || given.is_none()) return std::nullopt;
  return numbers<T, N>(given, name);
}

template <typename Array>
auto span_of(const Array& array) {
  using Value = std::remove_cv_t<std::remove_pointer_t<decltype(array.data())>>;
  return std::span<const Value>(array.data(), array.size());
}
template <typename Array>
auto span_of(const std::optional<Array>& array) {
  return array ? span_of(*array) : decltype(span_of(*array))();
}

/// What a batch or a call is told of each request beyond lengths.
struct RequestLists {
  std::optional<Values<std::uint8_t, 1>> direction;
  std::optional<Int32s> span_start_loc;
  std::optional<Values<std::int32_t, 2>> spans;
  std::optional<Int32s> first_keys;
  std::optional<Int32s> keep_keys;
  std::optional<Int32s> tree_start_loc;
  std::optional<Int32s> tree_parents;

  RequestLists(nb::handle directions, nb::handle span_starts, nb::handle rows, nb::handle firsts,
               nb::handle keeps, nb::handle tree_starts, nb::handle parents);
  /// To a struct of C++, which has the fields under the same names. The arrays stay here.
  template <typename Struct>
  void give(Struct& taken) const {
    for_each_list(
        []<typename Value>(std::span<const Value>& list, const auto& array) {
          // Values of no enumerator are legal in an enum of bytes; the planner refuses them.
          const auto values = span_of(array);
          list = {reinterpret_cast<const Value*>(values.data()), values.size()};
        },
        taken, *this);
  }
};

template <typename T>
std::vector<T> list_of(nb::handle given, const char* name) {
  const Values<T, 1> array = numbers<T>(given, name);
  return {array.data(), array.data() + array.size()};
}

// ---- to Python ---------------------------------------------------------------------------------

/// A NumPy array of any shape.
template <typename T>
using Result = nb::ndarray<nb::numpy, T>;

/// An array that owns its values, of this shape or a row.
template <typename T>
Result<T> array_of(std::vector<T> values, std::initializer_list<std::size_t> shape = {}) {
  auto* const kept = new std::vector<T>(std::move(values));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  if (shape.size() != 0) return Result<T>(kept->data(), shape, owner);
  return Result<T>(kept->data(), {kept->size()}, owner);
}

template <typename T, typename V>
V value_type_of(const std::vector<V> T::*);
template <typename T, typename V>
T class_of(std::vector<V> T::*);

/// A read-only view of a struct's list, which keeps the struct. `Self` is the class that Python
/// knows.
template <auto list, typename Self = decltype(class_of(list))>
auto view_of(const Self& self) {
  using V = typename std::remove_cvref_t<decltype(self.*list)>::value_type;
  const std::vector<V>& values = self.*list;
  return Result<const V>(values.data(), {values.size()}, nb::find(self));
}

/// A view of memory that `owner` keeps.
template <typename T>
Result<const T> view_of_span(std::span<const T> values, nb::handle owner) {
  return Result<const T>(values.data(), {values.size()}, owner);
}

/// `patient` lives at least as long as `nurse`; both are objects of classes of this module.
void keep_alive(nb::handle nurse, nb::handle patient);

}  // namespace clattn::python
