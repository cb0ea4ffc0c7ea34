#pragma once

#include <clattn/opencl.hpp>

#include <memory>
#include <type_traits>

namespace clattn::detail {

template <auto Release>
struct Releaser {
  void operator()(auto* object) const noexcept { Release(object); }
};

/// Owns one reference to a driver object.
template <typename T, auto Release>
using Handle = std::unique_ptr<std::remove_pointer_t<T>, Releaser<Release>>;

using ContextHandle = Handle<cl_context, &clReleaseContext>;
using QueueHandle = Handle<cl_command_queue, &clReleaseCommandQueue>;
using ProgramHandle = Handle<cl_program, &clReleaseProgram>;
using KernelHandle = Handle<cl_kernel, &clReleaseKernel>;
using MemoryHandle = Handle<cl_mem, &clReleaseMemObject>;

}  // namespace clattn::detail
