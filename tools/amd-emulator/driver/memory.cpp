// Buffers and parts of buffers.
#include <sys/mman.h>

#include <cstring>

#include "driver/answers.hpp"
#include "driver/objects.hpp"
#include "driver/platform.hpp"
#include "machine/ranges.hpp"

namespace amdemu {
namespace {

constexpr std::size_t kPage = 4096;

/// A page that faults lies before and behind every buffer. False: there is no memory.
bool map_memory(_cl_mem& memory) {
  memory.mapping_size = ((memory.size + kPage - 1) & ~(kPage - 1)) + 2 * kPage;
  memory.mapping = mmap(nullptr, memory.mapping_size, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory.mapping == MAP_FAILED) return false;
  memory.data = static_cast<unsigned char*>(memory.mapping) + kPage;
  mprotect(memory.data, memory.mapping_size - 2 * kPage, PROT_READ | PROT_WRITE);
  return true;
}

cl_mem_flags with_default_access(cl_mem_flags flags) {
  constexpr cl_mem_flags kAccess = CL_MEM_READ_WRITE | CL_MEM_WRITE_ONLY | CL_MEM_READ_ONLY;
  return (flags & kAccess) == 0 ? flags | CL_MEM_READ_WRITE : flags;
}

}  // namespace

cl_mem CL_API_CALL CreateBuffer(cl_context context, cl_mem_flags flags, std::size_t size,
                                void* host, cl_int* status) {
  if (context == nullptr) return fail(CL_INVALID_CONTEXT, status);
  if (size == 0 || size > largest_buffer(*context->devices[0]->chip))
    return fail(CL_INVALID_BUFFER_SIZE, status);
  const bool uses_host = (flags & CL_MEM_USE_HOST_PTR) != 0;
  const bool wants_host = uses_host || (flags & CL_MEM_COPY_HOST_PTR) != 0;
  if (wants_host != (host != nullptr)) return fail(CL_INVALID_HOST_PTR, status);
  auto* memory = new _cl_mem;
  memory->context = context, memory->flags = with_default_access(flags), memory->size = size;
  if (uses_host) {  // the caller's memory itself
    memory->host = host, memory->data = static_cast<unsigned char*>(host);
  } else if (!map_memory(*memory)) {
    delete memory;
    return fail(CL_MEM_OBJECT_ALLOCATION_FAILURE, status);
  } else if (host != nullptr) {
    std::memcpy(memory->data, host, size);
  }
  register_range(memory->data, size);
  RetainContext(context);
  return done(memory, status);
}

cl_mem CL_API_CALL CreateSubBuffer(cl_mem parent, cl_mem_flags flags, cl_buffer_create_type,
                                   const void* create, cl_int* status) {
  if (parent == nullptr) return fail(CL_INVALID_MEM_OBJECT, status);
  const auto* region = static_cast<const cl_buffer_region*>(create);
  if (region == nullptr || region->origin > parent->size ||
      region->size > parent->size - region->origin)
    return fail(CL_INVALID_VALUE, status);
  if (region->size == 0) return fail(CL_INVALID_BUFFER_SIZE, status);
  if (region->origin % kBufferAlignment != 0) return fail(CL_MISALIGNED_SUB_BUFFER_OFFSET, status);
  auto* memory = new _cl_mem;
  memory->context = parent->context, memory->parent = parent;
  memory->flags = flags == 0 ? parent->flags : flags;
  memory->size = region->size, memory->origin = region->origin;
  memory->data = parent->data + region->origin;
  if (parent->host != nullptr)
    memory->host = static_cast<unsigned char*>(parent->host) + region->origin;
  RetainMemObject(parent);
  RetainContext(parent->context);
  return done(memory, status);
}

cl_int CL_API_CALL RetainMemObject(cl_mem memory) {
  return retain(memory, CL_INVALID_MEM_OBJECT);
}
cl_int CL_API_CALL ReleaseMemObject(cl_mem memory) {
  if (memory == nullptr) return CL_INVALID_MEM_OBJECT;
  if (!drop(*memory)) return CL_SUCCESS;
  for (auto at = memory->destructors.rbegin(); at != memory->destructors.rend(); ++at)
    at->first(memory, at->second);
  if (memory->parent != nullptr) {
    ReleaseMemObject(memory->parent);
  } else {
    forget_range(memory->data);
    if (memory->mapping != nullptr) munmap(memory->mapping, memory->mapping_size);
  }
  ReleaseContext(memory->context);
  delete memory;
  return CL_SUCCESS;
}
cl_int CL_API_CALL GetMemObjectInfo(cl_mem memory, cl_mem_info what, std::size_t given, void* value,
                                    std::size_t* needed) {
  if (memory == nullptr) return CL_INVALID_MEM_OBJECT;
  const Query answer{given, value, needed};
  switch (what) {
    case CL_MEM_TYPE:
      return answer.is<cl_mem_object_type>(CL_MEM_OBJECT_BUFFER);
    case CL_MEM_FLAGS:
      return answer.is(memory->flags);
    case CL_MEM_SIZE:
      return answer.is(memory->size);
    case CL_MEM_HOST_PTR:
      return answer.is(memory->host);
    case CL_MEM_MAP_COUNT:
      return answer.is<cl_uint>(memory->maps);
    case CL_MEM_REFERENCE_COUNT:
      return answer.is<cl_uint>(memory->references);
    case CL_MEM_CONTEXT:
      return answer.is(memory->context);
    case CL_MEM_ASSOCIATED_MEMOBJECT:
      return answer.is(memory->parent);
    case CL_MEM_OFFSET:
      return answer.is(memory->origin);
    case CL_MEM_USES_SVM_POINTER:
      return answer.is<cl_bool>(CL_FALSE);
    default:
      return CL_INVALID_VALUE;
  }
}
cl_int CL_API_CALL SetMemObjectDestructorCallback(cl_mem memory,
                                                  void(CL_CALLBACK* call)(cl_mem, void*),
                                                  void* user) {
  if (memory == nullptr) return CL_INVALID_MEM_OBJECT;
  if (call == nullptr) return CL_INVALID_VALUE;
  memory->destructors.emplace_back(call, user);
  return CL_SUCCESS;
}

}  // namespace amdemu
