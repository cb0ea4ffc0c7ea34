#pragma once

#include <cstddef>
#include <initializer_list>
#include <string_view>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// One end of a copy: device memory or host memory.
struct CopyEnd {
  cl_mem device = nullptr;
  std::byte* host = nullptr;
  std::size_t offset_bytes = 0;
};

/// Where a buffer lies in the driver's memory: itself, or the buffer that it is a part of.
struct MemoryPlace {
  cl_context context = nullptr;
  cl_mem memory = nullptr;
  std::size_t offset_bytes = 0;
};
MemoryPlace place_of(cl_mem buffer);

/// Throws kInvalidArgument unless the buffer is of this context. The driver is asked each time: it
/// may give a freed buffer's handle to one of another context.
void require_context(cl_mem buffer, cl_context context, std::string_view name);
/// The same of several, without null ones.
struct NamedBuffer {
  std::string_view name;
  cl_mem buffer;
};
void require_context(std::initializer_list<NamedBuffer> buffers, cl_context context);

/// Non-blocking copy; not both ends may be the host's. Host memory must stay alive, and unchanged
/// if it is the source, until `event`.
void enqueue_copy(cl_command_queue queue, const CopyEnd& source, const CopyEnd& destination,
                  std::size_t size_bytes, Event* event);

}  // namespace clattn::detail
