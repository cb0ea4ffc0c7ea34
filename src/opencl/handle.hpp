#pragma once

#include <clattn/opencl.hpp>

#include <utility>

namespace clattn::detail {

/// Owns one reference to a driver object.
template <typename T, auto Release>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T object) noexcept : object_(object) {}
  Handle(Handle&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Handle() {
    if (object_ != nullptr) Release(object_);
  }
  T get() const noexcept { return object_; }
  T release() noexcept { return std::exchange(object_, nullptr); }
  explicit operator bool() const noexcept { return object_ != nullptr; }

 private:
  T object_ = nullptr;
};

using ContextHandle = Handle<cl_context, &clReleaseContext>;
using QueueHandle = Handle<cl_command_queue, &clReleaseCommandQueue>;
using ProgramHandle = Handle<cl_program, &clReleaseProgram>;
using KernelHandle = Handle<cl_kernel, &clReleaseKernel>;
using MemoryHandle = Handle<cl_mem, &clReleaseMemObject>;

}  // namespace clattn::detail
