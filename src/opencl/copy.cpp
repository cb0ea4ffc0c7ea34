#include "opencl/copy.hpp"

#include <clattn/cache_ops.hpp>

#include "base/error.hpp"

namespace clattn {

namespace detail {

MemoryPlace place_of(cl_mem buffer) {
  MemoryPlace place{.context = memory_value<cl_context>(buffer, CL_MEM_CONTEXT), .memory = buffer};
  if (auto* const whole = memory_value<cl_mem>(buffer, CL_MEM_ASSOCIATED_MEMOBJECT)) {
    place.memory = whole;
    place.offset_bytes = memory_value<std::size_t>(buffer, CL_MEM_OFFSET);
  }
  return place;
}

void require_context(cl_mem buffer, cl_context context, std::string_view name) {
  throw_invalid_if(memory_value<cl_context>(buffer, CL_MEM_CONTEXT) != context,
                   "{}: a buffer of another context, legal: of the layer's", name);
}

void require_context(std::initializer_list<NamedBuffer> buffers, cl_context context) {
  for (const auto& [name, buffer] : buffers) {
    if (buffer != nullptr) require_context(buffer, context, name);
  }
}

void enqueue_copy(cl_command_queue queue, const CopyEnd& source, const CopyEnd& destination,
                  std::size_t size_bytes, Event* event) {
  NewEvent done(event);
  throw_invalid_if(source.host != nullptr && destination.host != nullptr,
                   "Invalid device combination");
  if (source.host != nullptr) {
    check(clEnqueueWriteBuffer(queue, destination.device, CL_FALSE, destination.offset_bytes,
                               size_bytes, source.host + source.offset_bytes, 0, nullptr,
                               done.slot()),
          "clEnqueueWriteBuffer");
  } else if (destination.host != nullptr) {
    check(clEnqueueReadBuffer(queue, source.device, CL_FALSE, source.offset_bytes, size_bytes,
                              destination.host + destination.offset_bytes, 0, nullptr, done.slot()),
          "clEnqueueReadBuffer");
  } else {
    check(clEnqueueCopyBuffer(queue, source.device, destination.device, source.offset_bytes,
                              destination.offset_bytes, size_bytes, 0, nullptr, done.slot()),
          "clEnqueueCopyBuffer");
  }
}

}  // namespace detail

PinnedMemory::PinnedMemory(const Context& context, std::size_t size_bytes)
    : view_(context.create_queue().map(context.runtime().allocate_pinned(size_bytes),
                                       HostAccess::kReadWrite)) {}

}  // namespace clattn
