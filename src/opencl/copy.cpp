#include "opencl/copy.hpp"

#include <clattn/cache_ops.hpp>

#include "base/error.hpp"

namespace clattn {

namespace detail {

MemoryPlace place_of(cl_mem buffer) {
  MemoryPlace place;
  cl_mem whole = nullptr;
  check(clGetMemObjectInfo(buffer, CL_MEM_CONTEXT, sizeof(cl_context), &place.context, nullptr),
        "CL_MEM_CONTEXT");
  check(clGetMemObjectInfo(buffer, CL_MEM_ASSOCIATED_MEMOBJECT, sizeof(cl_mem), &whole, nullptr),
        "CL_MEM_ASSOCIATED_MEMOBJECT");
  place.memory = buffer;
  if (whole == nullptr) return place;
  place.memory = whole;
  check(clGetMemObjectInfo(buffer, CL_MEM_OFFSET, sizeof(place.offset_bytes), &place.offset_bytes,
                           nullptr),
        "CL_MEM_OFFSET");
  return place;
}

void enqueue_copy(cl_command_queue queue, const CopyEnd& source, const CopyEnd& destination,
                  std::size_t size_bytes, Event* event) {
  if (event != nullptr) event->reset();
  cl_event done = nullptr;
  cl_event* const wanted = event == nullptr ? nullptr : &done;
  throw_invalid_if(source.host != nullptr && destination.host != nullptr,
                   "Invalid device combination");
  if (source.host != nullptr) {
    check(clEnqueueWriteBuffer(queue, destination.device, CL_FALSE, destination.offset_bytes,
                               size_bytes, source.host + source.offset_bytes, 0, nullptr, wanted),
          "clEnqueueWriteBuffer");
  } else if (destination.host != nullptr) {
    check(clEnqueueReadBuffer(queue, source.device, CL_FALSE, source.offset_bytes, size_bytes,
                              destination.host + destination.offset_bytes, 0, nullptr, wanted),
          "clEnqueueReadBuffer");
  } else {
    check(clEnqueueCopyBuffer(queue, source.device, destination.device, source.offset_bytes,
                              destination.offset_bytes, size_bytes, 0, nullptr, wanted),
          "clEnqueueCopyBuffer");
  }
  if (event != nullptr) event->reset(done);
}

}  // namespace detail

PinnedMemory::PinnedMemory(const Context& context, std::size_t size_bytes)
    : view_(context.create_queue().map(context.runtime().allocate_pinned(size_bytes),
                                       HostAccess::kReadWrite)) {}

}  // namespace clattn
