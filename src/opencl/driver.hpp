#pragma once

#include <clattn/opencl.hpp>

#include <clattn/context.hpp>
#include <clattn/error.hpp>
#include <memory>
#include <string_view>
#include <type_traits>

// What every call of the driver needs.

namespace clattn::detail {

/// Throws Error(kOpenCL) "`what` failed: CL_NAME (code)" unless status is CL_SUCCESS.
void check(cl_int status, std::string_view what);
/// Whether the driver's compiler refused a source, as it will each time. CL_INVALID_BINARY is
/// NVIDIA's word for what its assembler refuses.
bool is_build_refusal(const Error& error);
/// "CL_INVALID_WORK_GROUP_SIZE" for -54; "unknown" for what has no name.
std::string_view status_name(cl_int status);

template <auto Release>
struct Releaser {
  void operator()(auto* object) const noexcept { Release(object); }
};

/// Owns one reference to a driver object.
template <typename T, auto Release>
using Handle = std::unique_ptr<std::remove_pointer_t<T>, Releaser<Release>>;

using ContextHandle = Handle<cl_context, &clReleaseContext>;
using ProgramHandle = Handle<cl_program, &clReleaseProgram>;
using KernelHandle = Handle<cl_kernel, &clReleaseKernel>;
using MemoryHandle = Handle<cl_mem, &clReleaseMemObject>;

/// The event of a command: empties `event`, if not null, and fills it when the call has ended.
class NewEvent {
 public:
  explicit NewEvent(Event* event) noexcept : event_(event) {
    if (event_ != nullptr) event_->reset();
  }
  NewEvent(const NewEvent&) = delete;
  NewEvent& operator=(const NewEvent&) = delete;
  ~NewEvent() {
    if (event_ != nullptr) event_->reset(made_);
  }
  /// What the driver gets.
  cl_event* slot() noexcept { return event_ == nullptr ? nullptr : &made_; }

 private:
  Event* event_;
  cl_event made_ = nullptr;
};

/// A new in-order queue.
Queue create_queue(cl_context context, cl_device_id device, QueueProfiling profiling);

/// A value that a clGet…Info call of the driver tells `about` an object.
template <typename T, typename Get, typename... About>
T driver_value(std::string_view call, Get get, About... about) {
  T value{};
  // NOLINTNEXTLINE(bugprone-sizeof-expression): a handle's own size is meant
  check(get(about..., sizeof(value), &value, nullptr), call);
  return value;
}
template <typename T>
T device_value(cl_device_id device, cl_device_info what) {
  return driver_value<T>("clGetDeviceInfo", clGetDeviceInfo, device, what);
}
template <typename T>
T memory_value(cl_mem memory, cl_mem_info what) {
  return driver_value<T>("clGetMemObjectInfo", clGetMemObjectInfo, memory, what);
}
template <typename T>
T queue_value(cl_command_queue queue, cl_command_queue_info what) {
  return driver_value<T>("clGetCommandQueueInfo", clGetCommandQueueInfo, queue, what);
}

}  // namespace clattn::detail
