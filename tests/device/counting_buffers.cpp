#include "device/counting_buffers.hpp"

#include <dlfcn.h>

#include <atomic>
#include <clattn/opencl.hpp>

static std::atomic<std::size_t> counter = 0;

std::size_t test::num_buffers() {
  return counter;
}

extern "C" cl_mem clCreateBuffer(cl_context context, cl_mem_flags flags, std::size_t size,
                                 void* host, cl_int* status) {
  static auto* const create =
      reinterpret_cast<decltype(&clCreateBuffer)>(dlsym(RTLD_NEXT, "clCreateBuffer"));
  ++counter;
  return create(context, flags, size, host, status);
}
