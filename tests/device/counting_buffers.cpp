#include "device/counting_buffers.hpp"

#include <dlfcn.h>

#include <atomic>
#include <clattn/opencl.hpp>
#include <cstddef>
#include <vector>

static std::atomic<std::size_t> counter = 0, writes = 0;
static std::atomic<bool> dirty = false;

test::DirtyBuffers::DirtyBuffers() {
  dirty = true;
}

test::DirtyBuffers::~DirtyBuffers() {
  dirty = false;
}

std::size_t test::num_buffers() {
  return counter;
}

std::size_t test::num_writes() {
  return writes;
}

extern "C" cl_mem clCreateBuffer(cl_context context, cl_mem_flags flags, std::size_t size,
                                 void* host, cl_int* status) {
  static auto* const create =
      reinterpret_cast<decltype(&clCreateBuffer)>(dlsym(RTLD_NEXT, "clCreateBuffer"));
  ++counter;
  constexpr cl_mem_flags kGiven =
      CL_MEM_USE_HOST_PTR | CL_MEM_ALLOC_HOST_PTR | CL_MEM_COPY_HOST_PTR;
  if (dirty && (flags & kGiven) == 0) {
    std::vector<std::byte> bytes(size, std::byte{0xFF});
    return create(context, flags | CL_MEM_COPY_HOST_PTR, size, bytes.data(), status);
  }
  return create(context, flags, size, host, status);
}

extern "C" cl_int clEnqueueWriteBuffer(cl_command_queue queue, cl_mem buffer, cl_bool blocking,
                                       std::size_t offset, std::size_t size, const void* source,
                                       cl_uint num_events, const cl_event* events,
                                       cl_event* event) {
  static auto* const write =
      reinterpret_cast<decltype(&clEnqueueWriteBuffer)>(dlsym(RTLD_NEXT, "clEnqueueWriteBuffer"));
  ++writes;
  return write(queue, buffer, blocking, offset, size, source, num_events, events, event);
}
