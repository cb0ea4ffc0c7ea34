#include <array>
#include <exception>

#include "bindings.hpp"

namespace clattn::python {

namespace {

struct ErrorClass {
  ErrorCode code;
  const char* name;  ///< in clattn/errors.py
};
constexpr std::array kErrorClasses = {
    ErrorClass{ErrorCode::kInvalidArgument, "InvalidArgument"},
    ErrorClass{ErrorCode::kUnsupported, "Unsupported"},
    ErrorClass{ErrorCode::kOpenCL, "OpenCLError"},
    ErrorClass{ErrorCode::kIo, "FileError"},
    ErrorClass{ErrorCode::kOutOfBlocks, "OutOfBlocks"},
};

void raise(const Error& error) {
  const char* name = "Error";
  for (const ErrorClass& row : kErrorClasses) {
    if (row.code == error.code()) name = row.name;
  }
  const nb::object type = nb::module_::import_("clattn.errors").attr(name);
  const nb::object raised = type(error.what());
  raised.attr("cl_code") = error.cl_code();
  PyErr_SetObject(type.ptr(), raised.ptr());
}

}  // namespace

void throw_invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void set_field(nb::handle self, nb::handle field, nb::handle value) {
  if (PyObject_GenericSetAttr(self.ptr(), field.ptr(), value.ptr()) == 0) return;
  nb::python_error error;
  if (!error.matches(PyExc_TypeError)) throw error;
  // "(self) -> int", behind which the field's own comment may stand
  const nb::object getter = nb::getattr(nb::getattr(self.type(), field), "fget");
  const std::string text = nb::cast<std::string>(nb::str(nb::getattr(getter, "__doc__")));
  const std::size_t arrow = text.find("-> ");
  std::string legal = arrow == std::string::npos ? "another type" : text.substr(arrow + 3);
  legal = legal.substr(0, legal.find('\n'));
  throw_invalid(name_of(nb::getattr(self.type(), "__name__")) + "." + name_of(field) + ": " +
                nb::cast<std::string>(nb::repr(value)) + ", legal: " + legal);
}

void bind_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace clattn::python
