#include "opencl/copy.hpp"

#include <array>
#include <clattn/cache_ops.hpp>
#include <cstdint>

#include "base/environment.hpp"
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
  struct Known {
    cl_mem buffer = nullptr;
    cl_context context = nullptr;
  };
  constexpr std::uint64_t kSpread = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio
  thread_local std::array<Known, 256> answers;
  const auto bits = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(buffer));
  Known& known = answers.at(bits * kSpread >> 56);
  if (known.buffer == buffer && known.context == context && !environment().debug) return;
  throw_invalid_if(memory_value<cl_context>(buffer, CL_MEM_CONTEXT) != context,
                   "{}: a buffer of another context, legal: of the layer's", name);
  known = {buffer, context};
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
