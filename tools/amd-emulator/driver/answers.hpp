// How functions of OpenCL answer: values of queries, objects or null with a status.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "driver/api.hpp"

namespace amdemu {

/// Where a clGet...Info call wants its answer.
struct Query {
  std::size_t given;
  void* value;
  std::size_t* needed;

  cl_int bytes(const void* data, std::size_t size) const {
    if (needed != nullptr) *needed = size;
    if (value == nullptr) return CL_SUCCESS;
    if (given < size) return CL_INVALID_VALUE;
    if (size != 0) std::memcpy(value, data, size);
    return CL_SUCCESS;
  }
  /// T is spelt out where the type that OpenCL demands is not the argument's.
  template <class T>
  cl_int is(const T& answer) const {
    return bytes(&answer, sizeof(T));
  }
  template <class T>
  cl_int list(const std::vector<T>& answer) const {
    return bytes(answer.data(), answer.size() * sizeof(T));
  }
  cl_int text(const std::string& answer) const { return bytes(answer.c_str(), answer.size() + 1); }
};

inline std::nullptr_t fail(cl_int code, cl_int* status) {
  if (status != nullptr) *status = code;
  return nullptr;
}
template <class T>
T* done(T* object, cl_int* status) {
  if (status != nullptr) *status = CL_SUCCESS;
  return object;
}

}  // namespace amdemu
