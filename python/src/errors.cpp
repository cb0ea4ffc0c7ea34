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
