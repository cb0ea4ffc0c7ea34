#include <utility>

#include "base/error.hpp"
#include "opencl/runtime.hpp"

namespace clattn {

using detail::check;

Buffer Buffer::adopt(cl_mem memory) {
  if (memory == nullptr) detail::throw_invalid("buffer: null");
  const std::size_t size = detail::size_bytes_of(memory);
  check(clRetainMemObject(memory), "clRetainMemObject");
  return {memory, size};
}

Buffer::Buffer(const Buffer& other) : memory_(other.memory_), size_bytes_(other.size_bytes_) {
  if (memory_ != nullptr) check(clRetainMemObject(memory_), "clRetainMemObject");
}
Buffer::Buffer(Buffer&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}
Buffer& Buffer::operator=(const Buffer& other) {
  return *this = Buffer(other);
}
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}
Buffer::~Buffer() {
  if (memory_ != nullptr) clReleaseMemObject(memory_);
}

Event::Event(const Event& other) : event_(other.event_) {
  if (event_ != nullptr) check(clRetainEvent(event_), "clRetainEvent");
}
Event::Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
Event& Event::operator=(const Event& other) {
  return *this = Event(other);
}
Event& Event::operator=(Event&& other) noexcept {
  std::swap(event_, other.event_);
  return *this;
}
Event::~Event() {
  reset();
}

void Event::reset(cl_event event) noexcept {
  if (event_ != nullptr) clReleaseEvent(event_);
  event_ = event;
}

void Event::wait() const {
  if (event_ != nullptr) check(clWaitForEvents(1, &event_), "clWaitForEvents");
}

bool detail::has_ended(const Event& event) noexcept {
  if (!event) return true;
  cl_int status = CL_COMPLETE;
  return clGetEventInfo(event.handle(), CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status,
                        nullptr) == CL_SUCCESS &&
         status <= CL_COMPLETE;  // below: an error
}

std::uint64_t Event::duration_ns() const {
  if (event_ == nullptr) return 0;
  wait();
  const auto time = [this](cl_profiling_info what) {
    cl_ulong value = 0;
    check(clGetEventProfilingInfo(event_, what, sizeof(value), &value, nullptr),
          "reading an event's time (was the queue created with profiling?)");
    return value;
  };
  return time(CL_PROFILING_COMMAND_END) - time(CL_PROFILING_COMMAND_START);
}

}  // namespace clattn
