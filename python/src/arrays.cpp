#include "arrays.hpp"

namespace clattn::python {

nb::object converted(nb::handle given, const char* dtype, std::size_t dims, const char* name) {
  return nb::module_::import_("clattn.arrays").attr("numbers")(given, dtype, dims, name);
}

RequestLists::RequestLists(nb::handle directions, nb::handle span_starts, nb::handle rows,
                           nb::handle firsts, nb::handle keeps, nb::handle tree_starts,
                           nb::handle parents)
    : direction(optional_numbers<std::uint8_t>(directions, "direction")),
      span_start_loc(optional_numbers<std::int32_t>(span_starts, "span_start_loc")),
      spans(optional_numbers<std::int32_t, 2>(rows, "spans")),
      first_keys(optional_numbers<std::int32_t>(firsts, "first_keys")),
      keep_keys(optional_numbers<std::int32_t>(keeps, "keep_keys")),
      tree_start_loc(optional_numbers<std::int32_t>(tree_starts, "tree_start_loc")),
      tree_parents(optional_numbers<std::int32_t>(parents, "tree_parents")) {
  if (spans && spans->size() != 0 && spans->shape(1) != 2) {
    throw_invalid("spans: rows of " + std::to_string(spans->shape(1)) +
                  ", legal: rows of 2, the first position and one past the last");
  }
}

void keep_alive(nb::handle nurse, nb::handle patient) {
  NB_CALL(keep_alive_py)(NB_CTX, nurse.ptr(), patient.ptr());
}

}  // namespace clattn::python
